"""Changes after a step, or when it can no longer be right, are an error and move nothing."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    adamw,
    assert_same,
    backward,
    batches,
    make_ddp,
    on_ranks,
    snapshot,
    start,
    step_buckets_of,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import ConfigError, DoubleBackwardError, StepError, overlap_optimizer


def check_double_backward():
    """Gradients that a step has used stay used, whatever is done to them; zeros are no gradients."""
    hows = ("again", "accumulates", "paused", "clipped")
    for view, how in itertools.product((False, True), hows):
        ddp, optimizer, handle = start(gradient_as_bucket_view=view)
        first, second, third = batches(3)
        if how != "clipped":
            backward(ddp, first)
            optimizer.zero_grad(set_to_none=False)
        backward(ddp, second)  # the first time in the first pass, after which DDP moves the gradients
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        after = snapshot(ddp)
        around = {"accumulates": ddp.no_sync, "paused": handle.pause}.get(how, contextlib.nullcontext)
        with around(), pytest.raises(DoubleBackwardError, match="zero_grad"):
            backward(ddp, third)
        assert_same(snapshot(ddp), after)


def check_changed_gradients():
    for view in (False, True):
        ddp, optimizer, _ = start(gradient_as_bucket_view=view)
        train_on(ddp, optimizer, batches(2))
        backward(ddp, batches(1)[0])
        after = snapshot(ddp)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        with pytest.raises(ConfigError, match=r"clip=.*ordinary loop"):
            optimizer.step()
        assert_same(snapshot(ddp), after)


def check_looks_by_autograd_grad():
    """``torch.autograd.grad`` adds nothing: a check before it says nothing about the next backward pass."""
    ddp, optimizer, _ = start(find_unused_parameters=True)
    for number, x in enumerate(batches(4)):
        ddp.module.skipped = (3,) if number == 1 else ()
        backward(ddp, x)
        optimizer.step()
        torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters()), allow_unused=True)
        optimizer.zero_grad()


def _refused(ddp, optimizer, match, between=lambda *_: None):
    """Let ``optimizer.step()`` refuse, every time, what was done after a backward pass."""
    optimizer.zero_grad()
    backward(ddp, batches(1)[0])
    between(ddp, optimizer)
    for _ in range(2):
        with pytest.raises(ConfigError, match=match):
            optimizer.step()


@torch.no_grad()
def _edit_one(ddp, _):
    next(ddp.parameters()).mul_(0.9)


def _clamp_all(ddp, _):
    for parameter in ddp.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _clamp_gradients(ddp, _):
    for parameter in ddp.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def _sum_again(ddp, _):
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)


def _drop_some(ddp, _):
    for parameter in ddp.module.layers[3].parameters():
        parameter.grad = None


def _unscale(_, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _load(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _forget(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, head):
        return getattr(self, head)(x)


def check_gradients_that_come_after_the_step():
    """An ordinary step would use the gradients that were stepped with once more."""
    for how in ("local", "no_sync"):
        ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer)
        x = torch.ones(2, 4)
        ddp(x, "a").square().mean().backward()
        after = snapshot(ddp)
        if how == "local":
            ddp.module.b.weight.square().sum().backward()
        else:
            with ddp.no_sync():
                ddp(x, "b").square().mean().backward()
        with pytest.raises(ConfigError, match="gradients have come between"):
            optimizer.step()
        assert_same(snapshot(ddp), after)


def check_a_left_out_step_before_an_ordinary_one():
    for how in ("no_sync", "pause"):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer)
        train_on(ddp, optimizer, batches(1))
        backward(ddp, batches(1)[0])  # and its step() is left out
        optimizer.zero_grad()
        after = snapshot(ddp)
        with ddp.no_sync() if how == "no_sync" else handle.pause():
            backward(ddp, batches(1)[0])
        with pytest.raises(ConfigError, match="was not called"):
            optimizer.step()
        assert_same(snapshot(ddp), after)


def check_unfrozen_before_the_overlap():
    """DDP does not average what was frozen when it was made: noticed in the first pass."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[0].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    net[0].requires_grad_(True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer)
    with pytest.raises(RuntimeError, match="does not average"):
        ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigError, match="does not average"):
        optimizer.step()


def check_too_late():
    """The inputs and results of a step must not change before the loop calls step()."""
    for match, change in (
        ("lr of parameter group 0", lambda _, optimizer: optimizer.param_groups[0].update(lr=0.1)),
        ("parameters were changed", _edit_one),
        ("parameters were changed", _clamp_all),
        ("gradients were changed", _clamp_gradients),
        ("gradients were changed", _sum_again),
        ("set to None", _drop_some),
        ("set to None", lambda _, optimizer: optimizer.zero_grad()),
        ("unscaled", _unscale),
        ("state was loaded", _load),
        ("state was changed", _forget),
        ("state was changed", lambda _, optimizer: optimizer.state.clear()),
    ):
        ddp, optimizer, _ = start()
        _refused(ddp, optimizer, match, change)


def check_a_few_values_changed():
    """One bit of one gradient is a change, and so are values that return."""
    ways = {
        "one value": lambda gradient: gradient[7, 7:8].copy_(gradient[7, 7].nextafter(torch.tensor(9.0))),
        "there and back": lambda gradient: gradient.mul_(2).div_(2),
    }
    for view in (False, True):
        for change in ways.values():
            ddp, optimizer, _ = start(gradient_as_bucket_view=view)
            first, second = batches(2)
            train_on(ddp, optimizer, [first])
            backward(ddp, second)
            before = snapshot(ddp)
            change(ddp.module.layers[2].weight.grad)
            with pytest.raises(ConfigError, match="gradients were changed"):
                optimizer.step()
            assert_same(snapshot(ddp), before)


def check_incomplete_backward():
    """A layer without gradients that DDP was not told of: some buckets never come."""
    step_buckets_of(1)
    ddp, optimizer, _ = start()
    for x in batches(2):
        backward(ddp, x)
        optimizer.zero_grad()
    ddp.module.skipped = (0,)
    backward(ddp, batches(1)[0])
    with pytest.raises(StepError, match="find_unused_parameters") as caught:
        optimizer.step()
    assert 0 < len(caught.value.report.stepped) < 10, caught.value


def check_foreign_parameters():
    """Parameters that later turn out not to be averaged by DDP, or that move to another group."""
    for how in ("added", "unfrozen", "a gradient by hand"):
        net = Net()
        if how != "added":
            net.layers[1].requires_grad_(False)
        ddp = DistributedDataParallel(net)
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        backward(ddp, batches(1)[0])
        optimizer.zero_grad()
        if how == "added":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        elif how == "unfrozen":
            net.layers[1].requires_grad_(True)
        else:
            net.layers[1].weight.grad = torch.ones_like(net.layers[1].weight)
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="does not average"):
            backward(ddp, batches(1)[0])
        assert_same(snapshot(ddp), before)


check = on_ranks(__name__, timeout=120)


def test_changes_that_come_too_late(check):
    check()
