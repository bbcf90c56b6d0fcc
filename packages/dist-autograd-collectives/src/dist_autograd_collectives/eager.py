"""The linear collectives, run by torch.distributed or by messages where those are faster.

On Gloo all of them consist of messages between two ranks, except large broadcasts and large sums over more
than two ranks. Messages are faster than Gloo's own collectives, allow parts of unequal length, and never
write into a buffer of another length. Measured in milliseconds on two cores, four ranks on loopback, Gloo's
own / messages, for 1 KiB and 32 MiB: all_gather 4.1 / 3.2 and 432 / 239, reduce_scatter 7.4 / 3.4 and
102 / 75, gather 0.87 / 0.61 and 159 / 89; for 1 KiB all_reduce 5.6 / 3.4 and reduce 4.1 / 0.7; an exchange
of 8 MiB 20.9 / 20.2.

Results are written to freshly allocated memory, so its pages are touched for the first time. Pages of 2 MiB
halve the time for that (48 to 25 ms for 64 MiB), but on a host that takes a guest's free memory back it
rose to 210 ms, so they are not requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_autograd_collectives.calls import Call, Tensors, Wait, parts_of
from dist_autograd_collectives.failures import CollectiveError, backend_config
from dist_autograd_collectives.storage_dtypes import GLOO_DTYPES, added, summed
from dist_autograd_collectives.tagged_messages import exchange
from dist_utils.torch_compat import all_gather_single, reduce_scatter_single

__all__ = ["begin"]

_SMALL_BYTES = 64 << 10
"""Up to this size Gloo's sums take longer than sending every rank's tensor to where the sum is needed."""

_FEW_RANKS = 8
"""Up to this many ranks a small broadcast is one message to each rank; Gloo's broadcast is a tree."""

_UNFILLED = bytes.fromhex("b1c6f9a2d75e0384")
"""A receiver of a large broadcast writes this at the end of its tensor beforehand. The same on all ranks,
because a rank that receives too little passes its own bytes on to others."""

_IN_PLACE = ("broadcast", "all_reduce", "reduce")


def begin(tensors: Tensors, call: Call) -> Wait:
    """Start a collective of two ranks or more on contiguous tensors."""
    x = tensors[0]
    if not ("cpu:gloo" in backend_config(call) and x.is_cpu):
        return _in_place(x.clone(), call) if call.name in _IN_PLACE else _native(tensors, call)
    if call.name == "broadcast" and (x.nbytes > _SMALL_BYTES or call.who.size > _FEW_RANKS):
        return _large_broadcast(x, call)
    large_sum = call.name in ("all_reduce", "reduce") and x.nbytes > _SMALL_BYTES and x.dtype in GLOO_DTYPES
    if large_sum and call.who.size > 2:  # two exchange as many bytes in a ring, in two rounds
        return _in_place(x.clone(), call)
    return _by_messages(tensors, call)


def _large_broadcast(x: torch.Tensor, call: Call) -> Wait:
    """Start a broadcast of bytes, and check that they fill this rank's tensor, which Gloo does not."""
    data = x.flatten().view(torch.uint8)
    marker = torch.frombuffer(bytearray(_UNFILLED), dtype=torch.uint8)
    if call.who.rank == call.root:
        begun, result = _in_place(data, call), x.clone()  # the copy is made while the data is sent
        return lambda: begun() and (result,)
    data = torch.empty_like(data)
    if data.numel() >= marker.numel():
        data[-8:] = marker
    begun = _in_place(data, call)

    def wait() -> Tensors:
        (received,) = begun()
        if torch.equal(received[-8:], marker):  # by chance once in 2 ** 64 times
            raise CollectiveError(
                f"{call.title} failed on rank {call.who.rank} of {call.who.size} in its group: rank "
                f"{call.root} sent less than the {data.numel()} bytes of this rank's tensor"
            )
        return (received.view(x.dtype).view(x.shape),)

    return wait


def _in_place(result: torch.Tensor, call: Call) -> Wait:
    """Start one of the backend's in-place collectives; a broadcast only reads its source's ``result``."""
    name, who = call.name, call.who
    work: Any  # may be None according to some torch versions' signatures
    if name == "all_reduce":
        work = dist.all_reduce(result, group=who.group, async_op=True)
    elif name == "broadcast":
        work = dist.broadcast(result, group=who.group, group_src=call.root, async_op=True)
    else:
        work = dist.reduce(result, group=who.group, group_dst=call.root, async_op=True)
        if who.rank != call.root:  # on these ranks a backend leaves partial sums
            return _after([work], lambda: (result.zero_(),), ())
    return _after([work], lambda: (result,), ())


