"""What the training loop may do around an overlapped step, and what it gets told."""

import contextlib
import copy
import gc
import threading
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import Net, batches, make_ddp, same
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OverlapMode,
    StepError,
    WeightReuseError,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


def _adamw(ddp):
    return torch.optim.AdamW(ddp.parameters(), lr=0.01)


def _parameters(ddp):
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def _backward(ddp, x):
    ddp(x).square().sum().backward()


def _double_backward(seen):
    for view in (False, True):
        for how in ("again", "accumulates", "paused"):
            ddp = make_ddp(gradient_as_bucket_view=view)
            optimizer = _adamw(ddp)
            handle = overlap_optimizer(ddp, optimizer)
            first, second, third = batches(3)
            _backward(ddp, first)
            optimizer.zero_grad(set_to_none=False)
            _backward(ddp, second)  # zeros are no gradients of a step
            after = _parameters(ddp)
            around = {"accumulates": ddp.no_sync, "paused": handle.pause}.get(how, contextlib.nullcontext)
            with around(), pytest.raises(DoubleBackwardError, match="zero_grad"):
                _backward(ddp, third)
            seen[f"double backward: {how}, {view}"] = same(after, _parameters(ddp))


def _changed_gradients(seen):
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = _adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        for x in batches(2):
            optimizer.zero_grad()
            _backward(ddp, x)
            optimizer.step()
        _backward_after_zero(ddp, optimizer)
        after = _parameters(ddp)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        with pytest.raises(ConfigError, match="clip="):
            optimizer.step()
        seen[f"clipped in vain, {view}"] = same(after, _parameters(ddp))


def _backward_after_zero(ddp, optimizer):
    optimizer.zero_grad()
    _backward(ddp, batches(1)[0])


def _calls_of_step(seen):
    """Once more after the overlapped step is an ordinary step; as is one without a backward pass."""
    states = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = _adamw(ddp)
        calls = []
        optimizer.register_step_post_hook(
            lambda optimizer, *_, calls=calls: calls.append(len(optimizer.param_groups[0]["params"]))
        )
        if overlapped:
            handle = overlap_optimizer(ddp, optimizer)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("late"))
        for x in batches(2):
            optimizer.zero_grad()
            _backward(ddp, x)
            optimizer.step(None)  # as Accelerate hands it on
            optimizer.step(closure=None)
        optimizer.zero_grad()
        with ddp.no_sync():
            _backward(ddp, batches(1)[0])
        optimizer.step()
        states.append([_parameters(ddp), optimizer.state_dict(), calls])
    handle.wait()
    seen["step() once more"] = same(*states)
    _backward_after_zero(ddp, optimizer)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def _after_reduce_runs_hooks_once(seen):
    ddp = make_ddp()
    optimizer = _adamw(ddp)
    calls = []
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3) and None
    )
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    overlap_optimizer(ddp, optimizer, mode=OverlapMode.AFTER_REDUCE)
    other = make_ddp()
    ordinary = _adamw(other)
    for x in batches(3):
        _backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
        _backward(other, x)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
        ordinary.step()
        ordinary.zero_grad()
    seen["a pre-hook clips"] = same(_parameters(ddp), _parameters(other)) and calls == [1, 1, 1]


def _late_pre_hook(seen):
    ddp = make_ddp()
    optimizer = _adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    before = _parameters(ddp)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="pre-hook"):
        _backward(ddp, batches(1)[0])
    with pytest.raises(ConfigError, match="pre-hook"):
        optimizer.step()
    seen["a late pre-hook"] = same(before, _parameters(ddp))


def _pause_and_remove(seen):
    results = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = _adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer) if overlapped else None
        first, second, third, fourth, fifth = batches(5)
        _backward(ddp, first)
        optimizer.step()
        optimizer.zero_grad()
        if handle is None:
            _backward(ddp, second)  # averages twice, steps once
        else:
            with handle.pause():
                _backward(ddp, second)
        _backward(ddp, third)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.wait()
            handle.remove()
            handle.remove()
        _backward(ddp, fourth)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            with overlap_optimizer(ddp, optimizer, mode=OverlapMode.AFTER_REDUCE) as handle:
                _backward(ddp, fifth)
                assert handle.wait().stepped
        else:
            _backward(ddp, fifth)
            optimizer.step()
        results.append([_parameters(ddp), optimizer.state_dict()])
    with pytest.raises(ConfigError, match="removed"), handle.pause():
        pass
    seen["pause, remove, again"] = same(*results)


