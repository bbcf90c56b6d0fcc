"""The parity suite with CUDA streams: NCCL with one GPU per rank, Gloo with ranks that share GPUs.

With NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1, ranks can share GPUs under NCCL, too.
"""

import contextlib
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import batches, make_ddp, rank_device, same
from parity_cases import MODES, every_mode, every_optimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    GlobalNorm,
    OptimizerHookState,
    OverlapMode,
    StepError,
    UnsupportedOptimizerError,
    apply_optimizer_in_backward,
    hook_then_optimizer,
    overlap_optimizer,
    register_fused_optim,
)
from dist_utils.process_groups import future_of_work
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
BACKENDS = [("nccl", 2 if GPUS > 1 or SHARED else 1), ("gloo", 2)]
on_every_backend = pytest.mark.parametrize(("backend", "world_size"), BACKENDS)


def _start(rank, world_size, backend, cases):
    torch.cuda.set_device(rank % GPUS)
    torch.cuda.init()
    torch.backends.cudnn.deterministic = True  # two runs are compared bitwise
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    return cases(rank)


def _on(backend, world_size, cases, timeout=300):
    return run_ranks(_start, world_size, world_size, backend, cases, backend=None, timeout=timeout)


@on_every_backend
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(partial(every_optimizer, modes=("plain", "zeros", "resume")), id="every_optimizer"),
        pytest.param(every_mode, id="every_mode"),
    ],
)
def test_the_parity_suite(backend, world_size, cases):
    for rank in _on(backend, world_size, cases, timeout=1200):
        assert len(rank) > len(MODES)
        assert not any(rank.values()), {case: different for case, different in rank.items() if different}


def _slow_average(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average late on the GPU: a step that did not wait would use unaveraged gradients."""
    torch.cuda._sleep(10**7)
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return future_of_work(work, dist.group.WORLD, buffer.device).then(lambda done: done.value()[0])


class SlowAdamW(torch.optim.AdamW):
    """Steps late on the GPU: a forward pass that did not wait would use old parameters."""

    def step(self, closure=None):
        torch.cuda._sleep(10**7)
        return super().step(closure)


def _train_late(*, overlap, steps=5, accumulate=1, scaled=False, infinite=None, options=None, **ddp_options):
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(32, 256), *[torch.nn.Linear(256, 256) for _ in range(3)]]
    device, options = rank_device(), dict(options or {})
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=0.2, **ddp_options)
    optimizer = SlowAdamW(ddp.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=1024.0)
    if overlap:
        overlap_optimizer(ddp, optimizer, scaler=scaler, comm_hook=_slow_average, **options)
    else:
        ddp.register_comm_hook(None, _slow_average)
    for step, x in enumerate(batches(steps * accumulate)):
        last = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = ddp(x.to(device)).square().mean()
            scaler.scale(loss * torch.inf if step == infinite else loss).backward()
        if not last:
            continue
        if not overlap:
            scaler.unscale_(optimizer)
            if "clip" in options:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), options["clip"].max_norm)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in ddp.parameters()], optimizer.state_dict()


AFTER = {"mode": OverlapMode.AFTER_REDUCE}
LATE = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "no_sync": {"accumulate": 3},
    "clip": {"options": {**AFTER, "clip": GlobalNorm(0.01)}},
    "scaler": {"scaled": True, "options": AFTER},
    "scaler finds an infinity": {"scaled": True, "infinite": 2, "options": AFTER},
    "scaler and clip": {"scaled": True, "options": {**AFTER, "clip": GlobalNorm(0.01)}},
}


def _every_late(_):
    return {
        name: same(_train_late(overlap=False, **arguments), _train_late(overlap=True, **arguments))
        for name, arguments in LATE.items()
    }


@on_every_backend
def test_averages_and_steps_that_come_late(backend, world_size):
    for rank in _on(backend, world_size, _every_late):
        assert all(rank.values()), rank


def _train_drop_in(name):
    """Train with one of the functions with PyTorch's names, or without."""
    ddp = make_ddp()
    options = {"lr": 0.1, "momentum": 0.9}
    if name == "register_fused_optim":
        register_fused_optim(ddp, torch.optim.SGD, **options)
    elif name == "apply_optimizer_in_backward":
        apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), options)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), **options)
        if name == "hook_then_optimizer":
            ddp.register_comm_hook(None, hook_then_optimizer(_slow_average, OptimizerHookState(optimizer)))
    for x in batches(4):
        ddp.zero_grad()
        ddp(x.to(rank_device())).square().sum().backward()
        if name == "ordinary":
            optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in ddp.parameters()]


