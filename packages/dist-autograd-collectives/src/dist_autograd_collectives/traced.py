"""The linear collectives as operators that ``torch.compile`` sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dist_autograd_collectives.calls import Call, Members, Tensors, padded_parts, splits_to_root
from dist_autograd_collectives.connecting import zeros_after
from dist_autograd_collectives.linear_operator import linear_operator
from dist_autograd_collectives.local import local_result, needs_others
from dist_autograd_collectives.storage_dtypes import GLOO_DTYPES
from dist_utils.torch_compat import traceable_collective

__all__ = ["linear"]

_SMALL_BYTES = 64 << 10
"""Up to this size a sum for one rank is run as a sum for all: twice the bytes, but one message less."""


def linear(tensors: Tensors, call: Call) -> Tensors:
    """Run a linear collective on joined parts: the traceable collectives take and return one tensor."""
    if not (call.separate_input or call.separate_output):
        return (_traced(tensors[0], call),)
    if call.name == "exchange":
        whole = torch.cat(tensors) if call.separate_input else tensors[0]
        received = _traced(whole, _joined(call, call.input_splits, call.output_splits))
        return torch.split(received, list(call.output_splits)) if call.separate_output else (received,)
    # Here all parts have the same shape; they become rows.
    to_root, from_all = splits_to_root(1, call.who, call.root)
    at_root = call.who.rank == call.root
    if call.name == "scatter":
        rows = torch.stack(tensors) if at_root else torch.stack(tensors)[:0]
        return (_traced(rows, _joined(call, from_all, to_root)).squeeze(0),)
    if call.name == "gather":
        rows = _traced(tensors[0].unsqueeze(0), _joined(call, to_root, from_all))
        return rows.unbind(0) if at_root else tuple(zeros_after(rows, tensors[0]) for _ in from_all)
    if call.separate_input:
        return (_traced(torch.stack(tensors), _joined(call)).squeeze(0),)
    return _traced(tensors[0].unsqueeze(0), _joined(call)).unbind(0)


def _joined(call: Call, input_splits: tuple[int, ...] = (), output_splits: tuple[int, ...] = ()) -> Call:
    return Call(call.kind, call.who, call.title, call.root, input_splits, output_splits)


def _traced(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    return _operator(tensor, *_arguments(call))


def _arguments(call: Call) -> tuple[Any, ...]:
    """Return a call as an operator's arguments; its inverse is :func:`_call`."""
    who = call.who
    return (
        call.kind,
        who.name,
        who.size,
        who.rank,
        call.root,
        list(call.input_splits),
        list(call.output_splits),
    )


def _call(
    kind: str,
    group: str,
    size: int,
    rank: int,
    root: int,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
) -> Call:
    who = Members(None, group, size, rank)
    return Call(kind, who, "a compiled collective", root, tuple(input_splits), tuple(output_splits))


def _compute(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    call, x = _call(*arguments), tensor.contiguous()
    return _run(x, call) if needs_others(call) else local_result((x,), call)[0]


def _transposed(*arguments: Any) -> tuple[Any, ...]:
    return _arguments(_call(*arguments).transposed())


_operator = linear_operator(
    "dist_autograd_collectives::linear",
    "str kind, str group, int size, int rank, int root, SymInt[] input_splits, SymInt[] output_splits",
    _compute,
    _transposed,
)
"""One operator for all collectives, so that compiled transforms find its rules (see linear_operator)."""


def _run(x: torch.Tensor, call: Call) -> torch.Tensor:
    if x.dtype in GLOO_DTYPES:
        return _run_as_it_is(x, call)
    if call.name in ("all_reduce", "reduce", "reduce_scatter"):
        return _sum_of_others(x, call)
    # Data that is only moved goes as bytes, which every backend supports: one more dimension, at the end.
    data = x.unsqueeze(-1).view(torch.uint8)
    moved = _run_as_it_is(data, call)
    return moved.view(x.dtype).squeeze(-1)


def _sum_of_others(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Sum a dtype that the backend lacks in a wider one; integers wrap around as usual."""
    wide = torch.float32 if x.dtype.is_floating_point else torch.int64
    return _run_as_it_is(x.to(wide), call).to(x.dtype)


def _run_as_it_is(x: torch.Tensor, call: Call) -> torch.Tensor:
    name, who = call.name, call.who
    if name == "all_reduce":
        return traceable_collective("all_reduce", x, "sum", who.name)
    if name == "broadcast":
        return traceable_collective("broadcast", x, call.root, who.name)
    if name == "reduce":
        return _reduce(x, who, call.root)
    if name == "all_gather":
        return traceable_collective("all_gather_into_tensor", x, who.size, who.name)
    if name == "reduce_scatter":
        return traceable_collective("reduce_scatter_tensor", x, "sum", who.size, who.name)
    # Also a gather or a scatter: the traceable collectives have neither.
    return _exchange(x, call.input_splits, call.output_splits, who)


def _exchange(
    x: torch.Tensor, input_splits: tuple[int, ...], output_splits: tuple[int, ...], who: Members
) -> torch.Tensor:
    equal = [x.shape[0] // who.size] * who.size
    splits = list(output_splits) or equal, list(input_splits) or equal
    return traceable_collective("all_to_all_single", x, *splits, who.name)


def _reduce(x: torch.Tensor, who: Members, root: int) -> torch.Tensor:
    """Sum to one rank in two steps that send as few bytes: the traceable collectives have no reduce."""
    if x.numel() * x.element_size() <= _SMALL_BYTES:  # nbytes cannot be traced with symbolic shapes
        total = traceable_collective("all_reduce", x, "sum", who.name)
    else:
        parts = padded_parts(x, who)
        part = traceable_collective("reduce_scatter_tensor", parts, "sum", who.size, who.name).flatten()
        total = _exchange(part, *splits_to_root(part.numel(), who, root), who)
    if who.rank == root:
        return total.flatten()[: x.numel()].view(x.shape)
    return zeros_after(total, x)
