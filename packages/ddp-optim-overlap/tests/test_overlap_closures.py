"""``optimizer.step(closure)``: the closure runs once, and nothing that its pass stepped is stepped again."""

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    adamw,
    as_ordinary,
    assert_same,
    backward,
    batches,
    ends,
    on_ranks,
    paused,
    snapshot,
    start,
)

from ddp_optim_overlap import (
    ConfigError,
    StepError,
)


def _momentum(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _closure(ddp, optimizer, x, calls, *, zero_first=True):
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
        return loss.detach()

    return closure


@as_ordinary(
    (adamw, "", {}),
    (_momentum, "by name", {}),
    (adamw, "zeroed behind the forward pass", {}),
    (_momentum, "scheduled", {}),
    (adamw, "", {"gradient_as_bucket_view": True}),
    (adamw, "", {"find_unused_parameters": True}),
)
def check_automatic(make, how, options, *, overlapped):
    """Train as a trainer with automatic optimization."""
    ddp, optimizer, _ = start(make, overlapped=overlapped, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, calls = [], []
    for x in batches(6):
        closure = _closure(ddp, optimizer, x, calls, zero_first=not how.startswith("zeroed"))
        losses.append(optimizer.step(closure=closure) if how == "by name" else optimizer.step(closure))
        if how == "scheduled":
            scheduler.step()
    return ends(ddp, optimizer), losses, len(calls)


@as_ordinary()
def check_accumulated(*, overlapped):
    """As above, with passes that accumulate before the closure."""
    ddp, optimizer, _ = start(overlapped=overlapped)
    calls, data = [], iter(batches(6))

    def closure():
        calls.append(1)
        loss = ddp(next(data)).square().sum()
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(2):
        for _ in range(2):
            with ddp.no_sync():
                backward(ddp, next(data))
        losses.append(optimizer.step(closure))
        optimizer.zero_grad()
    return ends(ddp, optimizer), losses, len(calls)


@as_ordinary()
def check_manual(*, overlapped):
    """Manual backward(), and a step with an empty closure, as trainers call it."""
    ddp, optimizer, _ = start(overlapped=overlapped)
    given = []
    for x in batches(3):
        optimizer.zero_grad()
        backward(ddp, x)
        given += [optimizer.step(lambda: None), optimizer.step(lambda: 2.0)]  # the second one steps
    return ends(ddp, optimizer), given


@as_ordinary(("pause",), ("no_sync",))
def check_paused(how, *, overlapped):
    """Under pause(), after remove() and in no_sync() the closure runs once and the step is ordinary."""
    ddp, optimizer, handle = start(overlapped=overlapped)
    calls = []
    first, second, third = batches(3)
    optimizer.step(_closure(ddp, optimizer, first, calls))
    with ddp.no_sync() if how == "no_sync" else paused(handle):
        optimizer.step(_closure(ddp, optimizer, second, calls))
    if handle is not None:
        handle.remove()
    optimizer.step(_closure(ddp, optimizer, third, calls))
    return ends(ddp, optimizer), calls


def check_steps_twice():
    """A backward pass before step(closure) has stepped: the closure's would step again."""
    ddp, optimizer, _ = start()
    first, second = batches(2)
    backward(ddp, first)
    after = snapshot(ddp)
    with pytest.raises(ConfigError, match=r"step\(closure\)"):
        optimizer.step(_closure(ddp, optimizer, second, []))
    assert_same(snapshot(ddp), after)
    ddp, optimizer, handle = start()
    backward(ddp, first)
    with handle.pause():
        ran = []
        with pytest.raises(ConfigError, match="closure would come too late"):
            optimizer.step(lambda: ran.append(1))
    assert not ran


def check_fails():
    """An error of the closure itself is raised; an error of its backward pass keeps its type."""
    ddp, optimizer, _ = start()
    before = snapshot(ddp)

    def raises():
        raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        optimizer.step(raises)
    assert_same(snapshot(ddp), before)
    calls = []
    optimizer.step(_closure(ddp, optimizer, batches(1)[0], calls))
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(StepError, match="NoneType"):
        optimizer.step(_closure(ddp, optimizer, batches(1)[0], calls))
    dist.barrier()
    assert_same(calls, [1, 1])


check = on_ranks(__name__, timeout=60)


def test_step_with_a_closure(check):
    check()
