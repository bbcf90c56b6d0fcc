"""Every collective twice: as a call on each rank, and simulated in one process with all ranks' inputs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import dist_autograd_collectives as dac

OPERATIONS = ["SUM", "AVG", "MAX", "MIN", "PRODUCT"]
LAST = -1
"""Stands for the last rank of the group as the root."""


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        call: ``(x, group, ranks)`` -> this rank's outputs; ``ranks`` are the members' global ranks.
        simulate: all members' ``x`` -> all members' outputs.
        linear: Whether the outputs are linear in the inputs.
    """

    call: Any
    simulate: Any
    linear: bool = True


def _reduced(stacked, op):
    if op == "SUM":
        return stacked.sum(0)
    if op == "AVG":
        return stacked.sum(0) / stacked.shape[0]
    if op == "PRODUCT":
        return stacked.prod(0)
    return (stacked.amax if op == "MAX" else stacked.amin)(0)


def _at_once(function, *args, **kwargs):
    return function(*args, **kwargs)


def _start_and_wait(function, *args, **kwargs):
    handle = dac.start(function, *args, **kwargs)
    assert handle.wait() is handle.wait()
    return handle.wait()


def _all_reduce(op, run=_at_once):
    return Case(
        call=lambda x, group, ranks: [run(dac.all_reduce, x, getattr(ReduceOp, op), group)],
        simulate=lambda xs: [[_reduced(torch.stack(xs), op)] for _ in xs],
        linear=op in ("SUM", "AVG"),
    )


def _reduce(op, root, run=_at_once):
    def simulate(xs):
        outputs = [[torch.zeros_like(x)] for x in xs]
        outputs[root] = [_reduced(torch.stack(xs), op)]
        return outputs

    return Case(
        call=lambda x, group, ranks: [run(dac.reduce, x, ranks[root], getattr(ReduceOp, op), group)],
        simulate=simulate,
        linear=op in ("SUM", "AVG"),
    )


def _entries(x, size):
    """One entry per rank, computed from x."""
    return [x * (index + 1) for index in range(size)]


def _reduce_scatter(op):
    return Case(
        call=lambda x, group, ranks: [
            dac.reduce_scatter(torch.empty_like(x), _entries(x, len(ranks)), getattr(ReduceOp, op), group)
        ],
        simulate=lambda xs: [
            [_reduced(torch.stack([_entries(x, len(xs))[rank] for x in xs]), op)] for rank in range(len(xs))
        ],
        linear=op in ("SUM", "AVG"),
    )


def _gather(root):
    def simulate(xs):
        outputs = [[torch.zeros_like(x) for _ in xs] for x in xs]
        outputs[root] = list(xs)
        return outputs

    return Case(call=lambda x, group, ranks: list(dac.gather(x, ranks[root], group)), simulate=simulate)


def _scatter(root, run=_at_once, *, lists):
    def call(x, group, ranks):
        is_source = ranks.index(dist.get_rank()) == root % len(ranks)
        entries, like = (_entries(x, len(ranks)), None) if is_source or lists else (None, x)
        return [run(dac.scatter, entries, ranks[root], group, like=like)]

    simulate = lambda xs: [[entry] for entry in _entries(xs[root], len(xs))]  # noqa: E731
    return Case(call, simulate)


def _all_gather(run=_at_once):
    return Case(
        lambda x, group, ranks: list(run(dac.all_gather, x, group)), lambda xs: [list(xs) for _ in xs]
    )


def _all_to_all(xs):
    return [[_entries(x, len(xs))[rank] for x in xs] for rank in range(len(xs))]


def _uneven(rank, size):
    """Return how many rows a rank sends to each rank."""
    return [(rank + other) % 3 for other in range(size)]


def _call_uneven(x, group, ranks):
    size, mine = len(ranks), ranks.index(dist.get_rank())
    sent, got = _uneven(mine, size), [_uneven(other, size)[mine] for other in range(size)]
    rows = torch.cat([x.flatten()] * 2 * size)[: sum(sent) * 2].view(sum(sent), 2)
    return [dac.all_to_all_single(rows.new_empty(sum(got), 2), rows, got, sent, group)]


def _simulate_uneven(xs):
    size = len(xs)
    parts = []
    for rank, x in enumerate(xs):
        sent = _uneven(rank, size)
        rows = torch.cat([x.flatten()] * 2 * size)[: sum(sent) * 2].view(sum(sent), 2)
        parts.append(rows.split(sent))
    return [[torch.cat([parts[other][rank] for other in range(size)])] for rank in range(size)]


def _even_single(x, group, ranks):
    stacked = torch.stack(_entries(x, len(ranks)))
    return [dac.all_to_all_single(torch.empty_like(stacked), stacked, group=group)]


