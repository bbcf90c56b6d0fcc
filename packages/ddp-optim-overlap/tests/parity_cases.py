"""The ordinary loop against the overlap: every optimizer, every way to run DDP, on any device."""

import contextlib
import copy
import math
import warnings

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist

from ddp_optim_overlap import overlap_optimizer

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


def two(ddp):
    """Return an optimizer with two groups, whose parameters are in other buckets' order, and another one."""
    layers = list(ddp.module.layers[2:].parameters())
    groups = [{"params": layers[1::2], "weight_decay": 0.0, "lr": 0.02}, {"params": layers[::2]}]
    rest = [*ddp.module.conv.parameters(), *ddp.module.layers[:2].parameters()]
    return [
        torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    ]


def _some_unused(step):
    """Layer 1 is unused in step 1 everywhere, layer 2 in step 2 on rank 0 only."""
    return {1: (1,), 2: (2,) if dist.get_rank() == 0 else ()}.get(step, ())


_UNUSED = {"find_unused_parameters": True, "skip": _some_unused}
_VIEW = {"gradient_as_bucket_view": True}
MODES = {
    "plain": {},
    "bucket view": _VIEW,
    "static graph": {"static_graph": True},
    "static graph, bucket view, a layer never used": {"static_graph": True, "skip": lambda _: (1,), **_VIEW},
    "no_sync": {"accumulate": 3},
    "no_sync, bucket view": {"accumulate": 3, **_VIEW},
    "unused": _UNUSED,
    "unused, bucket view": {**_UNUSED, **_VIEW},
    "unused, zeros": {**_UNUSED, "set_to_none": False},
    "zeros, bucket view": {"set_to_none": False, **_VIEW},
    "join": {"join": 2},
    "join, bucket view": {"join": 2, **_VIEW},
    "tied": {"tied": True},
    "one bucket": {"bucket_cap_mb": 25},
    "no step() in the loop": {"call_step": False, "schedule": True},
    "schedule and resume": {"schedule": True, "steps": 6, "resume_at": 3},
}
OF_OPTIMIZERS = {**_UNUSED, "accumulate": 2, "schedule": True, "resume_at": 2}
"""How every optimizer is run."""


def train(
    make_optimizers,
    overlap=None,
    *,
    steps=4,
    accumulate=1,
    skip=lambda step: (),
    join=0,
    set_to_none=True,
    call_step=True,
    schedule=False,
    resume_at=None,
    tied=False,
    hook=None,
    **ddp_options,
):
    """Train; return what must be the same with these options of ``overlap_optimizer`` and without any.

    ``hook``: a communication hook, with a state if it makes any.
    """
    job = _Job(make_optimizers, overlap, hook, schedule=schedule, tied=tied, **ddp_options)
    count = steps + join * dist.get_rank()
    data = runs.batches(count * accumulate)
    kept = []
    with job.ddp.join() if join else contextlib.nullcontext():
        for step in range(count):
            if resume_at == step:
                job = _Job(make_optimizers, overlap, hook, schedule=schedule, tied=tied, **ddp_options).load(
                    job
                )
            job.ddp.module.skipped = skip(step)
            for left in reversed(range(accumulate)):
                with job.ddp.no_sync() if left else contextlib.nullcontext():
                    job.ddp(data.pop()).square().sum().backward()
            if call_step or overlap is None:
                for optimizer in job.optimizers:
                    optimizer.step()
            for scheduler in job.schedulers:
                scheduler.step()
            kept.append([None if one is None else one.clone() for one in runs.gradients(job.ddp)])
            for optimizer in job.optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
    if job.handle is not None:
        runs.assert_stepped(job.handle)  # otherwise optimizer.step() has done it all, and the overlap nothing
    states = [one.state_dict() for one in (*job.optimizers, *job.schedulers)]
    return {"parameters": runs.snapshot(job.ddp), "states": states, "gradients": kept}


class _Job:
    """A model, its optimizers, and their overlap, if any."""

    def __init__(self, make_optimizers, overlap, hook, *, schedule, tied, **ddp_options):
        self.ddp = runs.make_ddp(runs.Net(tied=tied), **ddp_options)
        self.optimizers = make_optimizers(self.ddp)
        self.schedulers = []
        if schedule:
            cosine = torch.optim.lr_scheduler.LambdaLR
            self.schedulers = [cosine(optimizer, _cosine_with_warmup) for optimizer in self.optimizers]
        self.handle = None
        comm_hook, state = (None, None) if hook is None else hook()
        if overlap is not None:
            self.handle = overlap_optimizer(
                self.ddp, self.optimizers, comm_hook=comm_hook, comm_state=state, **overlap
            )
        elif hook is not None:
            self.ddp.register_comm_hook(state, comm_hook)

    def load(self, other):
        """Continue from where another job is, as from a checkpoint."""
        mine, saved = ([job.ddp, *job.optimizers, *job.schedulers] for job in (self, other))
        for one, state in zip(mine, copy.deepcopy([one.state_dict() for one in saved]), strict=True):
            one.load_state_dict(state)
        return self


def _cosine_with_warmup(step):
    return (step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6))


def require_same(make_optimizers, *, options=None, **arguments):
    """Fail unless a run with the overlap, and one that releases gradients, end as the ordinary one does."""
    options = options or {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")  # of a missing optimizer.step()
        ordinary = train(make_optimizers, **arguments)
        runs.assert_same(train(make_optimizers, options, **arguments), ordinary, "overlapped")
        with runs.early_steps():
            runs.assert_same(train(make_optimizers, options, **arguments), ordinary, "stepped early")
        if can_release(arguments):
            if not arguments.get("set_to_none", True):  # zeros would be added to: -0.0 becomes 0.0
                ordinary = train(make_optimizers, **{**arguments, "set_to_none": True})
            released = train(make_optimizers, {**options, "release_gradients": True}, **arguments)
            nothing = [[None] * len(step) for step in ordinary["gradients"]]
            runs.assert_same(released, {**ordinary, "gradients": nothing}, "released")


def can_release(ddp_options):
    """Return whether gradients can be released on this device with these options."""
    limits = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    return runs.rank_device().type == "cpu" or not any(ddp_options.get(name) for name in limits)


@runs.cases({name: IMPLEMENTATIONS[name] for name in USUAL})
def check_optimizer(name, implementation):
    """Every optimizer, with what its state may depend on: unused parameters, accumulation and resuming."""
    if name == "Adagrad" and "fused" in implementation and runs.rank_device().type != "cpu":
        pytest.skip("not in every torch")
    kind, options = OPTIMIZERS[name]
    require_same(lambda ddp: [kind(ddp.parameters(), **options, **implementation)], **OF_OPTIMIZERS)


@runs.cases({name: case for name, case in IMPLEMENTATIONS.items() if name not in USUAL})
def rare_optimizer(name, implementation):
    """All others."""
    check_optimizer(name, implementation)


@runs.cases({name: (arguments,) for name, arguments in MODES.items()})
def check_mode(arguments):
    """Every way to run DDP, with two optimizers and groups."""
    require_same(two, **arguments)
