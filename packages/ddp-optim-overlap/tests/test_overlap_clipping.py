"""Clipping inside the overlapped step: exact or approximate, as documented."""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    as_ordinary,
    assert_same,
    backward,
    batches,
    cases,
    ends,
    make_ddp,
    on_ranks,
    snapshot,
    start,
    train_on,
)

from ddp_optim_overlap import (
    ByValue,
    ClipPolicy,
    CommunicationError,
    ConfigError,
    PerBucketNorm,
    PreviousStepNorm,
    StepError,
    overlap_optimizer,
)
from dist_utils.testing import patience, run_ranks

pytestmark = pytest.mark.short

LIMIT = 0.02  # below the norm of every bucket


@cases(
    {
        "plain": ({}, {}),
        "view": ({"gradient_as_bucket_view": True}, {}),
        "released": ({}, {"release_gradients": True}),
    }
)
@as_ordinary
def check_by_value(ddp_options, options, *, overlapped):
    """Exactly what clip_grad_value_ does, also to accumulated gradients."""
    ddp, optimizer, _ = start(
        overlapped=overlapped, options={"clip": ByValue(0.01), **options}, **ddp_options
    )
    for first, second in itertools.pairwise(batches(4)):
        with ddp.no_sync():
            backward(ddp, first)
        backward(ddp, second)
        if not overlapped:
            torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(ddp)