def _last_stacked(x, count):
    """As many entries as asked for, along a new last dimension."""
    return x.unsqueeze(-1) * torch.arange(1, count + 1).to(x)


def _sizes(size):
    """Unequal lengths, one of them 0 where there are several ranks."""
    return [3 - min(rank, 3) if rank else 1 for rank in range(size)] if size < 4 else [1, 2, 0, 3]


def _reduce_scatter_dim(op, sizes):
    def count(size):
        return sum(sizes(size)) if sizes else 2 * size

    def call(x, group, ranks):
        size = len(ranks)
        y = _last_stacked(x, count(size))
        return [dac.reduce_scatter_dim(y, op.lower(), -1, sizes=sizes and sizes(size), group=group)]

    def simulate(xs):
        size = len(xs)
        total = _reduced(torch.stack([_last_stacked(x, count(size)) for x in xs]), op)
        return [[part] for part in torch.split(total, sizes(size) if sizes else 2, -1)]

    return Case(call, simulate, linear=op in ("SUM", "AVG"))


def _uneven_part(x, rank):
    return _last_stacked(x, 3)[..., : _sizes(4)[rank]]


def _simulate_all_to_all_dim(xs):
    """Split the last dimension, concatenate along the first."""
    sent = [_last_stacked(x, 2 * len(xs)).split(2, -1) for x in xs]
    return [[torch.cat([parts[rank] for parts in sent], 0)] for rank in range(len(xs))]


def _all_to_all_dim(run=_at_once):
    return Case(
        lambda x, group, ranks: [
            run(dac.all_to_all_dim, _last_stacked(x, 2 * len(ranks)), -1, 0, group=group)
        ],
        _simulate_all_to_all_dim,
    )


def _call_uneven_dim(x, group, ranks):
    sent = _uneven(ranks.index(dist.get_rank()), len(ranks))
    y = _last_stacked(x, sum(sent))
    return [dac.all_to_all_dim(y, -1, -1, input_sizes=sent, output_sizes="auto", group=group)]


def _simulate_uneven_dim(xs):
    size = len(xs)
    sent = [_last_stacked(x, sum(_uneven(r, size))).split(_uneven(r, size), -1) for r, x in enumerate(xs)]
    return [[torch.cat([parts[rank] for parts in sent], -1)] for rank in range(size)]


def _call_lengths_differ(x, group, ranks):
    """Each rank has a different length along the dimension that is concatenated."""
    mine = ranks.index(dist.get_rank())
    y = torch.stack([_last_stacked(x, len(ranks))] * (mine + 1))
    return [dac.all_to_all_dim(y, -1, 0, output_sizes="auto", group=group)]


def _simulate_lengths_differ(xs):
    sent = [torch.stack([_last_stacked(x, len(xs))] * (rank + 1)).split(1, -1) for rank, x in enumerate(xs)]
    return [[torch.cat([parts[rank] for parts in sent], 0)] for rank in range(len(xs))]


def _permute(pairs):
    def simulate(xs):
        source = {there: here for here, there in pairs(len(xs))}
        return [[xs[source[rank]] if rank in source else torch.zeros_like(x)] for rank, x in enumerate(xs)]

    return Case(lambda x, group, ranks: [dac.permute(x, pairs(len(ranks)), group=group)], simulate)


def _several(x):
    """Tensors of several shapes."""
    return [_last_stacked(x, 2), x.unsqueeze(0), 3 * _last_stacked(x, 1)]


def _coalesced(op):
    tensors = lambda x: [*_several(x), x.sum(dtype=x.dtype)]  # noqa: E731
    return Case(
        lambda x, group, ranks: list(dac.all_reduce_coalesced(tensors(x), op.lower(), group=group)),
        lambda xs: [
            [_reduced(torch.stack(each), op) for each in zip(*map(tensors, xs), strict=True)] for _ in xs
        ],
        linear=op in ("SUM", "AVG"),
    )


