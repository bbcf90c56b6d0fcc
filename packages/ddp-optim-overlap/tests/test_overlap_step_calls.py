"""However a loop reaches ``step()``, each backward pass steps once, or there is an error."""

import pytest
import torch
from overlap_runs import (
    Net,
    adamw,
    backward,
    batches,
    both,
    make_ddp,
    named,
    require_held,
    run_parts,
    snapshot,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import (
    ConfigError,
    OptimizerHookState,
    OverlapMode,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


def _wraps(count):
    net = Net()
    return [DistributedDataParallel(net, bucket_cap_mb=0.002) for _ in range(count)]


def _overlap_all(models, optimizer, mode):
    for ddp in models:
        overlap_optimizer(ddp, optimizer, mode=mode)


def _hook_all(models, optimizer, _):
    state = OptimizerHookState(optimizer)
    for ddp in models:
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
        backward(ddp, batches(1)[0])
        optimizer.step()
        optimizer.zero_grad()


def _overlap_and_hook_state(models, optimizer, mode):
    overlap_optimizer(models[0], optimizer, mode=mode)
    OptimizerHookState(optimizer)


def _one_optimizer_in_two_overlaps(seen):
    for mode in OverlapMode:
        for overlap in (_overlap_all, _hook_all, _overlap_and_hook_state):
            models = _wraps(2)
            optimizer = adamw(models[0])
            overlap(models, optimizer, mode)
            before = snapshot(models[0])
            with pytest.raises(RuntimeError, match="AdamW is overlapped by something else since"):
                backward(models[0], batches(1)[0])
            seen[mode.name, overlap.__name__] = all(map(torch.equal, before, snapshot(models[0])))


def _a_model_wrapped_anew(seen):
    """The overlap of the earlier model is alive but no longer used."""

    def run(*, overlapped):
        models = _wraps(2)
        optimizer = adamw(models[0])
        for ddp in models:
            if overlapped:
                overlap_optimizer(ddp, optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for x in batches(2):
                backward(ddp, x)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return snapshot(models[0]), optimizer.state_dict()

    seen["same bits"] = both(run)


def _steps_that_are_not_replaced(seen):
    for mode in OverlapMode:
        ddp = make_ddp()
        optimizer = adamw(ddp)
        step = optimizer.step
        handle = overlap_optimizer(ddp, optimizer, mode=mode)
        for name, call in (("before", step), ("of the class", lambda one=optimizer: type(one).step(one))):
            backward(ddp, batches(1)[0])
            after = snapshot(ddp)
            with pytest.raises(ConfigError, match="would step again"):
                call()
            seen[mode.name, name] = all(map(torch.equal, after, snapshot(ddp)))
            optimizer.step()
            optimizer.zero_grad()
        with handle.pause():
            backward(ddp, batches(1)[0])
            step()
        handle.remove()
        seen[mode.name, "ordinary"] = not any(map(torch.equal, after, snapshot(ddp)))
        seen[mode.name, "nothing is left"] = not optimizer._optimizer_step_pre_hooks


def _post_hooks_and_no_step(seen):
    ddp = make_ddp()
    optimizer = adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    first, second = batches(2)
    backward(ddp, first)
    optimizer.zero_grad()
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="AdamW has a step post-hook"):
        backward(ddp, second)
    seen["nothing moved"] = all(map(torch.equal, before, snapshot(ddp)))
    optimizer.zero_grad()
    hook.remove()
    backward(ddp, second)
    seen["without it"] = not any(map(torch.equal, before, snapshot(ddp)))


def _a_compiled_end_of_the_loop(seen):
    """An overlapped step is never compiled, and has the bits of an uncompiled step."""

    def run(*, overlapped):
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
        return snapshot(ddp), optimizer.state_dict()

    seen["same bits"] = both(run)


PARTS = named(
    _one_optimizer_in_two_overlaps,
    _a_model_wrapped_anew,
    _steps_that_are_not_replaced,
    _post_hooks_and_no_step,
    _a_compiled_end_of_the_loop,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=90, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_ways_to_step(ranks, name):
    require_held(ranks, name)