def _ordinary_step_in_pause(seen):
    results = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = _adamw(ddp)
        if overlapped:
            with overlap_optimizer(ddp, optimizer).pause():
                _backward(ddp, batches(1)[0])
                optimizer.step()
        else:
            _backward(ddp, batches(1)[0])
            optimizer.step()
        results.append(_parameters(ddp))
    seen["an ordinary step in pause"] = same(*results)


def _reports(seen):
    ddp = make_ddp()
    optimizer = _adamw(ddp)
    handle = overlap_optimizer(ddp, optimizer)
    assert handle.optimizers == (optimizer,)
    reports = []
    for x in batches(3):
        _backward(ddp, x)
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
    """Layers that are unfrozen and added while training goes on."""
    results = []
    for overlapped in (False, True):
        ddp = make_ddp(find_unused_parameters=True)
        layers = ddp.module.layers
        optimizer = torch.optim.AdamW([*ddp.module.conv.parameters(), *layers[:3].parameters()], lr=0.01)
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        for step, x in enumerate(batches(4)):
            if step == 2:
                optimizer.add_param_group({"params": list(layers[3].parameters()), "lr": 0.1})
            ddp.zero_grad()
            _backward(ddp, x)
            optimizer.step()
        results.append([_parameters(ddp), optimizer.state_dict()])
    seen["an added group"] = same(*results)


def _incomplete_backward(seen):
    """A layer without gradients, and DDP not told: some buckets never come."""
    ddp = make_ddp()
    optimizer = _adamw(ddp)
    overlap_optimizer(ddp, optimizer)
    for x in batches(2):
        optimizer.zero_grad()
        _backward(ddp, x)
    optimizer.zero_grad()
    ddp.module.skipped = (0,)
    _backward(ddp, batches(1)[0])
    with pytest.raises(StepError, match="find_unused_parameters") as caught:
        optimizer.step()
    seen["incomplete backward"] = 0 < len(caught.value.report.stepped) < len(list(ddp.parameters()))


def _refused(ddp, optimizer, x, match, between=lambda: None):
    """Whether ``optimizer.step()`` refuses what was done behind a backward pass, again and again."""
    optimizer.zero_grad()
    _backward(ddp, x)
    between()
    for _ in range(2):
        with pytest.raises(ConfigError, match=match):
            optimizer.step()
    return True


def _too_late(seen):
    """Whatever a step has read, or left, must not change before the loop calls step()."""

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
        optimizer = _adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        seen[f"too late: {match}"] = _refused(
            ddp, optimizer, batches(1)[0], match, partial(change, ddp, optimizer)
        )


def _used_up_gradients(seen):
    """Gradients that a step has used stay used, whatever was done to them."""
    for view in (False, True):
        for clips in (False, True):
            ddp = make_ddp(gradient_as_bucket_view=view)
            optimizer = _adamw(ddp)
            overlap_optimizer(ddp, optimizer)
            first, second = batches(2)
            _backward(ddp, first)  # after the first pass DDP moves the gradients
            if clips:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
            after = _parameters(ddp)
            for _ in range(2):
                with pytest.raises(DoubleBackwardError, match="zero_grad"):
                    _backward(ddp, second)
            seen[f"used up, {view}, {clips}"] = same(after, _parameters(ddp))


