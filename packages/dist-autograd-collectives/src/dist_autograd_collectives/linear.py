"""The linear collectives, each with its transpose: what every gradient in this package is made of.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another collective of this list, and the transpose of that is itself again.
So gradients of any order come from one autograd function, and nonlinear collectives get theirs by being put
together from these and from torch's own operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_utils import GroupLike, resolve_group
from dist_utils.torch_compat import traceable_collectives

__all__ = ["Members", "linear", "members", "padded_parts", "splits_to_root", "zeros_after"]

_SMALL_BYTES = 64 << 10
"""Up to here a sum for one rank is sent as a sum for all: twice the bytes, but one message less."""


class Members(NamedTuple):
    """Who takes part.

    Attributes:
        group: The process group's name, by which the traceable collectives know it.
        size: The number of ranks.
        rank: This rank in the group.
    """

    group: str
    size: int
    rank: int


def members(group: GroupLike) -> Members:
    """Return who takes part; raises as :func:`dist_utils.resolve_group`."""
    resolved = resolve_group(group)
    return Members(resolved.group_name, dist.get_world_size(resolved), dist.get_rank(resolved))


_TRANSPOSES = {
    # The total loss is the sum of all ranks' losses.
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
    # The loss is one number that all ranks compute alike: nothing is added up over them.
    "replicated all_reduce": "copy",
    "copy": "replicated all_reduce",
    "replicated all_gather": "own part",
    "own part": "replicated all_gather",
    "replicated broadcast": "own if root",
    "own if root": "replicated broadcast",
}


class _Call(NamedTuple):
    """Which collective, and everything that it needs beside its tensor."""

    kind: str
    who: Members
    root: int
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    def transposed(self) -> _Call:
        return _Call(_TRANSPOSES[self.kind], self.who, self.root, self.output_splits, self.input_splits)


def linear(
    tensor: torch.Tensor,
    kind: str,
    who: Members,
    *,
    root: int = 0,
    input_splits: tuple[int, ...] = (),
    output_splits: tuple[int, ...] = (),
) -> torch.Tensor:
    """Run a linear collective that autograd sees.

    Args:
        tensor: This rank's input. All collectives but the elementwise ones work along dimension 0.
        kind: ``"all_reduce"`` (sum), ``"all_gather"`` (concatenated), ``"reduce_scatter"`` (sum),
            ``"exchange"`` (all to all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros
            elsewhere), ``"copy"`` (nothing happens), ``"own part"`` of equal parts, ``"own if root"``
            (zeros elsewhere); the ``"replicated"`` ones differ in their transpose.
        who: The ranks.
        root: A rank in the group.
        input_splits: Of an exchange: lengths along dimension 0 for each rank.
        output_splits: Likewise, from each rank.
    """
    return _applied(tensor, _Call(kind, who, root, input_splits, output_splits))


def splits_to_root(length: int, who: Members, root: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return input and output splits of an exchange in which every rank sends ``length`` to the root."""
    to_root = tuple(length if rank == root else 0 for rank in range(who.size))
    from_all = (length if who.rank == root else 0,) * who.size
    return to_root, from_all


def padded_parts(x: torch.Tensor, who: Members) -> torch.Tensor:
    """Return all elements in W rows of one length, zeros at the end."""
    length = -(-x.numel() // who.size)
    padded = torch.nn.functional.pad(x.flatten(), (0, length * who.size - x.numel()))
    return padded.view(who.size, length)


def zeros_after(received: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return zeros that are made from what a collective gave this rank, though no element of it is used.

    So its backward, which the other ranks wait for, runs on this rank, and no compiler leaves it out.
    """
    zeros = torch.zeros_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    return zeros + received.flatten()[:0].sum().to(like.dtype)


def _applied(tensor: torch.Tensor, call: _Call) -> torch.Tensor:
    function = _Collective if torch.compiler.is_compiling() else _CollectiveWithForwardMode
    result: torch.Tensor = function.apply(tensor, call)  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, call: _Call) -> torch.Tensor:
        return _run(tensor.contiguous(), call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        _, ctx.call = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        # Even if this rank needs no gradient: the others wait for it.
        return _applied(cotangent, ctx.call.transposed()), None


class _CollectiveWithForwardMode(_Collective):
    """The same, with the rules that ``torch.compile`` refuses to trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return _applied(tangent, ctx.call)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004 - torch's signature
        in_dims: tuple[int, ...],
        tensor: torch.Tensor,
        call: _Call,
    ) -> tuple[torch.Tensor, int]:
        return _applied(tensor.movedim(in_dims[0], -1), call), tensor.ndim - 1


def _run(x: torch.Tensor, call: _Call) -> torch.Tensor:
    who, root = call.who, call.root
    name = call.kind.removeprefix("replicated ")
    if name == "copy" or who.size == 1:
        result = x.clone()
    elif name == "own part":
        result = x.tensor_split(who.size)[who.rank].clone()
    elif name == "own if root":
        result = x.clone() if who.rank == root else torch.zeros_like(x)
    elif name == "exchange":
        splits = list(call.output_splits), list(call.input_splits)
        result = _send(traceable_collectives.all_to_all_single, x, *splits, who.group)
    elif name == "all_gather":
        result = _send(traceable_collectives.all_gather_into_tensor, x, who.size, who.group)
    elif name == "reduce_scatter":
        result = _send(traceable_collectives.reduce_scatter_tensor, x, "sum", who.size, who.group)
    elif name == "all_reduce":
        result = _send(traceable_collectives.all_reduce, x, "sum", who.group)
    elif name == "broadcast":
        result = _send(traceable_collectives.broadcast, x, root, who.group)
    else:
        result = _reduce(x, who, root)
    return result


def _send(collective: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = traceable_collectives.wait_tensor(collective(x, *arguments))
    return result


def _reduce(x: torch.Tensor, who: Members, root: int) -> torch.Tensor:
    """Sum to one rank. The traceable collectives have no reduce; in two steps it sends as little."""
    if x.nbytes <= _SMALL_BYTES:
        total = _run(x, _Call("all_reduce", who, root, (), ()))
    else:
        part = _run(padded_parts(x, who), _Call("reduce_scatter", who, root, (), ())).flatten()
        total = _run(part, _Call("exchange", who, root, *splits_to_root(part.numel(), who, root)))
    if who.rank == root:
        return total.flatten()[: x.numel()].view(x.shape)
    return zeros_after(total, x)
