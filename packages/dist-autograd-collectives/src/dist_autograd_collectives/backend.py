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
from collections.abc import Callable
from typing import NoReturn

import torch

from dist_autograd_collectives import messages
from dist_autograd_collectives.maps import Map, Members, Tensors
from dist_autograd_collectives.messages import Wait
from dist_autograd_collectives.parts import concatenate, pad, split
from dist_autograd_collectives.reductions import GLOO_DTYPES
from dist_utils.torch_compat import start_traceable_collective


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

_SENT_BYTES = 256 << 10
"""A small tensor is a message to each rank while a rank sends no more than this; rings and trees send less.

So sums of up to five ranks go by messages up to 64 KiB, and those of 64 ranks up to 4 KiB.
"""

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
    try:
        received = _begin(tensors, linear_map, key)()
    except RuntimeError as error:
        _raise_named(error, linear_map)
    if linear_map.who.abandoned:
        _wait_for_abandoned(linear_map.who)
    return received


class Running:
    """A map that was started on this rank's tensors; see :func:`run`."""

    def __init__(self, tensors: Tensors, linear_map: Map, key: int) -> None:
        self._map = linear_map
        self._wait: Wait | None = None
        try:
            self._wait = _begin(tensors, linear_map, key)
        except RuntimeError as error:
            _raise_named(error, linear_map)

    def wait(self) -> Tensors:
        """Wait; return what this rank received. May be called once."""
        wait, self._wait = self._wait, None
        assert wait is not None
        try:
            received = wait()
        except RuntimeError as error:
            _raise_named(error, self._map)
        _wait_for_abandoned(self._map.who)
        return received

    def __del__(self) -> None:
        """Leave it to others; never wait, because nobody knows when this runs.

        A checkpoint that has run forward again as far as it must, for example, has started what it does not
        wait for. Gloo's connections would end with it.
        """
        if self._wait is not None:
            self._map.who.abandoned.append(self._wait)


def _wait_for_abandoned(who: Members) -> None:
    while who.abandoned:
        with contextlib.suppress(RuntimeError):  # nobody's error any more
            who.abandoned.pop()()


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


def _begin(tensors: Tensors, linear_map: Map, key: int) -> Wait:
    inputs = tuple([tensor.contiguous().resolve_neg() for tensor in tensors])
    if linear_map.needs_others:
        return choose(inputs, linear_map, key)
    results = local_result(inputs, linear_map)
    return lambda: results


def choose(inputs: Tensors, linear_map: Map, key: int) -> Wait:
    """Start a map on contiguous tensors of two ranks or more, by what is best for it."""
    x, size, kind = inputs[0], linear_map.who.size, linear_map.kind
    if not ("cpu:gloo" in linear_map.who.backends() and x.is_cpu):
        return native(inputs, linear_map, key)
    if kind not in ("broadcast", "all_reduce", "reduce"):
        return messages.begin(inputs, linear_map, key)
    is_small = x.nbytes <= messages.SHORT_BYTES and x.nbytes * (size - 1) <= _SENT_BYTES
    if kind == "broadcast" and not is_small:
        return _begin_large_broadcast(x, linear_map)
    # Two ranks exchange as many bytes in a ring, in two rounds.
    if kind != "broadcast" and size > 2 and not is_small and x.dtype in GLOO_DTYPES:
        return native(inputs, linear_map, key)
    return messages.begin(inputs, linear_map, key)


def local_result(tensors: Tensors, linear_map: Map) -> Tensors:
    """Return the result of a map that needs no other rank, as new tensors."""
    who = linear_map.who
    if linear_map.kind == "reduce_scatter":
        return (linear_map.parts_of(tensors)[who.rank].clone(),)
    if linear_map.kind == "reduce" and who.rank != linear_map.root:
        return tuple(torch.zeros_like(x) for x in tensors)
    return tuple(x.clone() for x in tensors)


def _begin_large_broadcast(x: torch.Tensor, linear_map: Map) -> Wait:
    """Start a broadcast of bytes, and check that they fill this rank's tensor, which Gloo does not."""
    who, root = linear_map.who, linear_map.root
    data = x.flatten().view(torch.uint8)
    is_root = who.rank == root
    if not is_root:
        marker = torch.frombuffer(bytearray(_UNFILLED), dtype=torch.uint8)
        data = torch.empty_like(data)
        data[-8:] = marker
    work = who.group.broadcast(data, root)
    copied = x.clone() if is_root else None  # the copy is made while the data is sent

    def wait() -> Tensors:
        work.wait()
        if copied is not None:
            return (copied,)
        if torch.equal(data[-8:], marker):  # by chance once in 2 ** 64 times
            raise RuntimeError(f"rank {root} sent less than the {data.numel()} bytes of this rank's tensor")
        return (data.view(x.dtype).view(x.shape),)

    return wait


def native(tensors: Tensors, linear_map: Map, key: int) -> Wait:  # noqa: ARG001 - as messages.begin
    """Start torch's own collective."""
    who = linear_map.who
    if linear_map.kind != "reduce" or tensors[0].dtype not in GLOO_DTYPES:
        finish = start_traceable(join_parts(tensors), linear_map)
        return lambda: separate_parts(finish(), linear_map)
    total = tensors[0].clone()
    work = who.group.reduce(total, linear_map.root)

    def wait() -> Tensors:
        work.wait()
        # The other ranks have partial sums, maybe in inference tensors, which cannot be zeroed in place.
        return (total if who.rank == linear_map.root else torch.zeros_like(total),)

    return wait


def join_parts(tensors: Tensors) -> torch.Tensor:
    """Return all parts that a map takes in one tensor, along dimension 0."""
    return concatenate(tensors) if len(tensors) > 1 else tensors[0]


def separate_parts(received: torch.Tensor, linear_map: Map) -> Tensors:
    """Return the results of a map from its joined parts; the reverse of :func:`join_parts`."""
    if not linear_map.separate_output:
        return (received,)
    size = linear_map.who.size
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
    kind, who, root = linear_map.kind, linear_map.who, linear_map.root
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
