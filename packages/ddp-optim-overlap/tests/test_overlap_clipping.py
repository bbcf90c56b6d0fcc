"""Clipping inside the overlapped step: by value, or by a policy of the user's own.

A policy that raises is in test_overlap_failures.py.
"""

import itertools

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist

from ddp_optim_overlap import ByValue, ClipPolicy, overlap_optimizer

pytestmark = pytest.mark.short


class Halves(ClipPolicy):
    """A user's own policy, which has no terms and another text on each rank."""

    def clip(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def __repr__(self):
        return f"Halves of rank {dist.get_rank()}"


def _by_value(ddp):
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


def _in_halves(ddp):
    Halves().clip(list(ddp.parameters()))


RELEASED = {"release_gradients": True}
VIEW, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}


@runs.cases(
    {
        "by value": (ByValue(0.01), _by_value, {}, {}),
        "by value, view": (ByValue(0.01), _by_value, {}, VIEW),
        "by value, released": (ByValue(0.01), _by_value, RELEASED, {}),
        "by value, a bucket without gradients": (ByValue(0.01), _by_value, {}, UNUSED),
        "own": (Halves(), _in_halves, {}, {}),
        "own, released": (Halves(), _in_halves, RELEASED, {}),
    }
)
@runs.as_ordinary
def check_bits(policy, clip, options, ddp_options, *, overlapped):
    """Also of accumulated gradients."""
    ddp, optimizer, _ = runs.start(overlapped=overlapped, options={"clip": policy, **options}, **ddp_options)
    if ddp_options == UNUSED:
        ddp.module.skipped = (1,)
        ddp.module.layers[3].requires_grad_(False)
    for first, second in itertools.pairwise(runs.batches(4)):
        with ddp.no_sync():
            runs.backward(ddp, first)
        runs.backward(ddp, second)
        if not overlapped:
            clip(ddp)
        optimizer.step()
        optimizer.zero_grad()
    return runs.ends(ddp, optimizer)


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
