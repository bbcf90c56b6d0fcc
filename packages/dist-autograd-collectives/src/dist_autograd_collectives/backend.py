"""The linear maps, run by messages between two ranks, or by torch.distributed where that is better.

On Gloo all of them consist of messages, except large broadcasts and large sums over more than two ranks, and
all where ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes torch compare collectives.
Gloo's own collectives fill a part of a buffer, or end the process, where ranks' lengths differ, and so do
messages of another length. But the tags of messages identify the call, its shapes and the dtype, so that a
message never meets a buffer of another shape, dtype or collective, even where ranks take part in different
collectives of the same size: both wait for a message that does not come, and raise at the group's timeout. A
length sent with each message would reveal the mismatch at once, but with it small messages took 0.17 to 0.3
ms instead of 0.10 (1 KiB between two ranks). The table in docs/dist-autograd-collectives.md says what is
faster.

Results are written to freshly allocated memory, so its pages are touched for the first time. Pages of 2 MiB
halve the time for that (48 to 25 ms for 64 MiB), but on a host that takes a guest's free memory back it
rose to 210 ms, so they are not requested.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist

from dist_autograd_collectives.maps import Map, Tensors, concatenate, hash_of_names, pad, split
from dist_autograd_collectives.reductions import GLOO_DTYPES, dtype_of_sums, sum_of_parts
from dist_utils.torch_compat import profiler_range, start_traceable_collective

Wait: TypeAlias = Callable[[], Tensors]
"""Waits for a map that was started, and returns what this rank received."""

Way: TypeAlias = Callable[[Tensors, int], Wait]
"""Starts one map on contiguous tensors, with the key of the call."""


class CollectiveError(RuntimeError):
    """A collective failed; in backward mostly because other ranks never reached it."""


_HINT = (
    "Do all ranks call the same functions in one order, with the same shapes, dtypes and operations? "
    "compare_calls() tells at once"
)
_HINT_IN_BACKWARD = (
    f"{_HINT}. Does every rank use the result (see connect), and does every rank's tensor need a gradient "
    "(see anchored; torch.autograd.grad and backward(inputs=...) follow only what leads to their inputs: "
    "there pass connect(tensor, input) instead)?"
)

_SHORT_BYTES = 64 << 10
"""Messages are sent before receives are posted if none of them is longer, as in
:func:`dist_utils.start_messages`, whose tags tell lengths apart, but no shapes, dtypes and calls.
"""

_SENT_BYTES = 256 << 10
"""A small tensor is a message to each rank while a rank sends no more than this; rings and trees send less.

So sums of up to five ranks go by messages up to 64 KiB, and those of 64 ranks up to 4 KiB.
"""

_TAG = 1 << 30
"""Added to all tags, so that they never match a user's own ``send`` and ``recv``."""

_UNFILLED = bytes.fromhex("b1c6f9a2d75e0384")
"""A receiver of a large broadcast writes this at the end of its tensor beforehand. The same on all ranks,
because a rank that receives too little passes its own bytes on to others."""


def run(tensors: Tensors, linear_map: Map, key: int) -> Tensors:
    """Apply a map to this rank's tensors, unseen by autograd; return what this rank receives.

    Args:
        tensors: What the map takes.
        linear_map: The map.
        key: What tells its messages from those of the group's other calls.

    Raises:
        CollectiveError: It failed; the error names the function and this rank.
    """
    with profiler_range(linear_map.range_name):
        return finish(start(tensors, linear_map, key), linear_map)


def start(tensors: Tensors, linear_map: Map, key: int) -> Wait:
    """Start a map in the way that was found for it before; see :func:`run`."""
    inputs = tuple([_plain(tensor) for tensor in tensors])
    try:
        if linear_map.way is None:
            linear_map.way = best_way(linear_map, inputs[0])
        return cast("Way", linear_map.way)(inputs, key)
    except RuntimeError as error:
        _raise_named(error, linear_map)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, maybe a sparse cotangent, whose memory is what is sent."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.contiguous().resolve_conj().resolve_neg()


def finish(wait: Wait, linear_map: Map) -> Tensors:
    """Wait for a map, whose errors name it, and for what others have left behind."""
    try:
        received = wait()
    except RuntimeError as error:
        _raise_named(error, linear_map)
    while linear_map.who.abandoned:
        with contextlib.suppress(RuntimeError, IndexError):  # nobody's error any more; another thread's
            linear_map.who.abandoned.pop()()
    return received


