"""Gradients against finite differences: one element of one rank moves at a time, all ranks' losses count."""

import torch
import torch.distributed as dist
from collective_cases import CASES, inputs, loss

from dist_utils.testing import run_ranks

STEP = 1e-6
# The loss's third derivatives are below 1e3 here, so the formula is off by 1e3 STEP^2 / 6; and its two
# values, below 1e3, carry rounding of 1e3 x 2^-53 each, divided by the step.
TOLERANCE = 1e-6


def _compare(rank):
    ranks = list(range(dist.get_world_size()))
    wrong = {}
    for name, case in CASES.items():
        # Without ties, where the derivative does not exist.
        x = inputs(rank, (2,), torch.float64, ties=False).requires_grad_()
        loss(rank, case.call(x, None, ranks)).backward()
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        numeric = torch.zeros_like(gradient)
        for mover in ranks:
            for element in range(x.numel()):
                totals = []
                for direction in (STEP, -STEP):
                    moved = x.detach().clone()
                    if rank == mover:
                        moved[element] += direction
                    total = torch.as_tensor(loss(rank, case.call(moved, None, ranks))).detach()
                    dist.all_reduce(total)
                    totals.append(total.item())
                if rank == mover:
                    numeric[element] = (totals[0] - totals[1]) / (2 * STEP)
        error = (gradient - numeric).abs().max().item()
        if error > TOLERANCE * max(1, numeric.abs().max().item()):
            wrong[name] = error
    return wrong


def test_every_gradient_is_the_derivative_of_all_ranks_losses():
    assert run_ranks(_compare, 3, timeout=120) == [{}, {}, {}]


def _adjoint(rank):
    """Return the difference of sum <f(x), u> and sum <x, f^T(u)>, relative to their size."""
    ranks = list(range(dist.get_world_size()))
    found = {}
    for name, case in CASES.items():
        if not case.linear:
            continue
        x = inputs(rank, (2, 3), torch.float64).requires_grad_()
        outputs = case.call(x, None, ranks)
        random = torch.Generator().manual_seed(300 + rank)
        us = [torch.randn(output.shape, generator=random, dtype=torch.float64) for output in outputs]
        forwards = sum((output * u).sum() for output, u in zip(outputs, us, strict=True))
        forwards.backward()
        transposed = torch.zeros_like(x) if x.grad is None else x.grad
        sides = torch.stack([forwards.detach(), (x.detach() * transposed).sum()])
        dist.all_reduce(sides)
        found[name] = abs(sides[0] - sides[1]).item() / max(1, abs(sides[0]).item())
    return found


def test_backward_of_linear_collectives_is_their_transpose():
    for found in run_ranks(_adjoint, 3, timeout=60):
        # A sum of fewer than 100 products in a different order.
        assert {name: error for name, error in found.items() if error > 100 * 2**-52} == {}