def _every_drop_in(_):
    ordinary = _train_drop_in("ordinary")
    names = ("register_fused_optim", "apply_optimizer_in_backward", "hook_then_optimizer")
    return {name: same(ordinary, _train_drop_in(name)) for name in names}


@on_every_backend
def test_drop_ins(backend, world_size):
    for rank in _on(backend, world_size, _every_drop_in):
        assert all(rank.values()), rank


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("no step today")


def _errors(_):
    x = batches(1)[0].to(rank_device())
    seen = {}
    ddp = make_ddp()
    handle = overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp(x).square().sum().backward()
    with pytest.raises(DoubleBackwardError):
        ddp(x).square().sum().backward()
    handle.remove()
    for mode in OverlapMode:
        ddp = make_ddp()
        before = [p.detach().clone() for p in ddp.parameters()]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = overlap_optimizer(ddp, optimizer, mode=mode)
        optimizer.__class__ = Fails
        with pytest.raises(RuntimeError, match="no step today"):
            ddp(x).square().sum().backward()
        with pytest.raises(StepError):
            handle.wait()
        seen[mode.name] = same(before, [p.detach().clone() for p in ddp.parameters()])
    return seen


@on_every_backend
def test_errors_keep_their_type_and_move_nothing(backend, world_size):
    for rank in _on(backend, world_size, _errors):
        assert all(rank.values()), rank


class WritesAll(torch.optim.SGD):
    """Writes all its parameters in every step, with an operator that raises no versions on a GPU."""

    def __init__(self, params, **options):
        self.everything = list(params)
        super().__init__(self.everything, **options)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        torch._foreach_mul_(self.everything, 0.99)


def _step_and_go_on(ddp, optimizer, x):
    """Later steps do not wait for the answer: without versions, the next pass raises."""
    optimizer.step()
    optimizer.zero_grad()
    ddp(x).square().sum().backward()


def _foreach_writes(_):
    """Writes by operators on lists of tensors, which raise no versions on a GPU."""
    x, seen = batches(1)[0].to(rank_device()), {}

    def unscale(_, optimizer):
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(torch.ones((), device=rank_device()))
        scaler.unscale_(optimizer)

    changes = {
        "clipped": lambda ddp, _: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3),
        "unscaled": unscale,
        "zeroed": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
        "decayed": lambda ddp, _: torch._foreach_mul_([one.data for one in ddp.parameters()], 0.9),
    }
    for name, change in changes.items():
        for first in (0, 2):  # the first step in which the loop does it
            ddp = make_ddp()
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=True)
            handle = overlap_optimizer(ddp, optimizer)
            for _ in range(first):
                ddp(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ddp(x).square().sum().backward()
            change(ddp, optimizer)
            with pytest.raises(RuntimeError if first else ConfigError, match=r"changed .* after the step"):
                _step_and_go_on(ddp, optimizer, x)
            handle.remove()
            seen[name, first] = True
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=True)
    overlap_optimizer(ddp, optimizer)
    for _ in range(3):  # clipping with a limit that is not reached changes nothing
        ddp(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(UnsupportedOptimizerError):
        overlap_optimizer(ddp := make_ddp(), WritesAll(ddp.parameters(), lr=0.1))
    return seen


@on_every_backend
def test_writes_without_versions_are_seen(backend, world_size):
    for rank in _on(backend, world_size, _foreach_writes):
        assert all(rank.values()), rank
