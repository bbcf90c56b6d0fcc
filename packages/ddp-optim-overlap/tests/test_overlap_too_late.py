"""Changes after a step, or when it can no longer be right, are an error and move nothing."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    PoisonedPages,
    adamw,
    assert_ordinary,
    assert_same,
    backward,
    batches,
    begin_overlap,
    changed,
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


def check_another_first_one():
    """A different parameter than before gets the first gradient."""

    def run(view, clear, *, right):
        ddp, optimizer, _ = start(find_unused_parameters=True, gradient_as_bucket_view=view)
        first, second = batches(2)
        backward(ddp, first)
        optimizer.step()
        for name, parameter in ddp.named_parameters():
            clear(name.endswith("layers.2.bias"), parameter)
        ddp.module.skipped = (3,)
        after = snapshot(ddp)
        if right:
            backward(ddp, second)
            assert changed(ddp, after)
            return
        with pytest.raises(DoubleBackwardError, match="zero_grad"):
            backward(ddp, second)
        assert_same(snapshot(ddp), after)

    def behind_its_back(_, parameter):
        parameter.grad.data.zero_()

    def all_but_one(one, parameter):
        if not one:
            parameter.grad.zero_()

    def all_but_a_scaled_one(one, parameter):
        parameter.grad = parameter.grad.mul_(0.5) if one else None

    for view in (False, True):
        run(view, behind_its_back, right=True)
        run(view, all_but_one, right=False)
        run(view, all_but_a_scaled_one, right=False)


def check_looks_by_autograd_grad():
    """``torch.autograd.grad`` adds nothing: a check before it says nothing about the next backward pass."""
    ddp, optimizer, _ = start(find_unused_parameters=True)
    for number, x in enumerate(batches(4)):
        ddp.module.skipped = (3,) if number == 1 else ()
        backward(ddp, x)
        optimizer.step()
        torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters()), allow_unused=True)
        optimizer.zero_grad()


def check_advice_of_the_error():
    """Inside pause() it is not pause(); for a parameter that has left, it is zero_grad() of the model."""
    ddp, optimizer, handle = start()
    first, second = batches(2)
    backward(ddp, first)
    optimizer.step()
    with handle.pause(), pytest.raises(DoubleBackwardError, match="zero_grad") as caught:
        backward(ddp, second)
    assert "pause()" not in str(caught.value), caught.value
    ddp = make_ddp()
    groups = [{"params": list(part.parameters())} for part in (ddp.module.conv, ddp.module.layers)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    overlap_optimizer(ddp, optimizer)
    backward(ddp, first)
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"ddp\.zero_grad|model\.zero_grad|zero_grad\(\) of the model"):
        backward(ddp, second)


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


def check_loaded_inside():
    """A hook loads a state after the first bucket was handed over."""
    for memory in (None, PoisonedPages):
        ddp = make_ddp(find_unused_parameters=True)  # with several buckets from the beginning
        optimizer = adamw(ddp)
        begin_overlap(ddp, optimizer, memory=memory)
        backward(ddp, batches(1)[0])
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        ddp.module.conv.bias.register_hook(lambda _, last=optimizer, saved=saved: last.load_state_dict(saved))
        _refused(ddp, optimizer, "state was loaded")


def check_a_rate_that_a_hook_changes():
    ddp, optimizer, _ = start()

    def halve(_):
        optimizer.param_groups[0]["lr"] *= 0.5

    ddp.module.layers[1].weight.register_post_accumulate_grad_hook(halve)
    with pytest.raises((ConfigError, RuntimeError), match="lr of parameter group 0 was changed"):
        train_on(ddp, optimizer, batches(3))


def check_a_few_values_changed():
    """One bit of one gradient is a change, and so are values that only swap places, or return."""
    ways = {
        "one value": lambda gradient: gradient[7, 7:8].copy_(gradient[7, 7].nextafter(torch.tensor(9.0))),
        "swapped": lambda gradient: gradient.copy_(gradient.flip(0)),
        "negated": torch.Tensor.neg_,
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


def check_late_pre_hook():
    ddp, optimizer, _ = start()
    before = snapshot(ddp)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="pre-hook"):
        backward(ddp, batches(1)[0])
    with pytest.raises(ConfigError, match="pre-hook"):
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

    def run(*, overlapped):
        ddp = make_ddp()
        own = list(ddp.parameters())
        optimizer = torch.optim.SGD([{"params": own[:5], "lr": 0.1}, {"params": own[5:], "lr": 0.001}])
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        for x in batches(2):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
            one, other = optimizer.param_groups
            one["params"], other["params"] = other["params"], one["params"]
        return snapshot(ddp)

    assert_ordinary(run)


check = on_ranks(__name__, timeout=120)


def test_changes_that_come_too_late(check):
    check()
