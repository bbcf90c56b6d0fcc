"""The communication hooks to choose from, each with its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ddp_compress_hooks import allreduce_hook, bf16_compress_hook
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.hooks import quantized_allreduce_hook
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import GroupLike, resolve_group
from dist_utils.torch_compat import GradBucket

__all__ = ["Candidate", "default_candidates"]


class Candidate(NamedTuple):
    """A communication hook with its first argument, in the order of ``register_comm_hook``."""

    state: Any
    hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]


def default_candidates(
    process_group: GroupLike = None, *, mesh: DeviceMesh | None = None
) -> dict[str, Candidate]:
    """Return the hooks that are worth trying, by name, from the most exact to the fewest bytes.

    Args:
        process_group: The process group of the model, as in :func:`dist_utils.resolve_group`; ``None`` is
            looked up when used.
        mesh: Nodes first, ranks in a node second: then also 8 and 4 bits between nodes only.

    Raises:
        TypeError, ValueError: As the states.
    """
    group = None if process_group is None else resolve_group(process_group)
    found = {
        "fp32": Candidate(group, allreduce_hook),
        "bf16": Candidate(group, bf16_compress_hook),
        "8 bits": Candidate(QuantizedAllreduceState(group), quantized_allreduce_hook),
        "4 bits": Candidate(QuantizedAllreduceState(group, bits=4), quantized_allreduce_hook),
    }
    if mesh is not None:
        for bits in (8, 4):
            state = HierarchicalAllreduceState(group, mesh=mesh, bits=bits)
            found[f"{bits} bits between nodes"] = Candidate(state, quantized_allreduce_hook)
    return found
