"""Declared optimizers in real passes: states, options and attributes are those of the ordinary loop."""

import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from overlap_runs import (
    adamw,
    assert_ordinary,
    assert_same,
    backward,
    batches,
    changed,
    differences,
    make_ddp,
    on_ranks,
    one_group,
    snapshot,
    train_on,
)

from ddp_optim_overlap import UnsupportedOptimizerError, overlap_optimizer

DECLARED = {"steps_per_parameter": True}


class Steps(torch.optim.Optimizer):
    """SGD per parameter, as a base for optimizers that do more; counts steps in each parameter's state."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(self.update(parameter, state, group, (number, place)) * group["lr"])

    def update(self, parameter, state, group, place):
        return parameter.grad


def _run(make, *, overlapped):
    """Train on; a scheduler of sorts halves the first group's rate after every step."""
    ddp = make_ddp()
    optimizer = make(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer, **DECLARED)
    found = []
    for x in batches(16):
        found = train_on(ddp, optimizer, [x])
        optimizer.param_groups[0]["lr"] *= 0.5
    return found, [vars(parameter).get("average") for parameter in ddp.parameters()]


class ReadsFirstGroup(Steps):
    def update(self, parameter, state, group, place):
        return parameter.grad * self.param_groups[0]["lr"]


class RatesByNumber(Steps):
    def update(self, parameter, state, group, place):
        return parameter.grad * (1.0, 0.2)[place[0]]


def check_groups_by_number():
    def make(kind, ddp):
        parameters = list(ddp.parameters())
        return kind([{"params": parameters[:4]}, {"params": parameters[4:]}])

    for kind in (ReadsFirstGroup, RatesByNumber):
        assert_ordinary(partial(_run, partial(make, kind)))


class AveragesInAttributes(Steps):
    """Now and then goes back to an average, which it keeps outside the optimizer's state."""

    def update(self, parameter, state, group, place):
        if "average" not in vars(parameter):
            parameter.average = parameter.clone()
        parameter.average.lerp_(parameter, 0.1)
        return parameter.grad + (parameter - parameter.average if state["step"] % 15 == 0 else 0)


class History(Steps):
    def update(self, parameter, state, group, place):
        state.setdefault("history", deque(maxlen=3)).append(parameter.grad.clone())
        return sum(state["history"])


@dataclass
class Moments:
    first: torch.Tensor
    count: int = 0


class InDataClass(Steps):
    def update(self, parameter, state, group, place):
        moments = state.setdefault("moments", Moments(torch.zeros_like(parameter)))
        moments.first.lerp_(parameter.grad, 0.1)
        moments.count += 1
        return moments.first * moments.count


def check_states_and_attributes_of_parameters():
    def make(kind, ddp):
        return kind(ddp.parameters(), lr=0.01)

    ddp = make_ddp()
    overlap_optimizer(ddp, make(AveragesInAttributes, ddp), **DECLARED)
    assert not any("average" in vars(parameter) for parameter in ddp.parameters())
    assert_ordinary(partial(_run, partial(make, AveragesInAttributes)))
    for kind in (History, InDataClass):
        ends = [_run(partial(make, kind), overlapped=overlapped)[0] for overlapped in (True, False)]
        assert_same(*[parameters for parameters, _ in ends])


class Scaled(Steps):
    """Has one factor per parameter."""

    def update(self, parameter, state, group, place):
        return parameter.grad * group["factors"][place[1]]


class ByName(Steps):
    """Decays all parameters but biases."""

    def update(self, parameter, state, group, place):
        bias = group["param_names"][place[1]].endswith("bias")
        return parameter.grad if bias else parameter.grad + parameter


