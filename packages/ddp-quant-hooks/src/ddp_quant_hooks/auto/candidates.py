"""The candidates of a choice: hooks with their states, and what is known of them before any is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_compress_hooks import CompressState, allreduce_hook, bf16_compress_hook
from ddp_quant_hooks.hook import quantized_allreduce_hook
from ddp_quant_hooks.states import AveragingState, QuantizedAllreduceState
from dist_utils import GroupLike, resolve_group
from dist_utils.comm_hooks import HookState
from dist_utils.torch_compat import GradBucket


@dataclass(frozen=True)
class Candidate:
    """A communication hook with its first argument.

    Attributes:
        state: The first argument.
        hook: The hook.
        share_of_bytes: What it sends of the bytes of a bucket around a ring, if the state does not count
            them.
    """

    state: Any
    hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
    share_of_bytes: float = 1.0

    @property
    def averaging(self) -> AveragingState | None:
        """The state, if it counts bytes and may have residuals."""
        return self.state if isinstance(self.state, AveragingState) else None

    @property
    def bound(self) -> HookState | None:
        """The state, if it can be bound to a model and closed."""
        return self.state if isinstance(self.state, HookState) else None

    @property
    def least_error(self) -> float:
        """The smallest relative error that its averages are expected to have."""
        return 0.0 if self.averaging is None else self.averaging.least_error

    def ranks(self) -> list[int] | None:
        """Return the global ranks over which it averages; ``None`` if that is not known."""
        group = getattr(self.state, "process_group", self.state)
        if group is None or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
            return dist.get_process_group_ranks(resolve_group(group))
        return None

    def terms(self) -> tuple[str, str]:
        """Return what must be equal on all ranks; options are compared by the state itself."""
        return getattr(self.hook, "__qualname__", type(self.hook).__qualname__), type(self.state).__name__

    def close(self) -> None:
        """End the thread and the private group of its state, which a user may go on to use elsewhere."""
        if self.averaging is not None:
            self.averaging.average.skips_first_steps = False
        if self.bound is not None:
            self.bound.close()


def default_candidates(process_group: GroupLike = None) -> dict[str, Candidate]:
    """Return the hooks that are worth trying, by name, from the most exact to the fewest bytes.

    Args:
        process_group: The process group of the model, as in :func:`dist_utils.resolve_group`; ``None`` is
            looked up when used.

    Raises:
        TypeError, ValueError: As the states.
    """
    return {
        "fp32": Candidate(CompressState(process_group), allreduce_hook),
        "bf16": Candidate(CompressState(process_group), bf16_compress_hook, share_of_bytes=0.5),
        "8 bits": Candidate(QuantizedAllreduceState(process_group), quantized_allreduce_hook),
        "4 bits": Candidate(QuantizedAllreduceState(process_group, bits=4), quantized_allreduce_hook),
    }


def check_candidates(candidates: object) -> dict[str, Candidate]:
    """Return a user's pairs of a state and a hook as candidates.

    Raises:
        TypeError: They are something else.
        ValueError: There is none.
    """
    if not isinstance(candidates, Mapping):
        raise TypeError(f"candidates must be a mapping of names, got {type(candidates).__name__}")
    if not candidates:
        raise ValueError("candidates must have at least one hook")
    for name, pair in candidates.items():
        both = isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])
        if not (isinstance(name, str) and both):
            raise TypeError(f"candidates must be pairs of a state and a hook by name, got {name!r}: {pair!r}")
    return {name: Candidate(state, hook) for name, (state, hook) in candidates.items()}