def _raise_named(error: RuntimeError, linear_map: Map) -> NoReturn:
    """Raise an error that names the function of a map, and this rank."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    what, hint, who = linear_map.title, _HINT, linear_map.who
    if linear_map.order:
        what, hint = f"the backward of {what}", _HINT_IN_BACKWARD
    raise CollectiveError(
        f"{what} failed on rank {who.rank} of {who.size} in its group: {error} - {hint}"
    ) from error


def best_way(linear_map: Map, x: torch.Tensor) -> Way:
    """Return how a map is started best, whose first tensor is like this one."""
    who, kind = linear_map.who, linear_map.kind
    if not linear_map.needs_others:
        return partial(begin_alone, linear_map)
    if _torch_compares() or not (x.is_cpu and "cpu:gloo" in dist.get_backend_config(who.group)):
        return partial(begin_native, linear_map)
    if kind in ("broadcast", "all_reduce", "reduce"):
        nbytes = x.nbytes
        if kind == "broadcast":  # in a graph only the root gives rows
            nbytes = linear_map.received.elements(linear_map.root, x) * x.itemsize
        is_small = nbytes <= _SHORT_BYTES and nbytes * (who.size - 1) <= _SENT_BYTES
        if kind == "broadcast" and not is_small:
            return partial(_begin_large_broadcast, linear_map)
        # Two ranks exchange as many bytes in a ring, in two rounds. Other dtypes need a wider one there.
        is_summed = linear_map.sums and (x.dtype in GLOO_DTYPES or x.is_complex())
        if is_summed and not is_small and who.size > 2:
            return partial(begin_native, linear_map)
    return messages(linear_map, x)


def _torch_compares() -> bool:
    """Return whether torch compares collectives between ranks.

    It counts messages like collectives then, and ranks with unlike numbers of them seem out of step.
    """
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def begin_alone(linear_map: Map, tensors: Tensors, _: int) -> Wait:
    """Apply a map that needs no other rank; its results are new tensors."""
    rank = linear_map.who.rank
    if linear_map.kind == "own_part":
        tensors = (linear_map.parts_of(tensors)[rank],)
    if linear_map.rows and not linear_map.sent.lengths[rank]:  # not even to itself
        tensors = (linear_map.zeros(tensors[0]),)
    results = tuple([x.clone() for x in tensors])
    return lambda: results


def messages(linear_map: Map, x: torch.Tensor) -> Way:
    """Return what starts a map that sends each rank its part, and adds up, or lines up, what arrives.

    What messages there are is found once, which takes longer than to send them. Receives are posted first if
    a message is long and may go to another host: with sends first, two hosts took turns on a duplex link (1.9
    instead of 1.05 s). On one host a rank that sends after its receive was posted writes the message itself,
    under a lock for which Gloo's thread spins meanwhile: an exchange of 2 x 4 MiB took 5.0 ms, and 3.3 with
    sends first.

    Args:
        linear_map: The map.
        x: The first of its tensors.
    """
    who, sent, received = linear_map.who, linear_map.sent, linear_map.received
    rank, wide = who.rank, dtype_of_sums(x.dtype, who.size)
    adds = linear_map.sums and not received.are_empty
    keeps_part = not adds and received.lengths[rank] > 0
    is_joined = not received.separate and not received.are_empty
    own = sent.elements(rank, x)  # others send as much to be added
    sends = [(True, peer, sent.elements(peer, x)) for peer in who.others]
    receives = [(False, peer, own if adds else received.elements(peer, x)) for peer in reversed(who.others)]
    longest = max(count for _, _, count in sends + receives) * x.itemsize
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())  # torchrun says so
    receives_first = longest > _SHORT_BYTES and not on_one_host
    names = hash_of_names(linear_map.title, linear_map.kind, linear_map.order, x.dtype)
    in_order = [
        (is_sent, peer, hash((names, count)))
        for is_sent, peer, count in (receives + sends if receives_first else sends + receives)
        if count
    ]

    def begin(tensors: Tensors, key: int) -> Wait:
        group, parts = who.group, linear_map.parts_of(tensors)
        own = parts[rank]
        results: Tensors = () if adds else linear_map.new_results(own)
        if adds:
            places = [own if one == rank else torch.empty_like(own) for one in range(who.size)]
        else:
            places = [*(results[0].split_with_sizes(received.lengths) if is_joined else results)]
        works = []
        for is_sent, peer, numbers in in_order:
            tag = _TAG + (numbers ^ key) % _TAG
            if is_sent:
                works.append(group.send([parts[peer]], peer, tag))
            else:
                works.append(group.recv([places[peer]], peer, tag))
        if keeps_part:
            places[rank].copy_(own)  # while messages are on their way

        def wait() -> Tensors:
            # Sends first: two exchanges of 1 MiB between two ranks took 2.5 ms so, and 3.9 the other way
            # round.
            for work in reversed(works) if receives_first else works:
                work.wait()
            # Summed in rank order everywhere, so every rank gets the same bits.
            return (sum_of_parts(places, rank, wide),) if adds else results

        return wait

    return begin


def _begin_large_broadcast(linear_map: Map, tensors: Tensors, _: int) -> Wait:
    """Start a broadcast of bytes, and check that they fill this rank's tensor, which Gloo does not."""
    (x,), who, root = tensors, linear_map.who, linear_map.root
    is_root = who.rank == root
    result = x if is_root else linear_map.new_results(x)[0]
    data = result.flatten().view(torch.uint8)
    marker = torch.frombuffer(bytearray(_UNFILLED), dtype=torch.uint8)
    if not is_root:
        data[-8:] = marker
    work = who.group.broadcast(data, root)
    if is_root:
        result = x.clone()  # while the data is sent

    def wait() -> Tensors:
        work.wait()
        if not is_root and torch.equal(data[-8:], marker):  # by chance once in 2 ** 64 times
            raise RuntimeError(f"rank {root} sent less than the {data.numel()} bytes of this rank's tensor")
        return (result,)

    return wait