class Knows(Steps):
    """Recognizes biases in many ways."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.decayed = {one for one in params if one.dim() > 1}
        self.nested = {"rates": {one: 0.5 if one.dim() == 1 else 1.0 for one in params}}
        for one in params:
            one.rate = self.nested["rates"][one]

    def update(self, parameter, state, group, place):
        assert self.nested["rates"][parameter] == parameter.rate
        grad = parameter.grad + parameter if parameter in self.decayed else parameter.grad
        return grad * parameter.rate


class OwnLists(Steps):
    """Has a tensor per parameter, looked up by identity."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = params
        self.averages = [one.detach().clone() for one in params]

    def update(self, parameter, state, group, place):
        where = next(index for index, one in enumerate(self.everything) if one is parameter)
        self.averages[where].lerp_(parameter, 0.1)
        return parameter.grad + self.averages[where]


def check_right_or_refused():
    """What a step by buckets cannot serve is refused at the call: it never leads to other bits."""

    def scaled(sequence, ddp):
        parameters = list(ddp.parameters())
        factors = sequence([0.1 * (number + 1) for number in range(len(parameters))])
        return [Scaled(parameters, lr=0.01, factors=factors)]

    makers = [partial(scaled, sequence) for sequence in (list, tuple, deque, torch.tensor)]
    makers.append(lambda ddp: [ByName(ddp.named_parameters(), lr=0.01)])
    makers += [one_group(kind, {"lr": 0.01}) for kind in (Knows, OwnLists)]
    for make in makers:
        with contextlib.suppress(UnsupportedOptimizerError):
            assert_same(differences(make, options=DECLARED), [])


class ReplacesLater(Steps):
    """Replaces an option or an attribute once training has begun, which no trial can foresee."""

    late, calls = "", 0

    def update(self, parameter, state, group, place):
        if self.late == "option 'lr'":
            group["lr"] *= 0.5
        if self.late == "attribute 'calls'":
            self.calls += 1
        return parameter.grad


def check_replaced_options_and_attributes():
    """What buckets set differently, or in attributes, would be lost: an error."""
    for late in ("option 'lr'", "attribute 'calls'"):
        ddp = make_ddp()
        optimizer = ReplacesLater(ddp.parameters())
        overlap_optimizer(ddp, optimizer, **DECLARED)
        train_on(ddp, optimizer, batches(2))
        before = snapshot(ddp)
        optimizer.late = late
        with pytest.raises(RuntimeError, match=late):
            backward(ddp, batches(1)[0])
        with pytest.raises(UnsupportedOptimizerError, match=late):
            optimizer.step()
        assert late != "attribute 'calls'" or len(changed(ddp, before)) < len(before)


class CountsInGroups(Steps):
    """Counts steps in its groups, as many optimizers do, and passes over groups without gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                group["step"] = group.get("step", 0) + 1
        return super().step(closure)

    def update(self, parameter, state, group, place):
        return parameter.grad / group["step"]


def check_counters_in_groups():
    """Each bucket finds the count of the whole step, which is counted once."""

    def make(ddp):
        layers = list(ddp.module.layers.parameters())
        rest = list(ddp.module.conv.parameters())
        return [CountsInGroups([{"params": layers[1::2]}, {"params": rest + layers[0::2], "lr": 0.02}])]

    for modes in ({}, {"find_unused_parameters": True, "skip": lambda step: (1,) if step % 2 else ()}):
        assert_same(differences(make, options=DECLARED, **modes), [])


def check_default_devices():
    """The default device of the loop is none of its business."""
    for around in (torch.device("meta"), torch.device("cpu")):
        for make in (adamw, lambda ddp: History(ddp.parameters())):

            def run(*, overlapped, around=around, make=make):
                ddp = make_ddp()
                optimizer = make(ddp)
                if overlapped:
                    with around:
                        overlap_optimizer(ddp, optimizer, steps_per_parameter=make is not adamw)
                train_on(ddp, optimizer, batches(2))
                return snapshot(ddp)

            assert_ordinary(run)


check = on_ranks(__name__, timeout=90, group_timeout=20)


def test_declared_optimizers(check):
    check()
