"""The settings of a hook: its group, its wire dtype, and how to sum."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dist_utils import GroupLike, resolve_group
from dist_utils.comm_hooks import HookState

Clamp: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
"""Brings finite values into ``[-limit, limit]``."""

WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CompressState(HookState):
    """Options of a hook, given to ``register_comm_hook`` instead of a process group.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD, looked up
            when used.
        wire_dtype: What :func:`~ddp_compress_hooks.compress_hook` sends: ``torch.float16``,
            ``torch.bfloat16``, ``torch.float32``, or ``None`` for the bucket's own dtype. The hooks with
            a dtype in their name accept only that one or ``None``.
        accumulate: ``"wire"`` lets the backend's all-reduce sum in the wire dtype, with a rounding at
            every step. ``"fp32"`` sends the same number of 16-bit values but sums them in fp32, with
            one rounding.
        saturate: Clamp a finite value that the wire dtype cannot hold to the largest that it can, and
            count it in :attr:`saturated`, instead of sending an infinity. NaN and infinities of the
            gradient itself stay. With ``"wire"`` every rank's share is clamped at 1/W of the range, so
            that no partial sum overflows either.

    Raises:
        TypeError: ``process_group`` is not a group, ``wire_dtype`` is not a dtype, or ``saturate`` is not a
            bool.
        ValueError: This rank is not a member of the group, or an option has an unknown value.

    All ranks must have the same options: they are compared before the first bucket.

    Example:
        >>> state = CompressState(accumulate="fp32")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, fp16_compress_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: Literal["wire", "fp32"] = "wire",
        saturate: bool = False,
    ) -> None:
        if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
            raise TypeError(f"wire_dtype must be a torch.dtype or None, got {wire_dtype!r}")
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype must be one of {WIRE_DTYPES} or None, got {wire_dtype}")
        if accumulate not in ("wire", "fp32"):
            raise ValueError(f"accumulate must be 'wire' or 'fp32', got {accumulate!r}")
        if not isinstance(saturate, bool):
            raise TypeError(f"saturate must be True or False, got {saturate!r}")
        super().__init__(process_group)
        self.wire_dtype = wire_dtype
        self.accumulate = accumulate
        self.saturate = saturate
        # Tensors where the gradients are, because counting on a GPU must not wait for it.
        self._saturated: dict[torch.device, torch.Tensor] = {}

    @property
    def saturated(self) -> int:
        """How many values this rank has clamped in finished backward passes."""
        return sum(int(count.item()) for count in self._saturated.values())

    def terms(self) -> dict[str, object]:
        """Return the options that must be identical on all ranks."""
        return {"wire_dtype": self.wire_dtype, "accumulate": self.accumulate, "saturate": self.saturate}

    def sums_in_fp32(self, wire_dtype: torch.dtype) -> bool:
        """Return whether shares in ``wire_dtype`` are summed in fp32; wider ones need no help."""
        return self.accumulate == "fp32" and wire_dtype.itemsize == 2

    @property
    def clamp(self) -> Clamp | None:
        """A function that clamps finite values at a limit and counts them, if ``saturate``."""
        return self._clamp if self.saturate else None

    def _clamp(self, values: torch.Tensor, limit: float) -> torch.Tensor:
        excess = (values.abs() > limit) & values.isfinite()
        if values.device not in self._saturated:
            self._saturated[values.device] = torch.zeros((), dtype=torch.int64, device=values.device)
        self._saturated[values.device] += excess.sum()
        return torch.where(excess, values.clamp(-limit, limit), values)


GroupOrState: TypeAlias = dist.ProcessGroup | DeviceMesh | CompressState | None
"""The first argument of every hook here."""


class _DefaultState(CompressState):
    """Default options of a group that was given instead of a state, which remember what ranks agreed on."""

    def fail(self, error: BaseException) -> None:
        """Forget it: nobody could close this state, which keeps only refusals."""


_DefaultState.__name__ = CompressState.__name__  # by which ranks compare it, and which errors tell

_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, CompressState] = weakref.WeakKeyDictionary()


def as_state(state: GroupOrState) -> CompressState:
    """Return ``state`` itself, or the state with default options of the group that it names."""
    if isinstance(state, CompressState):
        return state
    if torch.compiler.is_dynamo_compiling():  # it cannot trace a table, and a graph compares nothing
        return _DefaultState(state)
    group = resolve_group(state)
    return _of_groups.get(group) or _of_groups.setdefault(group, _DefaultState(group))