CASES = {
    **{f"all_reduce {op}": _all_reduce(op) for op in OPERATIONS},
    **{f"reduce {op}": _reduce(op, LAST) for op in OPERATIONS},
    **{f"reduce_scatter {op}": _reduce_scatter(op) for op in OPERATIONS},
    "broadcast first": Case(
        lambda x, group, ranks: [dac.broadcast(x, ranks[0], group)], lambda xs: [[xs[0]] for _ in xs]
    ),
    "broadcast last": Case(
        lambda x, group, ranks: [dac.broadcast(x, ranks[LAST], group)], lambda xs: [[xs[LAST]] for _ in xs]
    ),
    "gather first": _gather(0),
    "gather last": _gather(LAST),
    "scatter first": _scatter(0, lists=True),
    "scatter last, None elsewhere": _scatter(LAST, lists=False),
    "all_gather": _all_gather(),
    "all_gather_base": Case(
        lambda x, group, ranks: [dac.all_gather_base(x.new_empty(len(ranks) * x.numel()), x, group)],
        lambda xs: [[torch.cat([x.flatten() for x in xs])] for _ in xs],
    ),
    "all_to_all": Case(
        lambda x, group, ranks: list(
            dac.all_to_all([torch.empty_like(x) for _ in ranks], _entries(x, len(ranks)), group)
        ),
        _all_to_all,
    ),
    "all_to_all_single": Case(_even_single, lambda xs: [[torch.stack(out)] for out in _all_to_all(xs)]),
    "all_to_all_single, uneven": Case(_call_uneven, _simulate_uneven),
    "all_gather_cat": Case(
        lambda x, group, ranks: [dac.all_gather_cat(_last_stacked(x, 2), -1, group=group)],
        lambda xs: [[torch.cat([_last_stacked(x, 2) for x in xs], -1)] for _ in xs],
    ),
    "all_gather_cat, uneven": Case(
        lambda x, group, ranks: [
            dac.all_gather_cat(
                _uneven_part(x, ranks.index(dist.get_rank())), -1, sizes=_sizes(4)[: len(ranks)], group=group
            )
        ],
        lambda xs: [[torch.cat([_uneven_part(x, rank) for rank, x in enumerate(xs)], -1)] for _ in xs],
    ),
    "all_gather_cat, auto": Case(
        lambda x, group, ranks: [
            dac.all_gather_cat(
                torch.stack([x] * (1 + ranks.index(dist.get_rank()))), sizes="auto", group=group
            )
        ],
        lambda xs: [[torch.stack([x for rank, x in enumerate(xs) for _ in range(1 + rank)])] for _ in xs],
    ),
    "all_gather_stack": Case(
        lambda x, group, ranks: [dac.all_gather_stack(x, -1, group=group)],
        lambda xs: [[torch.stack(xs, -1)] for _ in xs],
    ),
    **{f"reduce_scatter_dim {op}": _reduce_scatter_dim(op, None) for op in OPERATIONS},
    "reduce_scatter_dim, uneven": _reduce_scatter_dim("SUM", _sizes),
    "reduce_scatter_dim MAX, uneven": _reduce_scatter_dim("MAX", _sizes),
    "all_to_all_dim": _all_to_all_dim(),
    "all_to_all_dim, uneven": Case(_call_uneven_dim, _simulate_uneven_dim),
    "all_to_all_dim, lengths differ": Case(_call_lengths_differ, _simulate_lengths_differ),
    "permute ring": _permute(lambda size: [(rank, (rank + 1) % size) for rank in range(size)]),
    "permute some": _permute(lambda size: [(0, size - 1)]),
    "all_reduce_coalesced SUM": _coalesced("SUM"),
    "all_reduce_coalesced MAX": _coalesced("MAX"),
    "started all_reduce SUM": _all_reduce("SUM", _start_and_wait),
    "started all_reduce MAX": _all_reduce("MAX", _start_and_wait),
    "started all_gather": _all_gather(_start_and_wait),
    "started reduce SUM": _reduce("SUM", LAST, _start_and_wait),
    "started scatter last, None elsewhere": _scatter(LAST, _start_and_wait, lists=False),
    "started all_to_all_dim": _all_to_all_dim(_start_and_wait),
}


def inputs(rank, shape, dtype, *, ties=True):
    """Return a rank's input, with zeros and with ties between ranks, so that every rule is used."""
    random = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(shape, generator=random, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    flat = x.flatten()
    if ties and flat.numel() > 3:
        flat[0] = 2  # equal on all ranks
        flat[1] = 0 if rank == 1 else 3  # one zero
        flat[2] = 0  # zeros everywhere
    return flat.view(shape).to(dtype)


def weights(rank, outputs):
    """Return one constant per output, different on each rank."""
    random = torch.Generator().manual_seed(200 + rank)
    return [torch.randn(output.shape, generator=random, dtype=torch.float64).to(output) for output in outputs]


def loss(rank, outputs, strides="plain"):
    """Return a nonlinear loss of the outputs, whose cotangents may have other strides on odd ranks."""
    total = 0
    for output, weight in zip(outputs, weights(rank, outputs), strict=True):
        y = output.real + output.imag if output.is_complex() else output
        w = weight.real if weight.is_complex() else weight
        if strides == "expanded":  # a cotangent with strides of 0
            total = total + y.sum() * (rank + 1)
            continue
        if strides == "transposed" and rank % 2:  # a cotangent that is transposed in memory
            y, w = y.movedim(0, -1).contiguous(), w.movedim(0, -1)
        total = total + (w * (y + y * y / 2)).sum()
    return total