def begin_native(linear_map: Map, tensors: Tensors, _: int) -> Wait:
    """Start torch's own collective."""
    group = linear_map.who.group  # raises if it was destroyed
    if linear_map.kind != "reduce" or tensors[0].dtype not in GLOO_DTYPES:
        arrive = start_traceable(join_parts(tensors, linear_map), linear_map)
        return lambda: separate_parts(arrive(), linear_map)
    total = tensors[0].clone()
    work = group.reduce(total, linear_map.root)

    def wait() -> Tensors:
        work.wait()
        # The other ranks have partial sums, maybe in inference tensors, which cannot be zeroed in place.
        return (linear_map.zeros(total) if linear_map.received.are_empty else total,)

    return wait


def join_parts(tensors: Tensors, linear_map: Map) -> torch.Tensor:
    """Return all parts that this rank sends in one tensor, along dimension 0; empty if it sends nothing."""
    joined = concatenate(tensors) if len(tensors) > 1 else tensors[0]
    lengths = linear_map.sent.lengths
    return joined[:0] if linear_map.rows and lengths and not any(lengths) else joined


def separate_parts(received: torch.Tensor, linear_map: Map) -> Tensors:
    """Return the results of a map from what this rank receives in one tensor, or zeros if that is empty."""
    lengths, is_separate = linear_map.received
    parts = split(received, lengths) if is_separate else (received,)
    return tuple([pad(part, linear_map.rows) for part in parts])


def start_traceable(x: torch.Tensor, linear_map: Map) -> Callable[[], torch.Tensor]:
    """Start a map on joined parts by torch's traceable collectives, which run everywhere, also in graphs.

    Extra dimensions at the end of ``x`` are a batch.
    """
    if x.dtype in GLOO_DTYPES:
        return _start_of_common_dtype(x, linear_map)
    if x.is_complex():
        parts = _start_of_common_dtype(torch.view_as_real(x), linear_map)
        return lambda: torch.view_as_complex(parts())
    if linear_map.sums:
        # In a wider dtype, which the backend has; integers wrap around as usual.
        wide = torch.float32 if x.dtype.is_floating_point else torch.int64
        total = _start_of_common_dtype(x.to(wide), linear_map)
        return lambda: total().to(x.dtype)
    # Data that is only moved goes as bytes, which every backend supports: one more dimension, at the end.
    moved = _start_of_common_dtype(x.unsqueeze(-1).view(torch.uint8), linear_map)
    return lambda: moved().view(x.dtype).squeeze(-1)


def _start_of_common_dtype(x: torch.Tensor, linear_map: Map) -> Callable[[], torch.Tensor]:
    kind, who = linear_map.kind, linear_map.who
    if kind in ("all_reduce", "reduce"):  # there is no traceable reduce
        total = start_traceable_collective("all_reduce", x, "sum", who.name)
        return lambda: total()[:0] if linear_map.received.are_empty else total()
    if kind == "broadcast":
        whole = pad(x, sum(linear_map.received.lengths))
        return start_traceable_collective("broadcast", whole, linear_map.root, who.name)
    sends, receives = linear_map.sent.lengths, linear_map.received.lengths
    # Up to torch 2.9 Gloo has neither of these two where torch compares collectives.
    if kind == "all_gather" and min(receives) == max(receives) and not _torch_compares():
        return start_traceable_collective("all_gather_into_tensor", x, who.size, who.name)
    if kind == "reduce_scatter" and min(sends) == max(sends) and not _torch_compares():
        return start_traceable_collective("reduce_scatter_tensor", x, "sum", who.size, who.name)
    if kind == "all_gather":
        # Not torch.cat, which changes dtypes under autocast.
        whole = x.expand(who.size, *x.shape).flatten(0, 1).contiguous()  # one row is expanded only
        x, sends = whole, (receives[who.rank],) * who.size
    if kind == "reduce_scatter":
        receives = (sends[who.rank],) * who.size
    arrive = start_traceable_collective("all_to_all_single", x, list(receives), list(sends), who.name)
    if kind == "reduce_scatter":
        return lambda: arrive().view(who.size, receives[0], *x.shape[1:]).sum(0, dtype=x.dtype)
    return arrive
