"""The settings of a hook: its group, its wire dtype, and how to sum."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks.payload import Clamp
from dist_utils import GroupLike, OrderedWorker, resolve_group
from dist_utils.comm_hooks import BucketWatch
from dist_utils.process_groups import group_of_model

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Accumulate", "CompressState", "HookState"]

Accumulate: TypeAlias = Literal["wire", "fp32"]

WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CompressState:
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

    A pickled state leaves out its process group, as PyTorch's own hook states do. A warning says so, and the
    copy uses WORLD.

    Example:
        >>> state = CompressState(accumulate="fp32")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, fp16_compress_hook)  # doctest: +SKIP
    """

    _watch: BucketWatch | None = None  # a default for states pickled before it existed

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: Accumulate = "wire",
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
        self._group = None if process_group is None else resolve_group(process_group)
        self.wire_dtype = wire_dtype
        self.accumulate: Accumulate = accumulate
        self.saturate = saturate
        self._worker: OrderedWorker | None = None
        # A tensor where the gradients are, because counting on a GPU must not wait for it.
        self._saturated: torch.Tensor | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group whose ranks average."""
        return resolve_group(self._group)

    @property
    def worker(self) -> OrderedWorker:
        """The worker for jobs of several collectives; made at first use."""
        group = self.process_group
        if self._worker is None or self._worker.process_group is not group:
            self._worker = OrderedWorker(group, name="CompressState", terms=self.terms)
        return self._worker

    @property
    def saturated(self) -> int:
        """How many values this rank has clamped in finished backward passes."""
        return 0 if self._saturated is None else int(self._saturated.item())

    def close(self) -> None:
        """End the thread and the private group of ``accumulate="fp32"``; a later bucket makes new ones.

        Otherwise they end with the state, or with ``destroy_process_group``. After an error in
        communication, call this on every rank to make a fresh start.
        """
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Take a model's process group, or check that the state's own has the same ranks.

        A hook cannot know the group of its model: without this call, a state of another group averages over
        that one.

        If two backward passes of the model end and the hook has got no bucket, a warning says so: the hook is
        not registered with this module, or the framework that was told to register it has ignored it.

        Args:
            ddp: The ``DistributedDataParallel`` module that the state is for.

        Returns:
            The state itself.

        Raises:
            TypeError: ``ddp`` is not a ``DistributedDataParallel`` module.
            ValueError: The model averages over other ranks than this state.

        Example:
            >>> ddp.register_comm_hook(CompressState().bind(ddp), fp16_compress_hook)  # doctest: +SKIP
        """
        self._group = group_of_model(ddp, self._group)
        self.bucket_came()  # stop expecting buckets of an earlier model
        self._watch = BucketWatch(ddp, type(self).__name__)
        return self

    def bucket_came(self) -> None:
        """Record that a bucket of the model has come, so the hook is in use."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def terms(self) -> dict[str, object]:
        """Return the options that must be identical on all ranks."""
        return {"wire_dtype": self.wire_dtype, "accumulate": self.accumulate, "saturate": self.saturate}

    def sums_in_fp32(self, wire_dtype: torch.dtype) -> bool:
        """Return whether shares in ``wire_dtype`` are summed in fp32; wider ones need no help."""
        return self.accumulate == "fp32" and wire_dtype.itemsize == 2

    def clamp(self, limit: float) -> Clamp | None:
        """Return a function that clamps finite values at ``limit`` and counts them, if ``saturate``."""
        if not self.saturate:
            return None

        def clamp(values: torch.Tensor) -> torch.Tensor:
            excess = (values.abs() > limit) & values.isfinite()
            if self._saturated is None:
                self._saturated = torch.zeros((), dtype=torch.int64, device=values.device)
            self._saturated += excess.sum()
            return torch.where(excess, values.clamp(-limit, limit), values)

        return clamp

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            warnings.warn(
                "a CompressState pickles without its process group; the copy uses WORLD", stacklevel=2
            )
        return {**self.__dict__, "_group": None, "_worker": None, "_watch": None}


HookState: TypeAlias = dist.ProcessGroup | DeviceMesh | CompressState | None
"""The first argument of every hook here."""


def as_state(state: HookState) -> CompressState:
    """Return ``state`` itself, or a state with default options for the group that it names."""
    return state if isinstance(state, CompressState) else CompressState(state)
