"""``optimizer.step(closure)``: the closure runs once, and nothing that its pass stepped is stepped again."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    adamw,
    backward,
    batches,
    both,
    make_ddp,
    named,
    require_held,
    run_parts,
    same,
    snapshot,
)

from ddp_optim_overlap import (
    ConfigError,
    GlobalNorm,
    OverlapMode,
    StepError,
    UnsupportedOptimizerError,
    hook_then_optimizer,
    overlap_optimizer,
)
from ddp_optim_overlap.averaging import average_like_ddp
from ddp_optim_overlap.drop_ins import OptimizerHookState
from dist_utils.testing import run_ranks


def _momentum(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _closure(ddp, optimizer, x, calls, *, zero_first, after=lambda: None):
    """Return a trainer's closure: forward, zero_grad and backward, in one order or the other."""

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        if zero_first:
            optimizer.zero_grad()
        loss = ddp(x).square().sum()
        if not zero_first:
            optimizer.zero_grad()
        loss.backward()
        after()
        return loss.detach()

    return closure


def _run(
    make,
    *,
    overlapped,
    zero_first=True,
    by_name=False,
    accumulate=1,
    schedule=False,
    clip=None,
    mode=OverlapMode.BUCKET,
    **ddp_options,
):
    """Train as a trainer with automatic optimization: accumulate without a step, then step with a closure."""
    ddp = make_ddp(**ddp_options)
    optimizer = make(ddp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    if overlapped:
        overlap_optimizer(ddp, optimizer, mode=mode, clip=None if clip is None else GlobalNorm(clip))
    losses, calls = [], []

    def clips():
        if clip is not None and not overlapped:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)

    for number, x in enumerate(batches(6)):
        if (number + 1) % accumulate:
            with ddp.no_sync():
                backward(ddp, x)
            continue
        closure = _closure(ddp, optimizer, x, calls, zero_first=zero_first and accumulate == 1, after=clips)
        if accumulate > 1:
            closure = _accumulating(ddp, x, calls)
        losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
        if accumulate > 1:
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return snapshot(ddp), optimizer.state_dict(), losses, len(calls)


def _accumulating(ddp, x, calls):
    def closure():
        calls.append(1)
        loss = ddp(x).square().sum()
        loss.backward()
        return loss.detach()

    return closure


def _automatic(seen):
    for name, options in {
        "plain": {"make": adamw},
        "momentum, by name": {"make": _momentum, "by_name": True},
        "zeroed behind the forward pass": {"make": adamw, "zero_first": False},
        "accumulated": {"make": adamw, "accumulate": 3},
        "scheduled": {"make": _momentum, "schedule": True},
        "bucket views": {"make": adamw, "gradient_as_bucket_view": True},
        "unused": {"make": adamw, "find_unused_parameters": True},
        "after the reduction": {"make": adamw, "mode": OverlapMode.AFTER_REDUCE},
        "a factor for each": {"make": _factors},
        "clipped": {"make": adamw, "mode": OverlapMode.AFTER_REDUCE, "clip": 0.1},
    }.items():
        seen[name] = both(lambda overlapped, options=options: _run(overlapped=overlapped, **options))


def _manual(seen):
    """Manual backward(), and a step with an empty closure, as trainers call it."""

    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        given = []
        for x in batches(3):
            optimizer.zero_grad()
            backward(ddp, x)
            given += [optimizer.step(lambda: None), optimizer.step(lambda: 2.0)]  # the second one steps
        return snapshot(ddp), optimizer.state_dict(), given

    seen["manual"] = both(run)


def _paused(seen):
    """Under pause(), after remove() and in no_sync() the closure runs once and the step is ordinary."""

    def run(around, *, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer) if overlapped else None
        calls = []
        first, second, third = batches(3)
        optimizer.step(_closure(ddp, optimizer, first, calls, zero_first=True))
        with around(ddp, handle):
            optimizer.step(_closure(ddp, optimizer, second, calls, zero_first=True))
        if handle is not None:
            handle.remove()
        optimizer.step(_closure(ddp, optimizer, third, calls, zero_first=True))
        return snapshot(ddp), optimizer.state_dict(), calls

    def paused(_, handle):
        return contextlib.nullcontext() if handle is None else handle.pause()

    for name, around in {"paused": paused, "no_sync": lambda ddp, _: ddp.no_sync()}.items():
        seen[name] = both(lambda overlapped, around=around: run(around, overlapped=overlapped))


def _drop_in(seen):
    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        if overlapped:
            hook = hook_then_optimizer(average_like_ddp, OptimizerHookState(optimizer))
            ddp.register_comm_hook(None, hook)
        calls = []
        for x in batches(3):
            optimizer.step(_closure(ddp, optimizer, x, calls, zero_first=True))
        return snapshot(ddp), optimizer.state_dict(), calls

    seen["drop-in"] = both(run)


def _steps_twice(seen):
    """A backward pass before step(closure) has stepped: the closure's would step again."""
    ddp = make_ddp()
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    first, second = batches(2)
    backward(ddp, first)
    after = snapshot(ddp)
    with pytest.raises(ConfigError, match=r"step\(closure\)"):
        optimizer.step(_closure(ddp, optimizer, second, [], zero_first=True))
    seen["nothing is stepped twice"] = same(after, snapshot(ddp))
    ddp = make_ddp()
    optimizer = adamw(ddp)
    handle = overlap_optimizer(ddp, optimizer)
    backward(ddp, first)
    with handle.pause():
        ran = []
        with pytest.raises(ConfigError, match="closure would come too late"):
            optimizer.step(lambda: ran.append(1))
    seen["not run in vain"] = not ran


class Polyak(torch.optim.SGD):
    """Takes a longer step if the loss is large."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(loss)
        super().step()
        return loss


class Factors(torch.optim.SGD):
    """Has a factor for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter, factor in zip(group["params"], group["factors"], strict=True):
                parameter.sub_(parameter.grad * factor)
        return loss


def _factors(ddp):
    parameters = list(ddp.parameters())
    return Factors([{"params": parameters, "factors": [0.01 * (1 + n) for n in range(len(parameters))]}])


class Twice(torch.optim.SGD):
    """Evaluates the closure again after its step."""

    def step(self, closure=None):
        super().step(closure)
        return None if closure is None else closure()


def _needs_the_loss(seen):
    for kind in (Polyak, Twice):
        ddp = make_ddp()
        optimizer = kind(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer)  # without a closure it works like any other optimizer
        before, calls = snapshot(ddp), []
        for _ in range(2):
            with pytest.raises(UnsupportedOptimizerError, match="depends on the closure"):
                optimizer.step(_closure(ddp, optimizer, batches(1)[0], calls, zero_first=True))
        seen[kind.__name__] = same(before, snapshot(ddp)) and not calls


def _fails(seen):
    """An error of the closure itself is raised; an error of its backward pass keeps its type."""
    ddp = make_ddp()
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    before = snapshot(ddp)

    def raises():
        raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        optimizer.step(raises)
    seen["nothing stepped"] = same(before, snapshot(ddp))
    calls = []
    optimizer.step(_closure(ddp, optimizer, batches(1)[0], calls, zero_first=True))
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(StepError, match="NoneType"):
        optimizer.step(_closure(ddp, optimizer, batches(1)[0], calls, zero_first=True))
    dist.barrier()
    seen["ran"] = calls == [1, 1]


PARTS = named(_automatic, _manual, _paused, _drop_in, _steps_twice, _needs_the_loss, _fails)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=60)


@pytest.mark.parametrize("name", PARTS)
def test_step_with_a_closure(ranks, name):
    require_held(ranks, name)
