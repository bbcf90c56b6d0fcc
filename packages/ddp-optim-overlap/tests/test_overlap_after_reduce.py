"""``AFTER_REDUCE``: the optimizer's own step runs once, whatever state it keeps or couples."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    adamw,
    backward,
    batches,
    both,
    differences,
    make_ddp,
    named,
    one_group,
    require_held,
    run_parts,
    same,
    snapshot,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import DoubleBackwardError, GlobalNorm, OverlapMode, StepError, overlap_optimizer
from dist_utils.testing import run_ranks

AFTER_REDUCE = OverlapMode.AFTER_REDUCE


class Counts(torch.optim.SGD):
    """Divides its rate by the number of its calls: one call too many changes every bit."""

    def count(self):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        rate = 0.1 / self.count()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


class CountsInState(Counts):
    def count(self):
        state = self.state["all"]
        state["calls"] = state.get("calls", 0) + 1
        return state["calls"]


class CountsInTensorOption(Counts):
    def count(self):
        return float(self.param_groups[0].setdefault("calls", torch.zeros(())).add_(1))


class CountsInList(Counts):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.history = []

    def count(self):
        self.history.append(1)
        return len(self.history)


class DrawsOnce(Counts):
    """Its rate is one random number per whole step."""

    def count(self):
        return 1 + float(torch.rand(()))


def _whole_steps(seen):
    for make in (CountsInState, CountsInTensorOption, CountsInList, DrawsOnce):
        different = differences(one_group(make, {"lr": 0.1}), options={"mode": AFTER_REDUCE})
        seen[make.__name__] = not different


def _pre_hooks(seen):
    """They see the parameters and their averaged gradients, once per step."""

    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        norms = []

        def look(optimizer, *_):
            owned = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
            norms.append(torch.stack(owned))  # fails if there are none

        optimizer.register_step_pre_hook(look)
        if overlapped:
            overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE)
        for x in batches(3):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        assert len(norms) == 3
        return snapshot(ddp), norms, optimizer.state_dict()

    seen["run once, with parameters"] = both(run)


def _a_pre_hook_that_raises(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)

    def fails(*_):
        raise ValueError("not today")

    optimizer.register_step_pre_hook(fails)
    overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE)
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="not today"):
        backward(ddp, batches(1)[0])
    with pytest.raises(StepError, match="not today"):
        optimizer.step()
    seen["nothing moved"] = same(before, snapshot(ddp))
    groups = optimizer.state_dict()["param_groups"]
    seen["state_dict is whole"] = [len(group["params"]) for group in groups] == [len(before)]


def _autocast(seen):
    """backward() under autocast; Adafactor multiplies matrices, and must do so in full precision."""

    def run(*, overlapped):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(2)])
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.0005)
        optimizer = torch.optim.Adafactor(ddp.parameters(), lr=0.05)
        if overlapped:
            overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                ddp(torch.randn(4, 16, generator=generator)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(ddp), optimizer.state_dict()

    seen["Adafactor"] = both(run)


def _a_scaler_that_skips(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE, scaler=scaler, clip=GlobalNorm(1.0))
    reports = []
    for infinite in (True, False):
        x = batches(1)[0]
        if infinite:
            x[0] = torch.inf
        before = snapshot(ddp)
        scaler.scale(ddp(x).square().sum()).backward()
        optimizer.step()
        reports.append((handle.wait().stepped, same(before, snapshot(ddp))))
        buckets = handle.wait().buckets
        scaler.update()
        optimizer.zero_grad()
    seen["nothing stepped, nothing reported"] = reports[0] == ((), True)
    seen["and then again"] = reports[1] == (tuple(range(buckets)), False)


def _two_backwards(seen):
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE)
        first, second = batches(2)
        backward(ddp, first)
        after = snapshot(ddp)
        for around in (contextlib.nullcontext, ddp.no_sync):
            with around(), pytest.raises(DoubleBackwardError, match="zero_grad"):
                backward(ddp, second)
        seen["bucket view", view] = same(after, snapshot(ddp))


def _pause(seen):
    """Passes that only average, and then one that steps; an ordinary step in between."""

    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE) if overlapped else None
        data = batches(6)
        for first, second in zip(data[::2], data[1::2], strict=True):
            with handle.pause() if handle else contextlib.nullcontext():
                backward(ddp, first)
            backward(ddp, second)
            optimizer.step()
            optimizer.zero_grad()
        with handle.pause() if handle else contextlib.nullcontext():
            backward(ddp, data[0])
            optimizer.step()
        if handle is not None:
            assert handle.wait().number == 3
        return snapshot(ddp), optimizer.state_dict()

    seen["accumulates"] = both(run)


PARTS = named(
    _whole_steps,
    _pre_hooks,
    _a_pre_hook_that_raises,
    _autocast,
    _a_scaler_that_skips,
    _two_backwards,
    _pause,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=60, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_the_optimizers_own_step(ranks, name):
    require_held(ranks, name)
