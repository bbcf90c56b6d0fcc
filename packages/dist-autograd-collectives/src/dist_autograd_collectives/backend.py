"""The linear maps, run by torch.distributed, or by messages between two ranks where those are better.

On Gloo all of them consist of messages, except large broadcasts and large sums over more than two ranks.
Gloo's own collectives fill a part of a buffer, or end the process, where ranks' lengths differ; messages
allow parts of any length and never meet another buffer. The table in docs/dist-autograd-collectives.md says
what is faster.

Results are written to freshly allocated memory, so its pages are touched for the first time. Pages of 2 MiB
halve the time for that (48 to 25 ms for 64 MiB), but on a host that takes a guest's free memory back it
rose to 210 ms, so they are not requested.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from dist_autograd_collectives.calls import Map, Tensors, Wait, hash_of_names
from dist_autograd_collectives.parts import concatenate, pad, split
from dist_autograd_collectives.reductions import GLOO_DTYPES, sum_of_rows, sum_of_two
from dist_utils.torch_compat import start_traceable_collective

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective failed; in backward mostly because other ranks never reached it."""


_HINT = (
    "Do all ranks call the same functions in one order, with the same shapes, dtypes and operations? "
    "check=True tells at once"
)
_HINT_IN_BACKWARD = (
    f"{_HINT}. Does every rank use the result (see connect), and does every rank's tensor need a gradient "
    "(see anchor=True; torch.autograd.grad and backward(inputs=...) follow only what leads to their inputs: "
    "there pass connect(tensor, input) instead)?"
)

_SHORT_BYTES = 64 << 10
"""Up to this size every rank's tensor is sent to where a sum is needed; larger ones go in Gloo's ring.

And messages are sent before receives are posted if none of them is longer, as in
:func:`dist_utils.start_messages`, whose tags tell lengths apart, but no shapes, dtypes and calls.
"""

_SENT_BYTES = 256 << 10
"""A small tensor is a message to each rank while a rank sends no more than this; rings and trees send less.

So sums of up to five ranks go by messages up to 64 KiB, and those of 64 ranks up to 4 KiB.
"""

_UNFILLED = bytes.fromhex("b1c6f9a2d75e0384")
"""A receiver of a large broadcast writes this at the end of its tensor beforehand. The same on all ranks,
because a rank that receives too little passes its own bytes on to others."""

_TAG = 1 << 30
"""Added to all tags, so that they never match a user's own ``send`` and ``recv``."""


def begin(tensors: Tensors, linear_map: Map) -> Wait:
    """Start a map on this rank's tensors."""
    inputs = tuple(tensor.contiguous().resolve_neg() for tensor in tensors)
    if not linear_map.needs_others:
        results = local_result(inputs, linear_map)
        return lambda: results
    return _Running(_explain(linear_map, lambda: choose(inputs, linear_map)), linear_map)


def _explain(linear_map: Map, act: Callable[[], T]) -> T:
    """Return what a part of a map returns; an error names the function and this rank."""
    try:
        return act()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        call, who = linear_map.call, linear_map.call.who
        what, hint = call.title, _HINT
        if linear_map.order:
            what, hint = f"the backward of {call.title}", _HINT_IN_BACKWARD
        raise CollectiveError(
            f"{what} failed on rank {who.rank} of {who.size} in its group: {error} - {hint}"
        ) from error


def choose(inputs: Tensors, linear_map: Map) -> Wait:
    """Start a map on contiguous tensors of two ranks or more, by what is best for it."""
    x, size = inputs[0], linear_map.call.who.size
    if not (x.is_cpu and "cpu:gloo" in _backends(linear_map)):
        return native(inputs, linear_map)
    is_small = x.nbytes <= _SHORT_BYTES and x.nbytes * (size - 1) <= _SENT_BYTES
    if linear_map.kind == "broadcast" and not is_small:
        return _large_broadcast(x, linear_map)
    # Two ranks exchange as many bytes in a ring, in two rounds.
    if linear_map.kind in ("all_reduce", "reduce") and size > 2 and not is_small and x.dtype in GLOO_DTYPES:
        return native(inputs, linear_map)
    return by_messages(inputs, linear_map)


def local_result(tensors: Tensors, linear_map: Map) -> Tensors:
    """Return the result of a map that needs no other rank, as new tensors."""
    who = linear_map.call.who
    if linear_map.kind == "reduce_scatter":
        return (linear_map.parts_of(tensors)[who.rank].clone(),)
    if linear_map.kind == "reduce" and who.rank != linear_map.root:
        return tuple(torch.zeros_like(x) for x in tensors)
    return tuple(x.clone() for x in tensors)


