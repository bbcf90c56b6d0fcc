"""Clipping inside the overlapped step: by value, or by a policy of the user's own.

A policy that raises is in test_overlap_failures.py.
"""

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import one_adamw, require_same
from parity_cases import UNUSED, VIEW

from ddp_optim_overlap import ByValue, ClipPolicy, overlap_optimizer

pytestmark = pytest.mark.short


class Halves(ClipPolicy):
    """A user's own policy, which has no terms and another text on each rank."""

    def clip(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def __repr__(self):
        return f"Halves of rank {dist.get_rank()}"


def _by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.01)


ACCUMULATED = "overlap" + 3 * " accumulate train"


@runs.cases(
    {
        "by value": (ByValue(0.01), _by_value, ACCUMULATED, {}),
        "by value, view": (ByValue(0.01), _by_value, ACCUMULATED, VIEW),
        "by value, a bucket without gradients": (
            ByValue(0.01),
            _by_value,
            ACCUMULATED.replace("overlap", "overlap freeze skip"),
            UNUSED,
        ),
        "own": (Halves(), Halves().clip, ACCUMULATED, {}),
    }
)
def check_bits(policy, clip, words, ddp_options):
    require_same(words, one_adamw, options={"clip": policy}, clip=clip, **ddp_options)


@runs.as_ordinary
def check_gradients_of_other_optimizers(*, overlapped):
    """They are not clipped."""
    ddp = runs.make_ddp(bucket_cap_mb=25)  # one bucket
    first, *others = ddp.parameters()
    optimizer, rest = torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)
    if overlapped:
        overlap_optimizer(ddp, optimizer, clip=Halves())
    for x in runs.batches(2):
        runs.backward(ddp, x)
        if not overlapped:
            Halves().clip([first])
        optimizer.step()
        rest.step()
        ddp.zero_grad()
    return runs.snapshot(ddp)


check = runs.on_ranks(__name__, timeout=60)


def test_clipping(check):
    check()


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limits_must_be_positive(limit):
    with pytest.raises(ValueError, match="positive"):
        ByValue(limit)
