"""The cases of the parity suite, for any device that the process group supports."""

import contextlib
import itertools
import math
import warnings

import torch
from overlap_runs import (
    FUSED,
    OPTIMIZERS,
    PoisonedPages,
    differences,
    one_group,
    rank_device,
    ways_to_release,
)


def _implementations(name):
    """Return the optimizer in its single-tensor, foreach and, where it exists, fused implementation."""
    make, options = OPTIMIZERS[name]
    yield "single", one_group(make, {**options, "foreach": False})
    yield "foreach", one_group(make, {**options, "foreach": True})
    if name in FUSED and _has_fused(make):
        yield "fused", one_group(make, {**options, "fused": True})


def _has_fused(make):
    """Whether torch has a fused step on this device: Adagrad's was for CPUs only at first."""
    parameter = torch.ones(2, device=rank_device(), requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    try:
        make([parameter], lr=0.1, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _groups(ddp):
    layers = list(ddp.module.layers.parameters())
    rest = list(ddp.module.conv.parameters())
    return [
        torch.optim.AdamW(
            [
                {"params": layers[1::2], "weight_decay": 0.0, "lr": 0.02},
                {"params": rest + layers[0::2], "betas": (0.8, 0.9)},
            ],
            lr=0.01,
        )
    ]


def _two(ddp):
    layers = ddp.module.layers
    return [
        torch.optim.SGD([*ddp.module.conv.parameters(), *layers[:2].parameters()], lr=0.1, momentum=0.9),
        torch.optim.AdamW(layers[2:].parameters(), lr=0.01),
    ]


def _cosine_with_warmup(optimizers):
    def factor(step):
        return (step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6))

    return [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]


class Clamped(torch.optim.SGD):
    """A subclass whose step does more, also to parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99).clamp_(-0.5, 0.5)
        return loss


ADAMW = one_group(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


def _unused(step):
    """Layer 1 is unused in step 1 everywhere, layer 2 in step 2 on rank 0 only."""
    return {1: (1,), 2: (2,) if torch.distributed.get_rank() == 0 else ()}.get(step, ())


MODES = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket view": {"static_graph": True, "gradient_as_bucket_view": True},
    "static graph, a layer never used": {"static_graph": True, "skip": lambda _: (1,)},
    "no_sync": {"accumulate": 3},
    "no_sync, bucket view": {"accumulate": 3, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "skip": _unused},
    "unused, bucket view": {
        "find_unused_parameters": True,
        "skip": _unused,
        "gradient_as_bucket_view": True,
    },
    "unused, no_sync": {"find_unused_parameters": True, "skip": _unused, "accumulate": 2},
    "unused, zeros": {"find_unused_parameters": True, "skip": _unused, "set_to_none": False},
    "zeros": {"set_to_none": False},
    "zeros, bucket view": {"set_to_none": False, "gradient_as_bucket_view": True},
    "join": {"join": 2},
    "join, bucket view": {"join": 2, "gradient_as_bucket_view": True},
    "tied": {"tied": True},
    "one bucket": {"bucket_cap_mb": 25},
    "no step() in the loop": {"call_step": False},
    "schedule": {"make_schedulers": _cosine_with_warmup},
    "schedule, no step() in the loop": {"make_schedulers": _cosine_with_warmup, "call_step": False},
    "resume": {"make_schedulers": _cosine_with_warmup, "steps": 6, "resume_at": 3},
}


def every_optimizer(_, modes=tuple(MODES), released_modes=tuple(MODES)):
    """Every optimizer in every implementation in these modes; in some also with released gradients."""
    seen = {}
    with _no_scheduler_warns():
        for name in OPTIMIZERS:
            for (kind, make), mode in itertools.product(_implementations(name), modes):
                released = ways_to_release(MODES[mode], [PoisonedPages]) if mode in released_modes else []
                seen[name, kind, mode] = differences(make, released=released, **MODES[mode])
    return seen


def every_mode(_, modes=tuple(MODES)):
    """These modes with groups, two optimizers, and released gradients."""
    seen = {}
    with _no_scheduler_warns():
        for name in modes:
            arguments = MODES[name]
            released = ways_to_release(arguments)
            seen["groups", name] = differences(_groups, released=released, **arguments)
            seen["two optimizers", name] = differences(_two, released=released, **arguments)
    clamped = one_group(Clamped, {"lr": 0.1})
    seen["Clamped", "step does more"] = differences(clamped, options={"steps_per_parameter": True})
    return seen


@contextlib.contextmanager
def _no_scheduler_warns():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")  # of a missing optimizer.step()
        yield