def _backends(linear_map: Map) -> str:
    """Return the backends of the group, for example ``"cpu:gloo,cuda:nccl"``."""
    try:
        return dist.get_backend_config(linear_map.call.who.group)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError("it was destroyed by destroy_process_group: run backward before") from error


def _large_broadcast(x: torch.Tensor, linear_map: Map) -> Wait:
    """Start a broadcast of bytes, and check that they fill this rank's tensor, which Gloo does not."""
    who, root = linear_map.call.who, linear_map.root
    data = x.flatten().view(torch.uint8)
    is_root = who.rank == root
    if not is_root:
        marker = torch.frombuffer(bytearray(_UNFILLED), dtype=torch.uint8)
        data = torch.empty_like(data)
        data[-8:] = marker
    work = cast("dist.ProcessGroup", who.group).broadcast(data, root)
    copied = x.clone() if is_root else None  # the copy is made while the data is sent

    def wait() -> Tensors:
        work.wait()
        if copied is not None:
            return (copied,)
        if torch.equal(data[-8:], marker):  # by chance once in 2 ** 64 times
            raise RuntimeError(f"rank {root} sent less than the {data.numel()} bytes of this rank's tensor")
        return (data.view(x.dtype).view(x.shape),)

    return wait


def native(tensors: Tensors, linear_map: Map) -> Wait:
    """Start torch's own collective."""
    who = linear_map.call.who
    if linear_map.kind != "reduce" or tensors[0].dtype not in GLOO_DTYPES:
        finish = start_traceable(join(tensors), linear_map)
        return lambda: separate(finish(), linear_map)
    total = tensors[0].clone()
    work = cast("dist.ProcessGroup", who.group).reduce(total, linear_map.root)

    def wait() -> Tensors:
        work.wait()
        # The other ranks have partial sums, maybe in inference tensors, which cannot be zeroed in place.
        return (total if who.rank == linear_map.root else torch.zeros_like(total),)

    return wait


def join(tensors: Tensors) -> torch.Tensor:
    """Return all parts that a map takes in one tensor, along dimension 0."""
    return concatenate(tensors) if len(tensors) > 1 else tensors[0]