def _by_messages(tensors: Tensors, call: Call) -> Wait:
    """Start a collective made of messages between two ranks; the receiver computes sums."""
    name, who, root, x = call.name, call.who, call.root, tensors[0]
    nothing: list[torch.Tensor | None] = [None] * who.size
    outgoing: Sequence[torch.Tensor | None]
    incoming: Sequence[torch.Tensor | None]
    if name in ("broadcast", "scatter"):
        mine = torch.empty_like(x) if name == "broadcast" else _part_of_scatter(tensors, call)
        outgoing = nothing
        if who.rank == root:
            outgoing = parts_of(tensors, call) if name == "scatter" else [x] * who.size
        incoming = [mine if rank == root else None for rank in range(who.size)]
        return _messages(call, outgoing, incoming, lambda: (mine,))
    if name == "exchange":
        buffers, results = _exchange_buffers(x, call)
        return _messages(call, parts_of(tensors, call), buffers, lambda: results)
    if name in ("gather", "reduce"):
        outgoing = [x if rank == root else None for rank in range(who.size)]
        if who.rank != root:
            zeros = (torch.zeros_like(x),) if name == "reduce" else _gathered_elsewhere(x, call)
            return _messages(call, outgoing, nothing, lambda: zeros)
    else:
        outgoing = parts_of(tensors, call) if name == "reduce_scatter" else [x] * who.size
    # Every rank sends a tensor like this one's own.
    own = outgoing[who.rank]
    assert own is not None
    if call.separate_output:
        apart = tuple(torch.empty_like(own) for _ in range(who.size))
        return _messages(call, outgoing, apart, lambda: apart)
    if name in ("gather", "all_gather"):
        whole = own.new_empty(who.size * own.shape[0], *own.shape[1:])
        return _messages(call, outgoing, whole.view(who.size, *own.shape).unbind(0), lambda: (whole,))
    # Summed in rank order everywhere, so every rank gets the same bits. torch sums 16-bit dtypes in fp32.
    if who.size == 2:
        other = torch.empty_like(own)
        pair = (own, other) if who.rank == 0 else (other, own)
        incoming = [None, other] if who.rank == 0 else [other, None]
        return _messages(call, outgoing, incoming, lambda: (added(*pair, other),))
    rows = own.new_empty(who.size, *own.shape)
    return _messages(call, outgoing, rows.unbind(0), lambda: (summed(rows),))


def _messages(
    call: Call,
    outgoing: Sequence[torch.Tensor | None],
    incoming: Sequence[torch.Tensor | None],
    results: Callable[[], Tensors],
) -> Wait:
    finish = exchange(call, outgoing, incoming)

    def wait() -> Tensors:
        finish()
        return results()

    return wait


def _part_of_scatter(tensors: Tensors, call: Call) -> torch.Tensor:
    """Return memory for what this rank receives in a scatter."""
    if call.separate_input:
        return torch.empty_like(tensors[call.root])
    return tensors[0].new_empty(call.output_splits[call.root], *tensors[0].shape[1:])


def _gathered_elsewhere(x: torch.Tensor, call: Call) -> Tensors:
    """Return the result of a gather on all ranks but the root."""
    if call.separate_output:
        return tuple(torch.zeros_like(x) for _ in range(call.who.size))
    return (x.new_empty(0, *x.shape[1:]),)


def _exchange_buffers(x: torch.Tensor, call: Call) -> tuple[Sequence[torch.Tensor], Tensors]:
    """Return a buffer for each part of an exchange, and the result tensors that they are part of."""
    if call.separate_output:
        apart = tuple(x.new_empty(length, *x.shape[1:]) for length in call.output_splits)
        return apart, apart
    lengths = call.output_splits or (x.shape[0] // call.who.size,) * call.who.size
    whole = x.new_empty(sum(lengths), *x.shape[1:])
    return whole.split_with_sizes(lengths), (whole,)


def _native(tensors: Tensors, call: Call) -> Wait:
    """Start the backend's own collective."""
    name, who, root, group, x = call.name, call.who, call.root, call.who.group, tensors[0]
    if name == "all_gather":
        flat = x.new_empty(who.size * x.numel())  # flat: for CUDA tensors Gloo accepts nothing else
        work = all_gather_single(flat, x.view(-1), group, async_op=True)
        if call.separate_output:
            return _after([work], lambda: flat.view(who.size, *x.shape).unbind(0), (x,))
        return _after([work], lambda: (flat.view(who.size * x.shape[0], *x.shape[1:]),), (x,))
    if name == "reduce_scatter":
        parts = parts_of(tensors, call)
        flat = torch.stack(parts).view(-1) if call.separate_input else x.view(-1)
        part = torch.empty_like(parts[0])
        work = reduce_scatter_single(part.view(-1), flat, group=group, async_op=True)
        return _after([work], lambda: (part,), (flat,))
    if name == "gather":
        into = [torch.empty_like(x) for _ in range(who.size)] if who.rank == root else None
        work = dist.gather(x, into, group=group, group_dst=root, async_op=True)
        if into is None:
            nothing = _gathered_elsewhere(x, call)
            return _after([work], lambda: nothing, (x,))
        return _after([work], lambda: tuple(into) if call.separate_output else (torch.cat(into),), (x,))
    if name == "scatter":
        mine = _part_of_scatter(tensors, call)
        sent = list(parts_of(tensors, call)) if who.rank == root else None
        work = dist.scatter(mine, sent, group=group, group_src=root, async_op=True)
        return _after([work], lambda: (mine,), tensors)
    whole = torch.cat(tensors) if call.separate_input else x
    length = sum(call.output_splits) if call.output_splits else whole.shape[0]
    received = whole.new_empty(length, *whole.shape[1:])
    splits = list(call.output_splits), list(call.input_splits)
    work = dist.all_to_all_single(received, whole, *splits, group=group, async_op=True)
    results = torch.split(received, splits[0]) if call.separate_output else (received,)
    return _after([work], lambda: results, (whole,))


def _after(works: Sequence[dist.Work | None], results: Callable[[], Tensors], sent: Tensors) -> Wait:
    kept = [sent]  # kept alive until it is sent

    def wait() -> Tensors:
        for work in works:
            assert work is not None
            work.wait()
        kept.clear()
        return results()

    return wait
