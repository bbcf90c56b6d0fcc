"""Couplings that show only late or in unusual places: bitwise the ordinary loop, or refused with a reason."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    backward,
    batches,
    both,
    make_ddp,
    named,
    require_held,
    run_parts,
    snapshot,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_optim_overlap import ConfigError, OverlapMode, UnsupportedOptimizerError, overlap_optimizer
from dist_utils.testing import call_in_backward, run_ranks


class Steps(torch.optim.Optimizer):
    """SGD per parameter, as a base for optimizers that do more; counts steps in each parameter's state."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(self.update(parameter, state, group, number))

    def update(self, parameter, state, group, number):
        return parameter.grad * group["lr"]


def _sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _two_groups(kind, ddp):
    parameters = list(ddp.parameters())
    return kind([{"params": parameters[:4]}, {"params": parameters[4:]}])


def _run(make, *, overlapped, steps=4, around=lambda ddp, optimizer, number: None, **options):
    """Train; ``around`` is called after every step."""
    ddp = make_ddp()
    optimizer = make(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer, **options)
    for number, x in enumerate(batches(steps)):
        optimizer.zero_grad()
        backward(ddp, x)
        optimizer.step()
        around(ddp, optimizer, number)
    attributes = [vars(parameter).get("average") for parameter in ddp.parameters()]
    return snapshot(ddp), optimizer.state_dict(), attributes


def _refused(make, match, ddp=None):
    ddp = make_ddp() if ddp is None else ddp
    with pytest.raises(UnsupportedOptimizerError, match=match):
        overlap_optimizer(ddp, make(ddp))
    return True


# Groups looked up by number


class ReadsFirstGroup(Steps):
    def update(self, parameter, state, group, number):
        return parameter.grad * self.param_groups[0]["lr"]


class RatesByNumber(Steps):
    def update(self, parameter, state, group, number):
        return parameter.grad * (0.1, 0.02)[number]


def _groups_by_number(seen):
    def halve_first(_, optimizer, __):
        optimizer.param_groups[0]["lr"] *= 0.5

    for kind in (ReadsFirstGroup, RatesByNumber):
        seen[kind.__name__] = both(partial(_run, partial(_two_groups, kind), around=halve_first))


# State in attributes of parameters


class AveragesInAttributes(Steps):
    """Now and then goes back to an average, which it keeps outside the optimizer's state."""

    def update(self, parameter, state, group, number):
        if "average" not in vars(parameter):
            parameter.average = parameter.clone()
        parameter.average.lerp_(parameter, 0.1)
        back = parameter - parameter.average if state["step"] % 15 == 0 else 0
        return parameter.grad * group["lr"] + back


def _parameter_attributes(seen):
    def make(ddp):
        return AveragesInAttributes(ddp.parameters())

    seen["bitwise"] = both(partial(_run, make, steps=16))
    ddp = make_ddp()
    overlap_optimizer(ddp, make(ddp))
    seen["nothing left"] = all("average" not in vars(parameter) for parameter in ddp.parameters())


# Coupling that starts late or depends on values


class CouplesLate(Steps):
    @torch.no_grad()
    def step(self, closure=None):
        mine = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        for parameter in mine:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
        factor = 1.0
        if self.couples(mine):
            factor = 1 / (1 + sum(parameter.grad.norm() for parameter in mine))
        for parameter in mine:
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"] * factor)

    def couples(self, mine):
        return self.state[mine[0]]["step"] > 30


class CouplesEverySo(CouplesLate):
    def couples(self, mine):
        return self.state[mine[0]]["step"] % 250 == 0


class CouplesManyParameters(CouplesLate):
    def couples(self, mine):
        return len(mine) > 6


class CouplesAtSmallRates(CouplesLate):
    def couples(self, mine):
        return self.param_groups[0]["lr"] < 0.005


class NoiseAfterBurnIn(Steps):
    def update(self, parameter, state, group, number):
        noise = torch.randn_like(parameter) if state["step"] > 300 else 0
        return (parameter.grad + noise) * group["lr"]


class CountsInClass(Steps):
    count = 0

    def update(self, parameter, state, group, number):
        CountsInClass.count += 1
        return parameter.grad * (group["lr"] if CountsInClass.count < 1000 else 0)


class Schedule:
    def __init__(self):
        self.calls_late = 0

    def __call__(self, step):
        self.calls_late += step > 40
        return 0.1 if self.calls_late < 20 else 0.01


class CallsSchedule(Steps):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.schedule = Schedule()

    def update(self, parameter, state, group, number):
        return parameter.grad * self.schedule(state["step"])


def _late(seen):
    for kind in (CouplesLate, CouplesEverySo, CouplesManyParameters):
        seen[kind.__name__] = _refused(lambda ddp, kind=kind: kind(ddp.parameters()), "per parameter")
    small = partial(CouplesAtSmallRates, lr=0.001)
    seen["small rate"] = _refused(lambda ddp: small(ddp.parameters()), "per parameter")
    seen["noise"] = _refused(lambda ddp: NoiseAfterBurnIn(ddp.parameters()), "draws random numbers")
    seen["class"] = _refused(
        lambda ddp: CountsInClass(ddp.parameters()), "'count', an attribute of its class"
    )
    seen["class as before"] = CountsInClass.count == 0
    seen["object"] = _refused(lambda ddp: CallsSchedule(ddp.parameters()), "per parameter")


