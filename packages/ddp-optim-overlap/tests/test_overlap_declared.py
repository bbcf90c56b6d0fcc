"""Declared optimizers in real passes: states, options and attributes are those of the ordinary loop."""

import contextlib
from functools import partial

import pytest
import torch
from declared_optimizers import CountsInGroup, History, Steps
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
    snapshot,
    train_on,
)

from ddp_optim_overlap import UnsupportedOptimizerError, overlap_optimizer

DECLARED = {"steps_per_parameter": True}


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
    def update(self, parameter, gradient, state, group):
        return gradient * self.param_groups[0]["lr"]


def check_groups_by_number():
    def make(ddp):
        parameters = list(ddp.parameters())
        return ReadsFirstGroup([{"params": parameters[:4]}, {"params": parameters[4:]}])

    assert_ordinary(partial(_run, make))


class AveragesInAttributes(Steps):
    """Now and then goes back to an average, which it keeps outside the optimizer's state."""

    def update(self, parameter, gradient, state, group):
        if "average" not in vars(parameter):
            parameter.average = parameter.clone()
        parameter.average.lerp_(parameter, 0.1)
        return gradient + (parameter - parameter.average if state["step"] % 15 == 0 else 0)


def check_states_and_attributes_of_parameters():
    def make(kind, ddp):
        return kind(ddp.parameters(), lr=0.01)

    ddp = make_ddp()
    overlap_optimizer(ddp, make(AveragesInAttributes, ddp), **DECLARED)
    assert_same([name for parameter in ddp.parameters() for name in vars(parameter) if name == "average"], [])
    assert_ordinary(partial(_run, partial(make, AveragesInAttributes)))
    ends = [_run(partial(make, History), overlapped=overlapped)[0] for overlapped in (True, False)]
    assert_same(*[parameters for parameters, _ in ends])


class ByName(Steps):
    """Decays all parameters but biases."""

    def update(self, parameter, gradient, state, group):
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        return gradient if names[id(parameter)].endswith("bias") else gradient + parameter


def check_right_or_refused():
    """What a step by buckets cannot serve is refused at the call: it never leads to other bits."""
    with contextlib.suppress(UnsupportedOptimizerError):
        assert_same(differences(one_group_by_name, options=DECLARED), [])


def one_group_by_name(ddp):
    return [ByName(ddp.named_parameters(), lr=0.01)]


class ReplacesLater(Steps):
    """Replaces an option or an attribute once training has begun, which no trial can foresee."""

    late, calls = "", 0

    def update(self, parameter, gradient, state, group):
        if self.late == "option 'lr'":
            group["lr"] *= 0.5
        if self.late == "attribute 'calls'":
            self.calls += 1
        return gradient


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


def check_counters_in_groups():
    """Each bucket finds the count of the whole step, which is counted once."""

    def make(ddp):
        layers = list(ddp.module.layers.parameters())
        rest = list(ddp.module.conv.parameters())
        return [CountsInGroup([{"params": layers[1::2]}, {"params": rest + layers[0::2], "lr": 0.02}])]

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
