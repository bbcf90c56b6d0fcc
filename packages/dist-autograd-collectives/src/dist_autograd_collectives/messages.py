"""The linear maps made of messages between two ranks on Gloo; the receiver computes sums.

Gloo silently fills only the front of a buffer if a message is too short, and ends the process if it is too
long. The messages' tags identify the call, its shapes and the dtype, so that a message never meets a buffer
of another shape, dtype or collective, even where ranks take part in different collectives of the same size:
both wait for a message that does not come, and raise at the group's timeout. A length sent with each message
would reveal the mismatch at once, but with it small messages took 0.17 to 0.3 ms instead of 0.10 (1 KiB
between two ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from dist_autograd_collectives.maps import Map, Tensors, hash_of_names
from dist_autograd_collectives.reductions import sum_of_rows, sum_of_two

Wait: TypeAlias = Callable[[], Tensors]
"""Waits for a map that was started, and returns what this rank received."""

SHORT_BYTES = 64 << 10
"""Messages are sent before receives are posted if none of them is longer, as in
:func:`dist_utils.start_messages`, whose tags tell lengths apart, but no shapes, dtypes and calls.
"""

_TAG = 1 << 30
"""Added to all tags, so that they never match a user's own ``send`` and ``recv``."""


def begin(tensors: Tensors, linear_map: Map, key: int) -> Wait:
    """Start a map on contiguous tensors of two ranks or more."""
    parts = linear_map.parts_of(tensors)
    if linear_map.kind in ("all_reduce", "reduce", "reduce_scatter"):
        return _begin_sum(parts, linear_map, key)
    return _begin_move(tensors[0], parts, linear_map, key)


def _begin_sum(parts: Tensors, linear_map: Map, key: int) -> Wait:
    """Start a sum of the parts that all ranks have for this one."""
    who, own = linear_map.who, parts[linear_map.who.rank]
    if not linear_map.sources:
        works = _start(parts, (), linear_map, key)
        return _after(works, lambda: (torch.zeros_like(own),))
    # Summed in rank order everywhere, so every rank gets the same bits. torch sums 16-bit dtypes in fp32.
    if who.size == 2:
        other = torch.empty_like(own)
        works = _start(parts, (other, other), linear_map, key)
        first, second = (own, other) if who.rank == 0 else (other, own)
        return _after(works, lambda: (sum_of_two(first, second, other),))
    rows = own.new_empty(who.size, *own.shape)
    works = _start(parts, rows.unbind(0), linear_map, key)
    rows[who.rank].copy_(own)
    return _after(works, lambda: (sum_of_rows(rows),))


def _begin_move(x: torch.Tensor, parts: Tensors, linear_map: Map, key: int) -> Wait:
    """Start a map that only moves parts."""
    who, own = linear_map.who, parts[linear_map.who.rank]
    if linear_map.kind == "broadcast":
        results: Tensors = (torch.empty_like(own),)
        places = results * who.size
        keeps_own = who.rank == linear_map.root
    else:
        lengths = linear_map.splits(x.shape[0])[1]
        if linear_map.separate_output:
            results = places = tuple(x.new_empty(length, *x.shape[1:]) for length in lengths)
        else:
            results = (x.new_empty(sum(lengths), *x.shape[1:]),)
            places = results[0].split_with_sizes(lengths)
        keeps_own = True
    works = _start(parts, places, linear_map, key)
    if keeps_own:
        places[who.rank].copy_(own)  # while messages are on their way
    return _after(works, lambda: results)


def _after(works: Sequence[dist.Work], finish: Wait) -> Wait:
    def wait() -> Tensors:
        for work in works:
            work.wait()
        return finish()

    return wait


def _start(parts: Tensors, places: Tensors, linear_map: Map, key: int) -> Sequence[dist.Work]:
    """Start sending parts to other ranks, and receiving into places: both have an entry for each rank.

    Empty parts are not sent. Receives are posted first if a message is long and may go to another host: with
    sends first, two hosts took turns on a duplex link (1.9 instead of 1.05 s). On one host a rank that sends
    after its receive was posted writes the message itself, under a lock for which Gloo's thread spins
    meanwhile: an exchange of 2 x 4 MiB took 5.0 ms, and 3.3 with sends first.

    Returns:
        What to wait for, in this order: sends first. Two exchanges of 1 MiB between two ranks took 2.5 ms so,
            and 3.9 the other way round.
    """
    who = linear_map.who
    group, names = who.group, hash((linear_map.names, hash_of_names(parts[0].dtype), key))
    sends = [(group.send, parts[rank], rank) for rank in linear_map.targets if parts[rank].numel()]
    receives = [(group.recv, places[rank], rank) for rank in linear_map.sources if places[rank].numel()]
    receives_first = not who.on_one_host and any(
        tensor.nbytes > SHORT_BYTES for _, tensor, _ in sends + receives
    )
    messages = receives + sends if receives_first else sends + receives
    works = [
        begin([tensor], rank, _TAG + hash((names, tensor.numel())) % _TAG) for begin, tensor, rank in messages
    ]
    return works[::-1] if receives_first else works