class Halves(ClipPolicy):
    """A user's own policy, which has no terms and another text on each rank."""

    def clip(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def __repr__(self):
        return f"Halves of rank {dist.get_rank()}"


@cases({"kept": ({},), "released": ({"release_gradients": True},)})
@as_ordinary
def check_own_policy(options, *, overlapped):
    ddp, optimizer, _ = start(overlapped=overlapped, options={"clip": Halves(), **options})
    for x in batches(3):
        backward(ddp, x)
        if not overlapped:
            Halves().clip(list(ddp.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return ends(ddp, optimizer)


class Refuses(Halves):
    """A policy that raises, on one rank or on all, once it has clipped two steps."""

    def __init__(self, *ranks):
        self.ranks, self.steps = ranks, 0

    def begin(self):
        self.steps += 1
        if self.steps > 2 and dist.get_rank() in self.ranks:
            raise ValueError("no limit is known yet")


@cases({"on all ranks": ((0, 1),), "on one rank": ((0,),)})
def check_a_policy_that_raises(ranks):
    """Every rank raises, soon and with a type, and after remove() the model trains on."""
    ddp, optimizer, handle = start(options={"clip": Refuses(*ranks)})
    data = batches(3)
    train_on(ddp, optimizer, data[:2])
    began = time.monotonic()
    if dist.get_rank() in ranks:
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="no limit is known yet"):
            backward(ddp, data[2])
        with pytest.raises(StepError, match=r"ValueError.*no limit is known yet"):
            optimizer.step()
        assert_same(snapshot(ddp), before)
    else:
        backward(ddp, data[2])
        with pytest.raises(CommunicationError, match="another rank failed"):
            handle.wait()
    assert time.monotonic() - began < patience(20)
    handle.remove()
    ddp.zero_grad()
    for one in itertools.chain(ddp.parameters(), ddp.buffers()):
        dist.broadcast(one.detach(), 0)
    train_on(ddp, optimizer, data)


def _sgd_of_rate_one(ddp):
    """It shows the gradient that it has used."""
    return torch.optim.SGD(ddp.parameters(), lr=1.0)


def _run(clip, **options):
    """Return the norm of all averaged gradients, that of the used ones, and the reports, by step."""
    ddp, optimizer, handle = start(_sgd_of_rate_one, options={"clip": clip, **options})
    full, used, reports = [], [], []
    for x in batches(4):
        before = snapshot(ddp)
        full.append(_norm_without_overlap(ddp.module, x))
        optimizer.zero_grad()
        backward(ddp, x)
        reports.append(handle.wait())
        moves = [one - other for one, other in zip(before, snapshot(ddp), strict=True)]
        used.append(torch.nn.utils.get_total_norm(moves).item())
    return full, used, reports


def _norm_without_overlap(module, x):
    copied = Net()
    copied.load_state_dict(module.state_dict())
    backward(copied, x)
    gradient = torch.cat([parameter.grad.flatten() for parameter in copied.parameters()])
    dist.all_reduce(gradient)
    return gradient.norm().item() / dist.get_world_size()


@cases({"kept": (False,), "released": (True,)})
def check_per_bucket_norm(released):
    """Every bucket is at its limit, whichever are stepped together. Sums in other orders: 1e-3 is ample."""
    full, used, reports = _run(PerBucketNorm(LIMIT), release_gradients=released)
    assert_same([report.norm for report in reports], [None] * 4)
    limits = [LIMIT * report.buckets**0.5 for report in reports]
    assert_same([report.buckets for report in reports], [1, 5, 5, 5])
    assert used == pytest.approx(limits, rel=1e-3)
    assert all(norm > limit for norm, limit in zip(full, limits, strict=True)), (full, limits)


@as_ordinary
def check_gradients_of_other_optimizers(*, overlapped):
    """They are not clipped, and do not count for a norm."""
    ddp = make_ddp(bucket_cap_mb=25)  # one bucket
    first, *others = ddp.parameters()
    optimizer, rest = torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)
    if overlapped:
        overlap_optimizer(ddp, optimizer, clip=PerBucketNorm(LIMIT))
    for x in batches(2):
        backward(ddp, x)
        if not overlapped:
            PerBucketNorm(LIMIT).clip([first])
        optimizer.step()
        rest.step()
        ddp.zero_grad()
    return snapshot(ddp)


def check_previous_step_norm():
    full, used, reports = _run(PreviousStepNorm(LIMIT))
    assert [report.norm.item() for report in reports] == pytest.approx(full, rel=1e-4)
    assert used[0] == pytest.approx(LIMIT, rel=1e-3)  # no norm is known yet, and there is one bucket
    expected = [LIMIT * now / before for before, now in itertools.pairwise(full)]
    assert used[1:] == pytest.approx(expected, rel=1e-3)


def check_a_norm_of_its_own():
    """Of one model: two would be clipped by the norms of both."""
    clip = PreviousStepNorm(LIMIT)
    model, _, handle = start(options={"clip": clip})
    with pytest.raises(ConfigError, match="make one for each model"):
        start(options={"clip": clip})
    handle.remove()
    other, optimizer, _ = start(options={"clip": clip})
    train_on(other, optimizer, batches(2))
    del model  # until here, or its overlap would have ended


check = on_ranks(__name__, timeout=60)


def test_clipping(check):
    check()


def _join_with_the_last_norm(rank):
    ddp, optimizer, handle = start(options={"clip": PreviousStepNorm(LIMIT)})
    with pytest.raises(RuntimeError), ddp.join():
        train_on(ddp, optimizer, batches(1 + rank))
    with pytest.raises(CommunicationError if rank else ConfigError, match="" if rank else "PerBucketNorm"):
        handle.wait()
    if rank == 0:
        os._exit(3)  # as an error ends a job: the other rank need not wait for the timeout


def test_no_rank_clips_by_an_older_norm_after_a_join():
    run_ranks(_join_with_the_last_norm, 2, may_die={0}, timeout=60)


@pytest.mark.parametrize("norm", [-5.0, float("nan"), torch.tensor(-1.0)])
def test_a_norm_is_not_negative(norm):
    with pytest.raises(ValueError, match="norm, which is not negative"):
        PreviousStepNorm(1.0, previous=norm)


@pytest.mark.parametrize("policy", [ByValue, PerBucketNorm, PreviousStepNorm])
@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limits_must_be_positive(policy, limit):
    with pytest.raises(ValueError, match="positive"):
        policy(limit)
