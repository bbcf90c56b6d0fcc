"""What the training loop may do around an overlapped step, and what is reported to it."""

import contextlib

import pytest
import torch
from overlap_runs import (
    adamw,
    as_ordinary,
    assert_same,
    assert_stepped,
    backward,
    batches,
    ends,
    make_ddp,
    on_ranks,
    paused,
    snapshot,
    start,
    train_on,
)

from ddp_optim_overlap import ConfigError, overlap_optimizer


@as_ordinary()
def check_calls_of_step(*, overlapped):
    """A second call after the overlapped step is an ordinary step, as is one without a backward pass."""
    ddp = make_ddp()
    optimizer = adamw(ddp)
    calls = []
    optimizer.register_step_post_hook(lambda one, *_: calls.append(len(one.param_groups[0]["params"])))
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("late"))
    for x in batches(2):
        backward(ddp, x)
        optimizer.step(None)  # as Accelerate calls it
        optimizer.step(closure=None)
        optimizer.zero_grad()
    with ddp.no_sync():
        backward(ddp, batches(1)[0])
    optimizer.step()
    return ends(ddp, optimizer), calls


def check_a_closure_that_does_nothing():
    ddp, optimizer, _ = start()
    backward(ddp, batches(1)[0])
    before = snapshot(ddp)
    assert_same((optimizer.step(lambda: 0.5), snapshot(ddp)), (0.5, before))


@as_ordinary()
def check_pause_and_remove(*, overlapped):
    ddp, optimizer, handle = start(overlapped=overlapped)
    first, second, third, fourth, fifth = batches(5)
    train_on(ddp, optimizer, [first])
    with paused(handle):
        backward(ddp, second)  # averages twice, steps once
    train_on(ddp, optimizer, [third])
    if handle is not None:
        handle.wait()
        handle.remove()
        handle.remove()
        with pytest.raises(ConfigError, match="removed"), handle.pause():
            pass
    train_on(ddp, optimizer, [fourth])
    with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext() as handle:
        backward(ddp, fifth)
        if handle is not None:
            assert_stepped(handle)
        optimizer.step()
    return ends(ddp, optimizer)


@as_ordinary(("pause", True), ("no_sync", True), ("autograd.grad", True), ("pause", False))
def check_ordinary_steps(how, before, *, overlapped):
    """Behind a loop without step(); torch.autograd.grad is not a backward pass."""
    ddp, optimizer, handle = start(overlapped=overlapped)
    first, second = batches(2)
    if before:
        backward(ddp, first)
        if not overlapped:
            optimizer.step()
        if how == "autograd.grad":
            torch.autograd.grad(ddp.module(first).sum(), list(ddp.module.parameters()))
        optimizer.zero_grad()
    with ddp.no_sync() if how == "no_sync" else paused(handle):
        backward(ddp, second)
        optimizer.step()
    return ends(ddp, optimizer)


def check_reports():
    ddp, optimizer, handle = start()
    assert handle.optimizers == (optimizer,)
    reports = []
    for x in batches(3):
        backward(ddp, x)
        reports.append(handle.wait(timeout=30))
        optimizer.zero_grad()
    assert_same([report.number for report in reports], [1, 2, 3])
    last = assert_stepped(handle)
    assert last.buckets > 1, last
    assert 0 <= last.seconds_hidden <= last.seconds < 30, last


@as_ordinary()
def check_added_group(*, overlapped):
    """Layers that are unfrozen and added during training."""
    ddp = make_ddp(find_unused_parameters=True)
    layers = ddp.module.layers
    optimizer = torch.optim.AdamW([*ddp.module.conv.parameters(), *layers[:3].parameters()], lr=0.01)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    for step, x in enumerate(batches(4)):
        if step == 2:
            optimizer.add_param_group({"params": list(layers[3].parameters()), "lr": 0.1})
        train_on(ddp, optimizer, [x])
        ddp.zero_grad()
    return ends(ddp, optimizer)


@as_ordinary()
def check_frozen_layers(*, overlapped):
    """A layer that is frozen at first, and one that is used only by torch.autograd.grad."""
    ddp = make_ddp(find_unused_parameters=True)
    optimizer = adamw(ddp)
    layer = ddp.module.layers[1].requires_grad_(False)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    for step, x in enumerate(batches(5)):
        layer.requires_grad_(step in (1, 2))
        if step == 4:
            layer.requires_grad_(True)
            torch.autograd.grad(ddp.module(x).sum(), list(ddp.module.parameters()))
            ddp.module.skipped = (1,)
        train_on(ddp, optimizer, [x])
    return ends(ddp, optimizer)


@as_ordinary()
def check_removed_before_step(*, overlapped):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    first, second, third = batches(3)
    with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext():
        backward(ddp, first)
    optimizer.step()
    optimizer.zero_grad()
    with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext():
        backward(ddp, second)
        if not overlapped:
            optimizer.step()
    optimizer.zero_grad()
    return train_on(ddp, optimizer, [third])  # the step that was pending is over


@as_ordinary()
def check_subnormal_numbers(*, overlapped):
    """The worker treats subnormal numbers as the loop's thread does, from any step on."""
    ddp = make_ddp()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(1e-38)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.1)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    kept = []
    for number, x in enumerate(batches(6)):
        torch.set_flush_denormal(number in (2, 3))
        optimizer.zero_grad()
        (ddp(x) * 1e-30).square().sum().backward()
        optimizer.step()
        torch.set_flush_denormal(False)
        kept.append(snapshot(ddp))
    assert any(bool(((p != 0) & (p.abs() < 1e-38)).any()) for p in kept[1])
    return kept


check = on_ranks(__name__, timeout=120)


def test_the_loop_around_it(check):
    check()
