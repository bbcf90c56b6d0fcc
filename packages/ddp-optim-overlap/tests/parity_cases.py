"""The ordinary loop against the overlap: every optimizer, every way to run DDP, on any device."""

import functools

import overlap_runs as runs
import pytest
import torch
from overlap_loops import FOUR_STEPS, can_release, require_same, two_optimizers

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}
FUSED = ("SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "Adagrad")
IMPLEMENTATIONS = {
    f"{name}, {kind}": (name, {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True})
    for name in OPTIMIZERS
    for kind in ("for-loop", "foreach", "fused")
    if kind != "fused" or name in FUSED
}
USUAL = [
    *(f"{name}, {('for-loop', 'foreach')[place % 2]}" for place, name in enumerate(OPTIMIZERS)),
    "SGD momentum, fused",
    "AdamW, fused",
]
"""Every optimizer once, and each kind of implementation."""


UNUSED, VIEW = {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
_SOME_UNUSED = "overlap train skip train skip_on_rank_1 train use train"
_ACCUMULATED = "overlap" + 4 * " accumulate accumulate train"
_JOINED = "overlap join" + 4 * " train" + " train_more end"
MODES = {
    "plain": (FOUR_STEPS, {}),
    "bucket view": (FOUR_STEPS, VIEW),
    "static graph": (FOUR_STEPS, STATIC),
    "static graph, bucket view, a layer never used": (f"skip {FOUR_STEPS}", {**STATIC, **VIEW}),
    "no_sync": (_ACCUMULATED, {}),
    "no_sync, bucket view": (_ACCUMULATED, VIEW),
    "unused": (_SOME_UNUSED, UNUSED),
    "unused, bucket view": (_SOME_UNUSED, {**UNUSED, **VIEW}),
    "unused, zeros": (f"to_zeros {_SOME_UNUSED}", UNUSED),
    "zeros, bucket view": (f"to_zeros {FOUR_STEPS}", VIEW),
    "join": (_JOINED, {}),
    "join, bucket view": (_JOINED, VIEW),
    "tied": (FOUR_STEPS, {"make_net": functools.partial(runs.Net, tied=True)}),
    "one bucket": (FOUR_STEPS, {"bucket_cap_mb": 25}),
    "no step() in the loop": ("overlap" + 4 * " backward left_out schedule keep zero", {}),
    "schedule and resume": ("overlap" + 3 * " train schedule" + " resume" + 3 * " train schedule", {}),
}
OF_OPTIMIZERS = (
    "overlap accumulate train schedule skip accumulate train schedule resume "
    "skip_on_rank_1 accumulate train schedule use accumulate train schedule"
)
"""How every optimizer is run: with what its state may depend on."""


@runs.cases({name: IMPLEMENTATIONS[name] for name in USUAL})
def check_optimizer(name, implementation):
    """Every optimizer, with what its state may depend on: unused parameters, accumulation and resuming."""
    if name == "Adagrad" and "fused" in implementation and runs.rank_device().type != "cpu":
        pytest.skip("not in every torch")
    kind, options = OPTIMIZERS[name]
    make = lambda ddp: [kind(ddp.parameters(), **options, **implementation)]  # noqa: E731
    early = not can_release(UNUSED)  # released gradients are stepped bucket by bucket, too
    require_same(OF_OPTIMIZERS, make, early=early, **UNUSED)


@runs.cases({name: case for name, case in IMPLEMENTATIONS.items() if name not in USUAL})
def rare_optimizer(name, implementation):
    """All others."""
    check_optimizer(name, implementation)


@runs.cases(MODES)
def check_mode(words, options):
    """Every way to run DDP, with two optimizers and groups."""
    require_same(words, two_optimizers, **options)
