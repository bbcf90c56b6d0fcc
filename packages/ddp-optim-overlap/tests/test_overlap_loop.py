"""What the training loop may do around an overlapped step, and what is reported to it."""

import contextlib

import pytest
import torch
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
    OverlapMode,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


def _backward_after_zero(ddp, optimizer):
    optimizer.zero_grad()
    backward(ddp, batches(1)[0])


def _calls_of_step(seen):
    """A second call after the overlapped step is an ordinary step, as is one without a backward pass."""
    states = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        calls = []
        optimizer.register_step_post_hook(
            lambda optimizer, *_, calls=calls: calls.append(len(optimizer.param_groups[0]["params"]))
        )
        if overlapped:
            handle = overlap_optimizer(ddp, optimizer)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("late"))
        for x in batches(2):
            optimizer.zero_grad()
            backward(ddp, x)
            optimizer.step(None)  # as Accelerate calls it
            optimizer.step(closure=None)
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, batches(1)[0])
        optimizer.step()
        states.append([snapshot(ddp), optimizer.state_dict(), calls])
    handle.wait()
    seen["step() once more"] = same(*states)
    _backward_after_zero(ddp, optimizer)
    before = snapshot(ddp)
    seen["a closure that does nothing"] = optimizer.step(lambda: 0.5) == 0.5 and same(before, snapshot(ddp))


def _after_reduce_runs_hooks_once(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    calls = []
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3) and None
    )
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    overlap_optimizer(ddp, optimizer, mode=OverlapMode.AFTER_REDUCE)
    other = make_ddp()
    ordinary = adamw(other)
    for x in batches(3):
        backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
        backward(other, x)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
        ordinary.step()
        ordinary.zero_grad()
    seen["a pre-hook clips"] = same(snapshot(ddp), snapshot(other)) and calls == [1, 1, 1]


def _pause_and_remove(seen):
    results = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer) if overlapped else None
        first, second, third, fourth, fifth = batches(5)
        backward(ddp, first)
        optimizer.step()
        optimizer.zero_grad()
        if handle is None:
            backward(ddp, second)  # averages twice, steps once
        else:
            with handle.pause():
                backward(ddp, second)
        backward(ddp, third)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.wait()
            handle.remove()
            handle.remove()
        backward(ddp, fourth)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            with overlap_optimizer(ddp, optimizer, mode=OverlapMode.AFTER_REDUCE) as handle:
                backward(ddp, fifth)
                assert handle.wait().stepped
        else:
            backward(ddp, fifth)
            optimizer.step()
        results.append([snapshot(ddp), optimizer.state_dict()])
    with pytest.raises(ConfigError, match="removed"), handle.pause():
        pass
    seen["pause, remove, again"] = same(*results)


def _ordinary_step_in_pause(seen):
    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        if overlapped:
            with overlap_optimizer(ddp, optimizer).pause():
                backward(ddp, batches(1)[0])
                optimizer.step()
        else:
            backward(ddp, batches(1)[0])
            optimizer.step()
        return snapshot(ddp)

    seen["an ordinary step in pause"] = both(run)


def _ordinary_steps(seen):
    """A loop without step(), then an ordinary one; and torch.autograd.grad, which is not a backward pass."""
    results = []
    for overlapped in (False, True):
        for how in ("pause", "no_sync", "autograd.grad"):
            ddp = make_ddp()
            optimizer = adamw(ddp)
            handle = overlap_optimizer(ddp, optimizer) if overlapped else None
            first, second = batches(2)
            backward(ddp, first)
            if not overlapped:
                optimizer.step()
            if how == "autograd.grad":
                torch.autograd.grad(ddp.module(first).sum(), list(ddp.module.parameters()))
            optimizer.zero_grad()
            around = ddp.no_sync if how == "no_sync" else handle.pause if handle else contextlib.nullcontext
            with around():
                backward(ddp, second)
                optimizer.step()
            results.append([snapshot(ddp), optimizer.state_dict()])
    seen["ordinary steps"] = same(results[:3], results[3:])


def _reports(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    handle = overlap_optimizer(ddp, optimizer)
    assert handle.optimizers == (optimizer,)
    reports = []
    for x in batches(3):
        backward(ddp, x)
        reports.append(handle.wait(timeout=30))
        optimizer.zero_grad()
    last = reports[-1]
    seen["reports"] = (
        [report.number for report in reports] == [1, 2, 3]
        and last.buckets > 1
        and last.stepped == tuple(range(last.buckets))
        and 0 <= last.seconds_hidden <= last.seconds < 30
    )


def _added_group(seen):
    """Layers that are unfrozen and added during training."""

    def run(*, overlapped):
        ddp = make_ddp(find_unused_parameters=True)
        layers = ddp.module.layers
        optimizer = torch.optim.AdamW([*ddp.module.conv.parameters(), *layers[:3].parameters()], lr=0.01)
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        for step, x in enumerate(batches(4)):
            if step == 2:
                optimizer.add_param_group({"params": list(layers[3].parameters()), "lr": 0.1})
            ddp.zero_grad()
            backward(ddp, x)
            optimizer.step()
        return [snapshot(ddp), optimizer.state_dict()]

    seen["an added group"] = both(run)


def _frozen_layers(seen):
    """A layer that is frozen at first, and one that is used only by torch.autograd.grad."""

    def run(*, overlapped):
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
            optimizer.zero_grad()
            backward(ddp, x)
            optimizer.step()
        return [snapshot(ddp), optimizer.state_dict()]

    seen["frozen at first"] = both(run)


class NeedsParameters(torch.optim.SGD):
    """Its step fails without parameters, and takes more arguments than a closure."""

    def step(self, closure=None, *, flag=None):
        del flag
        assert self.param_groups[0]["params"][0].requires_grad
        return super().step(closure)


def _step_without_parameters(seen):
    for mode in OverlapMode:
        results = []
        for overlapped in (False, True):
            ddp = make_ddp()
            optimizer = NeedsParameters(ddp.parameters(), lr=0.1)
            if overlapped:
                overlap_optimizer(ddp, optimizer, mode=mode)
            for x in batches(2):
                optimizer.zero_grad()
                backward(ddp, x)
                optimizer.step()
            results.append([snapshot(ddp), optimizer.state_dict()])
        _backward_after_zero(ddp, optimizer)
        with pytest.raises(ConfigError, match="flag"):
            optimizer.step(flag=True)
        seen[f"a step that needs parameters, {mode.name}"] = same(*results)


def _removed_before_step(seen):
    def run(*, overlapped):
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
        backward(ddp, third)  # the step that was pending is over
        optimizer.step()
        return [snapshot(ddp), optimizer.state_dict()]

    seen["removed before step()"] = both(run)


def _subnormal_numbers(seen):
    """The worker treats subnormal numbers as the loop's thread does, from any step on."""

    def run(*, overlapped):
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
        subnormal = any(bool(((p != 0) & (p.abs() < 1e-38)).any()) for p in kept[1])
        return kept, subnormal

    assert run(overlapped=False)[1]
    seen["flushed"] = both(run)


PARTS = named(
    _subnormal_numbers,
    _calls_of_step,
    _after_reduce_runs_hooks_once,
    _pause_and_remove,
    _ordinary_step_in_pause,
    _ordinary_steps,
    _reports,
    _added_group,
    _frozen_layers,
    _step_without_parameters,
    _removed_before_step,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_the_loop_around_it(ranks, name):
    require_held(ranks, name)