def separate(received: torch.Tensor, linear_map: Map) -> Tensors:
    """Return the results of a map from its joined parts; the reverse of :func:`join`."""
    if not linear_map.separate_output:
        return (received,)
    size = linear_map.call.who.size
    return split(received, linear_map.output_splits or (received.shape[0] // size,) * size)


def start_traceable(x: torch.Tensor, linear_map: Map) -> Callable[[], torch.Tensor]:
    """Start a map on joined parts by torch's traceable collectives, which run everywhere, also in graphs.

    Extra dimensions at the end of ``x`` are a batch.
    """
    if x.dtype in GLOO_DTYPES:
        return _start_of_common_dtype(x, linear_map)
    if linear_map.kind in ("all_reduce", "reduce", "reduce_scatter"):
        # In a wider dtype, which the backend has; integers wrap around as usual.
        wide = torch.float32 if x.dtype.is_floating_point else torch.int64
        total = _start_of_common_dtype(x.to(wide), linear_map)
        return lambda: total().to(x.dtype)
    # Data that is only moved goes as bytes, which every backend supports: one more dimension, at the end.
    moved = _start_of_common_dtype(x.unsqueeze(-1).view(torch.uint8), linear_map)
    return lambda: moved().view(x.dtype).squeeze(-1)


def _start_of_common_dtype(x: torch.Tensor, linear_map: Map) -> Callable[[], torch.Tensor]:
    kind, who, root = linear_map.kind, linear_map.call.who, linear_map.root
    # There is no traceable reduce.
    if kind in ("all_reduce", "reduce"):
        total = start_traceable_collective("all_reduce", x, "sum", who.name)
        if kind == "all_reduce" or who.rank == root:
            return total
        return lambda: pad(total().flatten()[:0], x.numel()).view(x.shape)
    if kind == "broadcast":
        return start_traceable_collective("broadcast", x, root, who.name)
    if kind == "all_gather":
        return start_traceable_collective("all_gather_into_tensor", x, who.size, who.name)
    if kind == "reduce_scatter":
        return start_traceable_collective("reduce_scatter_tensor", x, "sum", who.size, who.name)
    sends, receives = linear_map.splits(x.shape[0])
    return start_traceable_collective("all_to_all_single", x, receives, sends, who.name)


def by_messages(tensors: Tensors, linear_map: Map) -> Wait:
    """Start a map made of messages between two ranks on Gloo; the receiver computes sums.

    Gloo silently fills only the front of a buffer if a message is too short, and ends the process if it is
    too long. The messages' tags identify the call, its shapes and the dtype, so that a message never meets a
    buffer of another shape, dtype or collective, even where ranks take part in different collectives of the
    same size: both wait for a message that does not come, and raise at the group's timeout. A length sent
    with each message would reveal the mismatch at once, but with it small messages took 0.17 to 0.3 ms
    instead of 0.10 (1 KiB between two ranks).
    """
    who, parts = linear_map.call.who, linear_map.parts_of(tensors)
    group, own = cast("dist.ProcessGroup", who.group), parts[who.rank]
    sources = (linear_map.root,) if linear_map.kind == "broadcast" else range(who.size)
    targets = (linear_map.root,) if linear_map.kind == "reduce" else range(who.size)
    buffers, finish = _memory(tensors[0], own, linear_map)
    sends = _messages(parts, targets, 1, linear_map) if who.rank in sources else []
    receives = _messages(buffers, sources, -1, linear_map) if who.rank in targets else []

    def send() -> list[dist.Work]:
        return [group.send([part], rank, tag) for part, rank, tag in sends]

    def receive() -> list[dist.Work]:
        return [group.recv([part], rank, tag) for part, rank, tag in receives]

    if any(part.nbytes > _SHORT_BYTES for part, _, _ in sends + receives):
        # With sends first, two hosts took turns on a duplex link: 1.9 instead of 1.05 s.
        received, sent = receive(), send()
    else:
        sent, received = send(), receive()
    if who.rank in sources and who.rank in targets and own is not buffers[who.rank]:
        buffers[who.rank].copy_(own)

    def wait() -> Tensors:
        # Two exchanges of 1 MiB between two ranks took 2.5 ms, and 3.9 if receives are awaited first.
        for work in sent + received:
            work.wait()
        return finish()

    return wait


def _messages(
    parts: Tensors, ranks: Sequence[int], step: int, linear_map: Map
) -> list[tuple[torch.Tensor, int, int]]:
    """Return the messages to or from some ranks, each with its rank and its tag.

    The next rank comes first, or the one before, so that not all ranks send to the same one at once.
    """
    call, found = linear_map.call, []
    names = hash_of_names(call.title, linear_map.kind, parts[0].dtype)
    for distance in range(1, call.who.size):
        rank = (call.who.rank + step * distance) % call.who.size
        part = parts[rank]
        if rank in ranks and part.numel():
            found.append((part, rank, _TAG + hash((names, call.key, linear_map.order, part.numel())) % _TAG))
    return found


def _memory(x: torch.Tensor, own: torch.Tensor, linear_map: Map) -> tuple[Tensors, Callable[[], Tensors]]:
    """Return memory for what comes from each rank, and what makes the results of it.

    Args:
        x: The first tensor that the map takes.
        own: The part for this rank itself; what others send is alike, except in exchanges.
        linear_map: The map.
    """
    kind, who = linear_map.kind, linear_map.call.who
    if kind == "broadcast":
        mine = torch.empty_like(own)
        return (mine,) * who.size, lambda: (mine,)
    if kind in ("all_gather", "exchange"):
        lengths = linear_map.splits(x.shape[0])[1]
        if linear_map.separate_output:
            apart = tuple(x.new_empty(length, *x.shape[1:]) for length in lengths)
            return apart, lambda: apart
        whole = x.new_empty(sum(lengths), *x.shape[1:])
        return whole.split_with_sizes(lengths), lambda: (whole,)
    if kind == "reduce" and who.rank != linear_map.root:
        zeros = torch.zeros_like(own)
        return (zeros,) * who.size, lambda: (zeros,)
    # Summed in rank order everywhere, so every rank gets the same bits. torch sums 16-bit dtypes in fp32.
    if who.size == 2:
        other = torch.empty_like(own)
        pair = (own, other) if who.rank == 0 else (other, own)
        return pair, lambda: (sum_of_two(*pair, other),)
    rows = own.new_empty(who.size, *own.shape)
    return rows.unbind(0), lambda: (sum_of_rows(rows),)


_abandoned: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Wait]] = weakref.WeakKeyDictionary()


class _Running:
    """What a map has started. If nobody waits for it, the next wait in its group does."""

    __slots__ = ("_map", "_wait")

    def __init__(self, wait: Wait, linear_map: Map) -> None:
        self._wait: Wait | None = wait
        self._map = linear_map

    def __call__(self) -> Tensors:
        """Wait; return what this rank received."""
        wait, self._wait = self._wait, None
        assert wait is not None
        received, group = _explain(self._map, wait), self._map.call.who.group
        if _abandoned and group is not None:
            for left in _abandoned.pop(group, []):
                with contextlib.suppress(RuntimeError):  # nobody's error any more
                    left()
        return received

    def __del__(self) -> None:
        """Leave it to others; never wait, because nobody knows when this runs."""
        group = self._map.call.who.group
        if self._wait is not None and group is not None:
            _abandoned.setdefault(group, []).append(self._wait)