# Frozen parameters


class DecaysAll(Steps):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def _half_frozen():
    ddp = make_ddp()
    module = ddp.module
    module.layers[1].weight.requires_grad_(False)
    return DistributedDataParallel(module, bucket_cap_mb=0.002)


def _frozen(seen):
    seen["decayed"] = _refused(lambda ddp: DecaysAll(ddp.parameters()), "frozen", _half_frozen())
    ddp = _half_frozen()
    optimizer = _sgd(ddp)
    overlap_optimizer(ddp, optimizer)
    backward(ddp, batches(1)[0])
    optimizer.step()
    optimizer.zero_grad()
    weight = ddp.module.layers[1].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="does not average"):
        backward(ddp, batches(1)[0])
    seen["gradient by hand"] = True


# Hooks of all optimizers


def _hooks_of_all(seen):
    @torch.no_grad()
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)

    hook = register_optimizer_step_post_hook(shrink)
    try:
        for mode in OverlapMode:
            seen["post", mode.name] = both(partial(_run, _sgd, mode=mode))
    finally:
        hook.remove()
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match="pre-hook"):
            overlap_optimizer(ddp, optimizer)
    finally:
        hook.remove()
    seen["pre"] = True


# Loops in which not every backward pass is a step


def _raises(match, loop, make=_sgd):
    ddp = make_ddp()
    optimizers = make(ddp)
    overlap_optimizer(ddp, optimizers)
    with pytest.raises((ConfigError, RuntimeError), match=match):
        loop(ddp, optimizers, iter(batches(8)))
    return True


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
    return [_sgd(ddp), torch.optim.AdamW(ddp.parameters())]


def _other_order(ddp, optimizers, data):
    _pass(ddp, next(data))
    for optimizer in reversed(optimizers):
        optimizer.step()


def _left_out_steps(seen):
    seen["guard"] = _raises("was not called", _guard)
    seen["sharpness-aware"] = _raises("several backward passes", _sharpness_aware)
    seen["turns"] = _raises("was not called", _takes_turns, _halves)
    seen["closure"] = _raises("was not called", _two_passes_in_closure)
    seen["other order"] = _raises("in common", _other_order, _two_that_share)


# Changes that raise no version, or happen inside backward()


def _clamp(ddp, _):
    for parameter in ddp.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _forget(ddp, optimizer):
    for parameter in ddp.parameters():
        optimizer.state[parameter]["momentum_buffer"].zero_()


def _clear(_, optimizer):
    optimizer.state.clear()


def _late_changes(seen):
    for change, what in ((_clamp, "parameters"), (_forget, "state"), (_clear, "state")):

        def loop(ddp, optimizer, data, change=change):
            for x in data:
                _pass(ddp, x)
                change(ddp, optimizer)
                optimizer.step()

        seen[change.__name__] = _raises(f"{what} w.* changed", loop)

    def in_hook(ddp, optimizer, data):
        def halve(_):
            optimizer.param_groups[0]["lr"] *= 0.5

        ddp.module.layers[1].weight.register_post_accumulate_grad_hook(halve)
        for x in data:
            _pass(ddp, x)
            optimizer.step()

    seen["rate in a hook"] = _raises("lr of parameter group 0 was changed", in_hook)


class CallsInside(torch.nn.Sequential):
    call = None

    def forward(self, x):
        return self[1](call_in_backward(self[0](x), lambda: self.call and self.call()))


def _inside_backward(seen):
    for name in ("remove", "overlap"):
        net = CallsInside(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.00001)
        optimizer = _sgd(ddp)
        handle = overlap_optimizer(ddp, optimizer) if name == "remove" else None
        ddp(torch.ones(2, 4)).sum().backward()  # the next pass has one bucket per parameter
        optimizer.step()
        optimizer.zero_grad()
        net.call = handle.remove if handle is not None else partial(overlap_optimizer, ddp, optimizer)
        with pytest.raises(ConfigError, match=r"inside backward\(\)"):
            ddp(torch.ones(2, 4)).sum().backward()
        seen[name] = True


def _default_dtype(seen):
    """Ranks with different default dtypes must send messages of one size, or Gloo ends the process."""
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = overlap_optimizer(ddp, optimizer)
    for x in batches(3):
        loss = ddp(x).square().sum()
        torch.set_default_dtype(torch.float64 if dist.get_rank() else torch.float32)
        try:
            loss.backward()
            optimizer.step()
            handle.wait()
        finally:
            torch.set_default_dtype(torch.float32)
        optimizer.zero_grad()
    seen["met"] = handle.wait().number == 3


PARTS = named(
    _default_dtype,
    _groups_by_number,
    _parameter_attributes,
    _late,
    _frozen,
    _hooks_of_all,
    _left_out_steps,
    _late_changes,
    _inside_backward,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_reach(ranks, name):
    require_held(ranks, name)
