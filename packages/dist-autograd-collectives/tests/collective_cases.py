"""Every collective twice: as a call on each rank, and as arithmetic on all ranks' inputs in one process."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import dist_autograd_collectives as dac

OPERATIONS = ["SUM", "AVG", "MAX", "MIN", "PRODUCT"]
LAST = -1
"""As a root: the last rank of the group."""


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        call: ``(x, group, ranks)`` -> this rank's outputs; ``ranks`` are the members' global ranks.
        simulate: all members' ``x`` -> all members' outputs.
        linear: Whether the outputs are linear in the inputs.
        second_order: Whether every rank has a path to its x, which a second backward needs.
    """

    call: Any
    simulate: Any
    linear: bool = True
    second_order: bool = True


def _reduced(stacked, op):
    if op == "SUM":
        return stacked.sum(0)
    if op == "AVG":
        return stacked.sum(0) / stacked.shape[0]
    if op == "PRODUCT":
        return stacked.prod(0)
    return (stacked.amax if op == "MAX" else stacked.amin)(0)


def _all_reduce(op):
    return Case(
        call=lambda x, group, ranks: [dac.all_reduce(x, getattr(ReduceOp, op), group)],
        simulate=lambda xs: [[_reduced(torch.stack(xs), op)] for _ in xs],
        linear=op in ("SUM", "AVG"),
    )


def _reduce(op, root):
    def simulate(xs):
        outputs = [[torch.zeros_like(x)] for x in xs]
        outputs[root] = [_reduced(torch.stack(xs), op)]
        return outputs

    return Case(
        call=lambda x, group, ranks: [dac.reduce(x, ranks[root], getattr(ReduceOp, op), group)],
        simulate=simulate,
        linear=op in ("SUM", "AVG"),
    )


def _entries(x, size):
    """One entry for each rank, made from x."""
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


def _scatter(root, receivers):
    def call(x, group, ranks):
        mine = ranks.index(dist.get_rank())
        is_source = mine == root % len(ranks)
        entries = _entries(x, len(ranks)) if is_source or receivers == "list" else None
        return [dac.scatter(entries, ranks[root], group, anchor=True)]

    simulate = lambda xs: [[entry] for entry in _entries(xs[root], len(xs))]  # noqa: E731
    return Case(call, simulate, second_order=receivers == "list")


def _all_to_all(xs):
    return [[_entries(x, len(xs))[rank] for x in xs] for rank in range(len(xs))]


def _uneven(rank, size):
    """How many rows a rank sends to each."""
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
    "scatter first": _scatter(0, "list"),
    "scatter last, None elsewhere": _scatter(LAST, None),
    "all_gather": Case(
        lambda x, group, ranks: list(dac.all_gather(x, group)), lambda xs: [list(xs) for _ in xs]
    ),
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
}


def inputs(rank, shape, dtype, *, ties=True):
    """Return a rank's input: with ties between ranks and zeros, so that every rule is used."""
    random = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(shape, generator=random, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    flat = x.flatten()
    if ties and flat.numel() > 3:
        flat[0] = 2  # equal on all ranks
        flat[1] = 0 if rank == 1 else 3  # one zero
        flat[2] = 0  # zeros everywhere
    return flat.view(shape).to(dtype)


def weights(rank, outputs):
    """Return one constant for each output, another on each rank."""
    random = torch.Generator().manual_seed(200 + rank)
    return [
        torch.randn(output.shape, generator=random, dtype=torch.float64).to(output.dtype)
        for output in outputs
    ]


def loss(rank, outputs):
    """Return a number that is not linear in the outputs."""
    total = 0
    for output, weight in zip(outputs, weights(rank, outputs), strict=True):
        y = output.real + output.imag if output.is_complex() else output
        w = weight.real if weight.is_complex() else weight
        total = total + (w * (y + y * y / 2)).sum()
    return total
