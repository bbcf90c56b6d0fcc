"""Changes after a step, or when it can no longer be right, are an error and move nothing."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    PoisonedPages,
    adamw,
    backward,
    batches,
    begin_overlap,
    both,
    changed,
    make_ddp,
    named,
    require_held,
    run_parts,
    same,
    snapshot,
    step_buckets_of,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    DoubleBackwardError,
    GlobalNorm,
    OverlapMode,
    StepError,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


def _double_backward(seen):
    for view in (False, True):
        for how in ("again", "accumulates", "paused"):
            ddp = make_ddp(gradient_as_bucket_view=view)
            optimizer = adamw(ddp)
            handle = overlap_optimizer(ddp, optimizer)
            first, second, third = batches(3)
            backward(ddp, first)
            optimizer.zero_grad(set_to_none=False)
            backward(ddp, second)  # zeros do not count as used gradients
            after = snapshot(ddp)
            around = {"accumulates": ddp.no_sync, "paused": handle.pause}.get(how, contextlib.nullcontext)
            with around(), pytest.raises(DoubleBackwardError, match="zero_grad"):
                backward(ddp, third)
            seen[f"double backward: {how}, {view}"] = same(after, snapshot(ddp))


def _backward_after_zero(ddp, optimizer):
    optimizer.zero_grad()
    backward(ddp, batches(1)[0])


def _changed_gradients(seen):
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        for x in batches(2):
            optimizer.zero_grad()
            backward(ddp, x)
            optimizer.step()
        _backward_after_zero(ddp, optimizer)
        after = snapshot(ddp)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        with pytest.raises(ConfigError, match="clip="):
            optimizer.step()
        seen[f"clipped in vain, {view}"] = same(after, snapshot(ddp))


def _used_up_gradients(seen):
    """Gradients that a step has used stay used, whatever is done to them."""
    for view in (False, True):
        for clips in (False, True):
            ddp = make_ddp(gradient_as_bucket_view=view)
            optimizer = adamw(ddp)
            overlap_optimizer(ddp, optimizer)
            first, second = batches(2)
            backward(ddp, first)  # after the first pass DDP moves the gradients
            if clips:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
            after = snapshot(ddp)
            for _ in range(2):
                with pytest.raises(DoubleBackwardError, match="zero_grad"):
                    backward(ddp, second)
            seen[f"used up, {view}, {clips}"] = same(after, snapshot(ddp))


def _another_first_one(seen):
    """A different parameter than before gets the first gradient."""

    def run(view, clear, *, right):
        ddp = make_ddp(find_unused_parameters=True, gradient_as_bucket_view=view)
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        first, second = batches(2)
        backward(ddp, first)
        optimizer.step()
        for name, parameter in ddp.named_parameters():
            clear(name.endswith("layers.2.bias"), parameter)
        ddp.module.skipped = (3,)
        after = snapshot(ddp)
        if right:
            backward(ddp, second)
            return changed(ddp, after) != []
        with pytest.raises(DoubleBackwardError, match="zero_grad"):
            backward(ddp, second)
        return same(after, snapshot(ddp))

    def behind_its_back(_, parameter):
        parameter.grad.data.zero_()

    def all_but_one(one, parameter):
        if not one:
            parameter.grad.zero_()

    def all_but_a_scaled_one(one, parameter):
        parameter.grad = parameter.grad.mul_(0.5) if one else None

    for view in (False, True):
        seen["another first one", view, "data"] = run(view, behind_its_back, right=True)
        for clear in (all_but_one, all_but_a_scaled_one):
            seen["another first one", view, clear.__name__] = run(view, clear, right=False)


def _looks_by_autograd_grad(seen):
    """``torch.autograd.grad`` adds nothing: a check before it says nothing about the next backward pass."""
    ddp = make_ddp(find_unused_parameters=True)
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    for number, x in enumerate(batches(4)):
        ddp.module.skipped = (3,) if number == 1 else ()
        backward(ddp, x)
        optimizer.step()
        torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters()), allow_unused=True)
        optimizer.zero_grad()
    seen["autograd.grad"] = True


def _refused(ddp, optimizer, x, match, between=lambda: None):
    """Whether ``optimizer.step()`` refuses, every time, what was done after a backward pass."""
    optimizer.zero_grad()
    backward(ddp, x)
    between()
    for _ in range(2):
        with pytest.raises(ConfigError, match=match):
            optimizer.step()
    return True


def _too_late(seen):
    """The inputs and results of a step must not change before the loop calls step()."""

    def edit_parameters(ddp):
        with torch.no_grad():
            next(ddp.parameters()).mul_(0.9)

    def clamp_data(ddp):
        for parameter in ddp.parameters():
            parameter.grad.data.clamp_(-1e-3, 1e-3)

    def drop_some(ddp):
        for parameter in ddp.module.layers[3].parameters():
            parameter.grad = None

    def sum_again(ddp):
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.grad)

    changes = {
        "lr of parameter group 0": lambda ddp, optimizer: optimizer.param_groups[0].update(lr=0.1),
        "state was loaded": lambda ddp, optimizer: optimizer.load_state_dict(
            copy.deepcopy(optimizer.state_dict())
        ),
        "parameters were changed": lambda ddp, optimizer: edit_parameters(ddp),
        "gradients were changed": lambda ddp, optimizer: clamp_data(ddp),
        "gradients": lambda ddp, optimizer: sum_again(ddp),
        "set to None": lambda ddp, optimizer: drop_some(ddp),
        "set to": lambda ddp, optimizer: optimizer.zero_grad(),
        "unscaled": lambda ddp, optimizer: scaler.unscale_(optimizer),
    }
    for match, change in changes.items():
        ddp = make_ddp()
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        seen[f"too late: {match}"] = _refused(
            ddp, optimizer, batches(1)[0], match, partial(change, ddp, optimizer)
        )


def _loaded_inside(seen):
    """A hook loads a state after the first bucket was handed over."""
    for memory in (None, PoisonedPages):
        ddp = make_ddp(find_unused_parameters=True)  # with several buckets from the beginning
        optimizer = adamw(ddp)
        begin_overlap(ddp, optimizer, memory=memory)
        backward(ddp, batches(1)[0])
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        ddp.module.conv.bias.register_hook(lambda _, last=optimizer, saved=saved: last.load_state_dict(saved))
        seen["released" if memory else ""] = _refused(ddp, optimizer, batches(1)[0], "state was loaded")


class DecaysInPlace(torch.optim.SGD):
    """Writes its weight decay into the gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter)
        return super().step(closure)