def _ordinary_steps(seen):
    """A loop without step(), and then an ordinary one; torch.autograd.grad, which is no backward pass."""
    results = []
    for overlapped in (False, True):
        for how in ("pause", "no_sync", "autograd.grad"):
            ddp = make_ddp()
            optimizer = _adamw(ddp)
            handle = overlap_optimizer(ddp, optimizer) if overlapped else None
            first, second = batches(2)
            _backward(ddp, first)
            if not overlapped:
                optimizer.step()
            if how == "autograd.grad":
                torch.autograd.grad(ddp.module(first).sum(), list(ddp.module.parameters()))
            optimizer.zero_grad()
            around = ddp.no_sync if how == "no_sync" else handle.pause if handle else contextlib.nullcontext
            with around():
                _backward(ddp, second)
                optimizer.step()
            results.append([_parameters(ddp), optimizer.state_dict()])
    seen["ordinary steps"] = same(results[:3], results[3:])


def _frozen_layers(seen):
    """A layer that is frozen at first; and one used by torch.autograd.grad only."""
    results = []
    for overlapped in (False, True):
        ddp = make_ddp(find_unused_parameters=True)
        optimizer = _adamw(ddp)
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
            _backward(ddp, x)
            optimizer.step()
        results.append([_parameters(ddp), optimizer.state_dict()])
    seen["frozen at first"] = same(*results)


def _foreign_parameters(seen):
    """Parameters that DDP does not average, or that moved to another group, later."""
    for how in ("added", "unfrozen"):
        net = Net()
        if how == "unfrozen":
            net.layers[1].requires_grad_(False)
        ddp = DistributedDataParallel(net)
        optimizer = _adamw(ddp)
        overlap_optimizer(ddp, optimizer)
        _backward(ddp, batches(1)[0])
        optimizer.zero_grad()
        if how == "added":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        else:
            net.layers[1].requires_grad_(True)
        before = _parameters(ddp)
        with pytest.raises(RuntimeError, match="does not average"):
            _backward(ddp, batches(1)[0])
        seen[f"foreign: {how}"] = same(before, _parameters(ddp))
    results = []
    for overlapped in (False, True):
        ddp = make_ddp()
        own = list(ddp.parameters())
        optimizer = torch.optim.SGD([{"params": own[:5], "lr": 0.1}, {"params": own[5:], "lr": 0.001}])
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        for x in batches(2):
            _backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
            one, other = optimizer.param_groups
            one["params"], other["params"] = other["params"], one["params"]
        results.append(_parameters(ddp))
    seen["groups change places"] = same(*results)


class NeedsParameters(torch.optim.SGD):
    """Its step fails when it has nothing to step, and takes more than a closure."""

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
                _backward(ddp, x)
                optimizer.step()
            results.append([_parameters(ddp), optimizer.state_dict()])
        _backward_after_zero(ddp, optimizer)
        with pytest.raises(ConfigError, match="flag"):
            optimizer.step(flag=True)
        seen[f"a step that needs parameters, {mode.name}"] = same(*results)


def _removed_before_step(seen):
    results = []
    for overlapped in (False, True):
        ddp = make_ddp()
        optimizer = _adamw(ddp)
        first, second, third = batches(3)
        with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext():
            _backward(ddp, first)
        optimizer.step()
        optimizer.zero_grad()
        with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext():
            _backward(ddp, second)
            if not overlapped:
                optimizer.step()
        optimizer.zero_grad()
        _backward(ddp, third)  # the step that was pending is over
        optimizer.step()
        results.append([_parameters(ddp), optimizer.state_dict()])
    seen["removed before step()"] = same(*results)


PARTS = {
    part.__name__.strip("_"): part
    for part in (
        _too_late,
        _used_up_gradients,
        _ordinary_steps,
        _frozen_layers,
        _foreign_parameters,
        _step_without_parameters,
        _removed_before_step,
        _double_backward,
        _changed_gradients,
        _calls_of_step,
        _after_reduce_runs_hooks_once,
        _late_pre_hook,
        _pause_and_remove,
        _ordinary_step_in_pause,
        _reports,
        _added_group,
        _incomplete_backward,
    )
}


