"""A profiler shows collectives under the name of the function that was called, also in backward."""

import torch
from torch.profiler import profile

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks


def _names(function):
    with profile() as profiler:
        function()
    shown = [event for event in profiler.events() if event.name.startswith("dist_autograd_collectives::")]
    # The operator that transforms see; a range with the function's name is in it.
    shown = [event for event in shown if event.name != "dist_autograd_collectives::linear"]
    shown.sort(key=lambda event: event.time_range.start)
    return [event.name.removeprefix("dist_autograd_collectives::") for event in shown]


def _ranges(rank):
    x = torch.full((4,), float(rank), requires_grad=True)

    def started():
        handle = dac.start(dac.all_gather_cat, x)
        handle.wait().sum().backward()

    def twice():
        (gradient,) = torch.autograd.grad(dac.all_reduce(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()

    return {
        "sum": _names(lambda: dac.all_reduce(x).sum().backward()),
        "largest": _names(lambda: dac.all_reduce(x, "max").sum().backward()),
        "gather": _names(lambda: dac.all_gather(x)[0].sum().backward()),
        "functional": _names(lambda: torch.func.grad(lambda y: dac.all_reduce(y).sum())(x.detach())),
        "started": _names(started),
        "twice": _names(twice),
    }


def test_the_function_that_was_called_is_shown_by_name():
    for seen in run_ranks(_ranges, 2):
        assert seen["sum"] == ["all_reduce(SUM)", "all_reduce(SUM):backward"]
        assert set(seen["largest"]) == {"all_reduce(MAX)", "all_reduce(MAX):backward"}
        assert seen["gather"] == ["all_gather", "all_gather:backward"]
        assert seen["functional"] == ["all_reduce(SUM)", "all_reduce(SUM):backward"]
        assert seen["started"] == [
            f"all_gather_cat{part}" for part in (":start", ":wait", ":backward:start", ":backward:wait")
        ]
        assert seen["twice"][:2] == ["all_reduce(SUM)", "all_reduce(SUM):backward"]
        assert seen["twice"][2] == "all_reduce(SUM):backward:backward"
