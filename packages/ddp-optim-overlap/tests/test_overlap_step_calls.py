"""However a loop reaches ``step()``, each backward pass steps once, or there is an error."""

import gc
from functools import partial

import pytest
import torch
from overlap_runs import (
    Net,
    adamw,
    as_ordinary,
    assert_ordinary,
    assert_same,
    backward,
    batches,
    changed,
    ends,
    make_ddp,
    on_ranks,
    snapshot,
    start,
    train_on,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_optim_overlap import ConfigError, OptimizerHookState, hook_then_optimizer, overlap_optimizer


def _wraps():
    net = Net()
    return [DistributedDataParallel(net, bucket_cap_mb=0.002) for _ in range(2)]


@as_ordinary()
def check_one_optimizer_in_two_overlaps(*, overlapped):
    """Refused at the call, and the first overlap goes on."""
    ddp, other = _wraps()
    optimizer = adamw(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    train_on(ddp, optimizer, batches(1))
    if overlapped:
        for overlap_again in (
            partial(overlap_optimizer, other, optimizer),
            partial(overlap_optimizer, other, [torch.optim.SGD(other.parameters(), lr=0.1), optimizer]),
            partial(OptimizerHookState, optimizer),
        ):
            with pytest.raises(ConfigError, match=r"AdamW .*overlapped"):
                overlap_again()
    return train_on(ddp, optimizer, batches(2))


def check_one_hook_state_in_two_models():
    models = _wraps()
    optimizer = adamw(models[0])
    state = OptimizerHookState(optimizer)
    for ddp in models:
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))

    def train_in_turns():
        for ddp in (*models, *models):
            train_on(ddp, optimizer, batches(1))

    with pytest.raises(RuntimeError, match=r"AdamW .*overlapped"):
        train_in_turns()


@as_ordinary(("removed",), ("gone",))
def check_a_model_wrapped_anew(how, *, overlapped):
    """The overlap of the earlier model was removed, or is gone with it."""
    net, optimizer = Net(), None
    for _ in range(2):
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
        optimizer = adamw(ddp) if optimizer is None else optimizer
        handle = overlap_optimizer(ddp, optimizer) if overlapped else None
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x in batches(2):
            train_on(ddp, optimizer, [x])
            scheduler.step()
        if handle is not None and how == "removed":
            handle.remove()
        found = ends(ddp, optimizer)
        del ddp, handle
        gc.collect()
    return found


def check_steps_that_are_not_replaced():
    ddp = make_ddp()
    optimizer = adamw(ddp)
    step = optimizer.step
    handle = overlap_optimizer(ddp, optimizer)
    for call in (step, lambda: type(optimizer).step(optimizer)):
        backward(ddp, batches(1)[0])
        after = snapshot(ddp)
        with pytest.raises(ConfigError, match="would step again"):
            call()
        assert_same(snapshot(ddp), after)
        optimizer.step()
        optimizer.zero_grad()
    with handle.pause():
        backward(ddp, batches(1)[0])
        step()
    assert len(changed(ddp, after)) == 10
    handle.remove()
    assert_same(len(optimizer._optimizer_step_pre_hooks), 0)


def check_post_hooks_and_no_step():
    ddp, optimizer, handle = start()
    hook = optimizer.register_step_post_hook(lambda *_: None)
    first, second = batches(2)
    backward(ddp, first)
    optimizer.zero_grad()
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="AdamW has a step post-hook"):
        backward(ddp, second)
    assert_same(snapshot(ddp), before)
    handle.remove()
    hook.remove()
    optimizer.zero_grad()
    overlap_optimizer(ddp, optimizer)
    backward(ddp, second)
    assert len(changed(ddp, before)) == 10


def check_hooks_of_all_optimizers():
    @torch.no_grad()
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)

    def run(*, overlapped):
        ddp, optimizer, _ = start(overlapped=overlapped)
        return train_on(ddp, optimizer, batches(3))

    hook = register_optimizer_step_post_hook(shrink)
    try:
        assert_ordinary(run)
    finally:
        hook.remove()
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match=r"pre-hook.*ordinary loop"):
            run(overlapped=True)
    finally:
        hook.remove()


@as_ordinary()
def check_a_compiled_end_of_the_loop(*, overlapped):
    """An overlapped step is never compiled, and has the bits of an uncompiled step."""
    ddp = make_ddp()
    optimizer = adamw(ddp)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    if overlapped:
        overlap_optimizer(ddp, optimizer)
        step = torch.compile(step, backend="eager")
    for x in batches(2):
        backward(ddp, x)
        step()
    return ends(ddp, optimizer)


# Loops in which not every backward pass is a step


def _pass(ddp, x):
    for parameter in ddp.parameters():
        parameter.grad = None
    backward(ddp, x)


def _guard(ddp, optimizer, data):
    _pass(ddp, next(data))
    optimizer.step()
    _pass(ddp, next(data))  # and no step, as after a loss that is not finite
    _pass(ddp, next(data))


def _sharpness_aware(ddp, optimizer, data):
    x = next(data)
    _pass(ddp, x)
    _pass(ddp, x)
    optimizer.step()


def _takes_turns(ddp, optimizers, data):
    for optimizer in optimizers:
        _pass(ddp, next(data))
        optimizer.step()
    _pass(ddp, next(data))


def _halves(ddp):
    return [torch.optim.SGD(list(ddp.parameters())[part::2], lr=0.1) for part in range(2)]


def _two_passes_in_closure(ddp, optimizer, data):
    def closure():
        _pass(ddp, next(data))
        _pass(ddp, next(data))

    optimizer.step(closure)


def _two_that_share(ddp):
    return [torch.optim.SGD(ddp.parameters(), lr=0.1), adamw(ddp)]


def _other_order(ddp, optimizers, data):
    _pass(ddp, next(data))
    for optimizer in reversed(optimizers):
        optimizer.step()


def check_left_out_steps():
    for match, loop, make in (
        ("was not called", _guard, adamw),
        ("several backward passes", _sharpness_aware, adamw),
        ("was not called", _takes_turns, _halves),
        ("was not called", _two_passes_in_closure, adamw),
        ("in common", _other_order, _two_that_share),
    ):
        ddp = make_ddp()
        optimizers = make(ddp)
        overlap_optimizer(ddp, optimizers)
        with pytest.raises((ConfigError, RuntimeError), match=match):
            loop(ddp, optimizers, iter(batches(8)))


check = on_ranks(__name__, timeout=90, group_timeout=20)


def test_ways_to_step(check):
    check()
