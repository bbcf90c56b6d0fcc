"""The linear collectives as operators that ``torch.compile`` sees."""

from __future__ import annotations

from typing import Any

import torch

from dist_autograd_collectives.calls import Call, Members, Wait, padded_parts, splits_to_root
from dist_autograd_collectives.connecting import zeros_after
from dist_utils.torch_compat import traceable_collectives

__all__ = ["begin"]

_SMALL_BYTES = 64 << 10
"""Up to here a sum for one rank is sent as a sum for all: twice the bytes, but one message less."""


def begin(name: str, x: torch.Tensor, call: Call) -> Wait:
    """Put a collective of two ranks or more into the graph; when it runs and is waited for is the compiler's."""
    result = _run(name, x, call)
    return lambda: result


def _run(name: str, x: torch.Tensor, call: Call) -> torch.Tensor:
    who = call.who
    if name == "all_gather":
        return _send(traceable_collectives.all_gather_into_tensor, x, who.size, who.name)
    if name == "reduce_scatter":
        return _send(traceable_collectives.reduce_scatter_tensor, x, "sum", who.size, who.name)
    if name == "all_reduce":
        return _send(traceable_collectives.all_reduce, x, "sum", who.name)
    if name == "broadcast":
        return _send(traceable_collectives.broadcast, x, call.root, who.name)
    if name == "reduce":
        return _reduce(x, who, call.root)
    # A gather and a scatter too: the traceable collectives have neither.
    return _exchange(x, call.input_splits, call.output_splits, who)


def _send(collective: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = traceable_collectives.wait_tensor(collective(x, *arguments))
    return result


def _exchange(
    x: torch.Tensor, input_splits: tuple[int, ...], output_splits: tuple[int, ...], who: Members
) -> torch.Tensor:
    splits = list(output_splits), list(input_splits)
    return _send(traceable_collectives.all_to_all_single, x, *splits, who.name)


def _reduce(x: torch.Tensor, who: Members, root: int) -> torch.Tensor:
    """Sum to one rank, in two steps, which send as little: the traceable collectives have no reduce."""
    if x.nbytes <= _SMALL_BYTES:
        total = _send(traceable_collectives.all_reduce, x, "sum", who.name)
    else:
        parts = padded_parts(x, who)
        part = _send(traceable_collectives.reduce_scatter_tensor, parts, "sum", who.size, who.name).flatten()
        total = _exchange(part, *splits_to_root(part.numel(), who, root), who)
    if who.rank == root:
        return total.flatten()[: x.numel()].view(x.shape)
    return zeros_after(total, x)