def _loop(_):
    found = {}
    for name, part in PARTS.items():
        found[name] = {}
        try:
            part(found[name])
        except Exception:  # noqa: BLE001 - the parts behind it are of interest too
            found[name]["raised"] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def loop():
    return run_ranks(_loop, 2, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_the_loop_around_it(loop, name):
    for rank in loop:
        assert rank[name]
        assert all(held is True for held in rank[name].values()), rank[name]


class Wait(torch.autograd.Function):
    """The identity; its backward waits until a condition holds."""

    @staticmethod
    def forward(ctx, x, condition):
        ctx.condition = condition
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        deadline = time.monotonic() + 20
        while not ctx.condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return gradient, None


class Reuses(torch.nn.Module):
    """A checkpointed block that uses a later layer's weight without its gradient."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8)
        self.how = how
        self.goes_on = lambda: True

    def block(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                target = self.last(x)
            return torch.tanh(x * target)
        weight = self.last.weight.detach() if self.how == "detach" else torch.eye(8)
        return torch.tanh(x @ weight)

    def forward(self, x):
        x = checkpoint(self.block, self.first(x), use_reentrant=False)
        return self.last(Wait.apply(x, self.goes_on))


def _weight_reuse(_):
    """The hazard is a race: here the recomputation waits until the last layer was stepped."""
    seen = {}
    for how in ("detach", "no_grad", "harmless"):
        for check in (False, True):
            ddp = DistributedDataParallel(Reuses(how), bucket_cap_mb=0.0001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            handle = overlap_optimizer(ddp, optimizer, check=check)
            _backward(ddp, torch.ones(2, 8))  # after it there are several buckets
            optimizer.zero_grad()
            weight = ddp.module.last.weight
            before = weight.detach().clone()
            now = weight.detach()  # made here: whoever reads the parameter inside is found out
            ddp.module.goes_on = lambda now=now, before=before: bool((now != before).any())
            seen[how, check] = None
            try:
                _backward(ddp, torch.ones(2, 8))
            except WeightReuseError:
                seen[how, check] = "detected"
                weight.sum()  # outside of backward: allowed
                handle.remove()
            assert {type(parameter) for parameter in ddp.parameters()} == {torch.nn.Parameter}
    return seen


def test_a_stepped_weight_that_a_checkpointed_block_reads_is_an_error():
    for rank in run_ranks(_weight_reuse, 2, timeout=60):
        assert rank == {
            ("detach", False): None,
            ("detach", True): "detected",
            ("no_grad", False): None,
            ("no_grad", True): "detected",
            ("harmless", False): None,
            ("harmless", True): None,
        }


def _many_buckets(rank):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1000)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    reference = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1000)]), bucket_cap_mb=1e-6
    )
    reference.load_state_dict(ddp.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ddp, reference)]
    handle = overlap_optimizer(ddp, optimizers[0])
    for step in range(3):
        x = torch.ones(2, 2) * (rank + step)
        for model, optimizer in zip((ddp, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    report = handle.wait()
    return report.buckets, same(_parameters(ddp), _parameters(reference))


def test_a_thousand_buckets():
    for buckets, equal in run_ranks(_many_buckets, 2, timeout=120):
        assert buckets >= 1000
        assert equal


def _threads(_):
    """However the overlap ends, its thread ends too."""
    names = []
    for how in ("remove", "garbage", "error", "destroyed"):
        ddp = DistributedDataParallel(Net())
        optimizer = _adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer)
        _backward(ddp, batches(1)[0])
        alive = sum(thread.name == "ddp-optim-overlap" for thread in threading.enumerate())
        names.append(alive)
        gone = weakref.ref(ddp)
        if how == "remove":
            handle.remove()
        elif how == "error":
            with pytest.raises(DoubleBackwardError):
                _backward(ddp, batches(1)[0])
        elif how == "destroyed":
            dist.destroy_process_group()
        del ddp, handle
        gc.collect()
        assert gone() is None
        deadline = time.monotonic() + 10
        while any(thread.name == "ddp-optim-overlap" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, how
            time.sleep(0.01)
        optimizer.step()  # an ordinary one: nothing is left of the overlap
    return names


def test_no_thread_is_left():
    for names in run_ranks(_threads, 2, timeout=60):
        assert names == [1, 1, 1, 1]
