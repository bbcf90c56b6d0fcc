"""Hidden state that a trial or a check must find: counters, shared memory, graphs made static late."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from overlap_runs import adamw, backward, batches, make_ddp, named, require_held, run_parts, same, snapshot
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import (
    CommunicationError,
    ConfigError,
    OptimizerHookState,
    OverlapMode,
    StepError,
    UnsupportedOptimizerError,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


class Ticks:
    """A counter in a slot."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        return self.count


class Counts(torch.optim.SGD):
    """Halves its rate after a thousand calls."""

    def __init__(self, parameters, ticks):
        super().__init__(parameters, lr=0.1)
        self.ticks = ticks

    @torch.no_grad()
    def step(self, closure=None):
        rate = -0.1 * 0.5 ** (next(self.ticks) // 1000)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=rate)


def _counters(seen):
    for ticks in (Ticks(), itertools.count(), iter(range(5000))):
        ddp = make_ddp()
        with pytest.raises(UnsupportedOptimizerError, match="attribute 'ticks', which the step changes"):
            overlap_optimizer(ddp, Counts(ddp.parameters(), ticks))
        seen[type(ticks).__name__] = True


def _net(memory, *, shared):
    """Two layers that are slices of one tensor: interleaved columns, or the same ones."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    net[1].weight = torch.nn.Parameter(memory[:, :8].data)
    net[4].weight = torch.nn.Parameter((memory[:, 7:15] if shared else memory[:, 8:]).data)
    return net


def _shared_memory(seen):
    def run(mode, *, shared):
        torch.manual_seed(1)
        net = _net(torch.randn(8, 16), shared=shared)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.0005)
        optimizer = adamw(ddp)
        if mode is not None:
            overlap_optimizer(ddp, optimizer, mode=mode)
        for x in batches(3):
            ddp(x.flatten()[:8]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(ddp), optimizer.state_dict()

    with pytest.raises(ConfigError, match="share memory"):
        run(OverlapMode.BUCKET, shared=True)
    with pytest.raises(ConfigError, match="share memory"):
        OptimizerHookState(torch.optim.SGD(_net(torch.randn(8, 16), shared=True).parameters(), lr=0.1))
    seen["after reduce"] = same(run(None, shared=True), run(OverlapMode.AFTER_REDUCE, shared=True))
    seen["side by side"] = same(run(None, shared=False), run(OverlapMode.BUCKET, shared=False))


def _static_later(seen):
    """Weight decay would move unused parameters."""

    def run(*, overlapped):
        ddp = make_ddp()
        ddp.module.skipped = (1, 2)
        optimizer = adamw(ddp)
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        ddp._set_static_graph()
        for x in batches(3):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(ddp), optimizer.state_dict()

    seen["unused are left alone"] = same(run(overlapped=False), run(overlapped=True))


def _rearranged_gradients(seen):
    """In one of many layers, in float64, with a power-of-two size, in the bucket's own memory."""
    ways = {
        "negated": torch.Tensor.neg_,
        "scaled": lambda gradient: gradient.mul_(16),
        "flipped": lambda gradient: gradient.copy_(gradient.flip(0)),
    }
    for name, change in ways.items():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(17)]).double()
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.2, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer)
        ddp(torch.ones(1, 64, dtype=torch.float64)).square().sum().backward()
        change(net[1].weight.grad)
        with pytest.raises(ConfigError, match="gradients were changed"):
            optimizer.step()
        seen[name] = True


class Exits(torch.optim.SGD):
    """Calls ``sys.exit()`` after the first parameter, if told to."""

    exits = False

    def step(self, closure=None):
        super().step(closure)
        if self.exits:
            raise SystemExit(3)


def _exits(seen):
    ddp = make_ddp()
    optimizer = Exits(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer)
    optimizer.exits = True
    with pytest.raises(RuntimeError, match="the step of bucket 0 failed: SystemExit: 3"):
        backward(ddp, batches(1)[0])
    with pytest.raises(StepError) as caught:
        optimizer.step()
    seen["its bucket is told"] = caught.value.report.partial == (0,)


def _exits_alone(seen):
    """In ``AFTER_REDUCE`` mode the calling thread exits; the other rank is told."""
    ddp = make_ddp()
    optimizer = Exits(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, mode=OverlapMode.AFTER_REDUCE)
    alone = dist.get_rank() == 1
    optimizer.exits = alone
    with pytest.raises(SystemExit) if alone else contextlib.nullcontext():
        backward(ddp, batches(1)[0])
    if alone or GROUPS_END_WITHOUT_GIL:
        with pytest.raises(StepError if alone else CommunicationError):
            handle.wait(10)
    seen["told"] = True


def _hooks_without_a_future(seen):
    for mode in OverlapMode:
        ddp = make_ddp()
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer, comm_hook=lambda state, bucket: None, mode=mode)
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="must return a future, got NoneType"):
            backward(ddp, batches(1)[0])
        with pytest.raises(CommunicationError, match="must return a future, got NoneType"):
            optimizer.step()
        seen[mode.name] = same(before, snapshot(ddp))


PARTS = named(
    _counters,
    _shared_memory,
    _static_later,
    _rearranged_gradients,
    _exits,
    _exits_alone,
    _hooks_without_a_future,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=90, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_hidden_state(ranks, name):
    require_held(ranks, name)