def _looked_at(ddp, how):
    """Write gradients without changing a bit."""
    gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    if how == "infinite":
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))
    elif how == "large":
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 1e9)
    elif how == "other tensors":
        for parameter in ddp.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    else:
        for gradient in gradients:
            gradient.mul_(2).div_(2)


def _no_bit_changed(seen):
    """Clipping with a limit that is not reached, and other writes that leave every bit, are no change."""
    for how in ("infinite", "large", "other tensors", "there and back"):
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"mode": OverlapMode.AFTER_REDUCE},
            {"mode": OverlapMode.AFTER_REDUCE, "gradient_as_bucket_view": True},
            {"mode": OverlapMode.AFTER_REDUCE, "clip": GlobalNorm(0.1)},
            {"find_unused_parameters": True},
            {"clip": ByValue(0.1)},
        ):
            own = {name: options[name] for name in ("mode", "clip") if name in options}

            def run(*, overlapped, how=how, options=options, own=own):
                ddp = make_ddp(**{name: one for name, one in options.items() if name not in own})
                optimizer = adamw(ddp)
                if overlapped:
                    overlap_optimizer(ddp, optimizer, **own)
                for number, x in enumerate(batches(4)):
                    optimizer.zero_grad()
                    ddp.module.skipped = (1,) if options.get("find_unused_parameters") and number == 2 else ()
                    backward(ddp, x)
                    if not overlapped and "clip" in own:
                        own["clip"].clip(list(ddp.parameters()))
                    if number:
                        _looked_at(ddp, how)
                    optimizer.step()
                return snapshot(ddp), optimizer.state_dict()

            seen[how, str(options)] = both(run)


def _one_value_changed(seen):
    """One bit of one gradient in one bucket is a change, and so are values that only swap places."""
    for view in (False, True):
        for mode in OverlapMode:
            for how in ("one value", "swapped"):
                ddp = make_ddp(gradient_as_bucket_view=view)
                optimizer = adamw(ddp)
                overlap_optimizer(ddp, optimizer, mode=mode)
                first, second = batches(2)
                backward(ddp, first)
                optimizer.step()
                optimizer.zero_grad()
                backward(ddp, second)
                gradient = ddp.module.layers[2].weight.grad
                before = snapshot(ddp)
                if how == "one value":
                    gradient[7, 7] = gradient[7, 7].nextafter(torch.tensor(9.0))
                else:
                    gradient.copy_(gradient.flip(0).clone())
                with pytest.raises(ConfigError, match="gradients were changed"):
                    optimizer.step()
                seen[view, mode.name, how] = same(before, snapshot(ddp))
    # If the step itself writes gradients, clipping was meant for their earlier values.
    ddp = make_ddp()
    optimizer = DecaysInPlace(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer)
    backward(ddp, batches(1)[0])
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))
    with pytest.raises(ConfigError, match="gradients were changed"):
        optimizer.step()
    seen["written by the step"] = True


def _late_pre_hook(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    before = snapshot(ddp)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="pre-hook"):
        backward(ddp, batches(1)[0])
    with pytest.raises(ConfigError, match="pre-hook"):
        optimizer.step()
    seen["a late pre-hook"] = same(before, snapshot(ddp))


def _incomplete_backward(seen):
    """A layer without gradients that DDP was not told of: some buckets never come."""
    step_buckets_of(1)
    ddp = make_ddp()
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    for x in batches(2):
        optimizer.zero_grad()
        backward(ddp, x)
    optimizer.zero_grad()
    ddp.module.skipped = (0,)
    backward(ddp, batches(1)[0])
    with pytest.raises(StepError, match="find_unused_parameters") as caught:
        optimizer.step()
    seen["incomplete backward"] = 0 < len(caught.value.report.stepped) < len(list(ddp.parameters()))


def _foreign_parameters(seen):
    """Parameters that later turn out not to be averaged by DDP, or that move to another group."""
    for how in ("added", "unfrozen"):
        net = Net()
        if how == "unfrozen":
            net.layers[1].requires_grad_(False)
        ddp = DistributedDataParallel(net)
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        backward(ddp, batches(1)[0])
        optimizer.zero_grad()
        if how == "added":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        else:
            net.layers[1].requires_grad_(True)
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="does not average"):
            backward(ddp, batches(1)[0])
        seen[f"foreign: {how}"] = same(before, snapshot(ddp))

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

    seen["groups change places"] = both(run)


PARTS = named(
    _double_backward,
    _changed_gradients,
    _used_up_gradients,
    _another_first_one,
    _looks_by_autograd_grad,
    _too_late,
    _loaded_inside,
    _no_bit_changed,
    _one_value_changed,
    _late_pre_hook,
    _incomplete_backward,
    _foreign_parameters,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_changes_that_come_too_late(ranks, name):
    require_held(ranks, name)
