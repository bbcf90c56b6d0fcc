"""The parity suite with CUDA streams: NCCL with one GPU per rank, Gloo with ranks that share GPUs.

With NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1, ranks can share GPUs under NCCL, too.
"""

import os
import time

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import require_same
from parity_cases import MODES
from test_overlap_drop_ins import THREE_STEPS, WAYS, check_bits

from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    OverlapError,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.process_groups import future_of_work
from dist_utils.testing import patience, run_ranks

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


def _parity(rank):
    skipped, failed = runs.run_checks(rank, "parity_cases")
    return skipped, failed | runs.run_checks(rank, "parity_cases", "rare_")[1]


@on_every_backend
def test_the_parity_suite(backend, world_size):
    assert len(runs.checks_in("parity_cases", "check_")) > len(MODES)
    for _, failed in _on(backend, world_size, _parity, timeout=1200):
        assert failed == {}, "\n".join(failed.values())


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


def _slow_adamw(ddp):
    return [SlowAdamW(ddp.parameters(), lr=0.01, fused=True)]


LATE = ("plain", "bucket view", "static graph", "unused", "no_sync")


def _every_late(_):
    for words, options in map(MODES.get, LATE):
        declared = {"steps_per_parameter": True}
        require_same(words, _slow_adamw, hook=lambda: (_slow_average, None), options=declared, **options)


@on_every_backend
def test_averages_and_steps_that_come_late(backend, world_size):
    _on(backend, world_size, _every_late)


def _hook_that_steps(ddp):
    state = OptimizerHookState(runs.sgd(ddp))
    ddp.register_comm_hook(None, hook_then_optimizer(_slow_average, state))


def _every_drop_in(_):
    check_bits(THREE_STEPS, {}, _hook_that_steps, runs.sgd)
    for name in ("register_fused_optim", "in backward"):
        check_bits(THREE_STEPS, {}, *WAYS[name])


@on_every_backend
def test_drop_ins(backend, world_size):
    _on(backend, world_size, _every_drop_in)


def _errors(_):
    x = runs.batches(1)[0]
    ddp = runs.make_ddp()
    handle = overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    runs.backward(ddp, x)
    with pytest.raises(DoubleBackwardError):
        runs.backward(ddp, x)
    handle.remove()
    ddp = runs.make_ddp()
    before = runs.snapshot(ddp)
    optimizer = runs.Failing(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
    optimizer.victim = ddp.module.conv.weight
    with pytest.raises(RuntimeError, match="not today"):
        runs.backward(ddp, x)
    for call in (handle.wait, optimizer.step):
        with pytest.raises(StepError):
            call()
    runs.assert_same(runs.changed(ddp, before), [])  # it has one bucket
    for options in ({"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        ddp = runs.make_ddp(**options)
        with pytest.raises(ConfigError, match="on this device"):
            overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), release_gradients=True)


@on_every_backend
def test_errors_keep_their_type_and_move_nothing(backend, world_size):
    _on(backend, world_size, _errors)


def _fails_alone(rank):
    """The other rank learns of it in its next pass at the latest, and nobody waits for the timeout."""
    x = runs.batches(1)[0]
    ddp = runs.make_ddp()
    optimizer = runs.Failing(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
    runs.train_on(ddp, optimizer, [x, x])
    optimizer.victim = ddp.module.conv.weight if rank == 1 else None
    began, failed = time.monotonic(), 0
    for _ in range(2):
        try:
            runs.train_on(ddp, optimizer, [x])
        except RuntimeError:
            failed += 1
            optimizer.zero_grad()
    assert failed, "no pass has failed"
    for call in (handle.wait, optimizer.step):
        with pytest.raises(OverlapError):
            call()
    handle.remove()
    seconds = time.monotonic() - began
    assert seconds < patience(30.0), seconds


@pytest.mark.parametrize(("backend", "world_size"), [one for one in BACKENDS if one[1] > 1])
def test_a_step_that_fails_on_one_rank_is_an_error_on_every_rank(backend, world_size):
    _on(backend, world_size, _fails_alone, timeout=120)


def _clip(ddp, _):
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)


def _unscale(_, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device=runs.rank_device()))
    scaler.unscale_(optimizer)


def _set_to_zero(_, optimizer):
    optimizer.zero_grad(set_to_none=False)


def _decay(ddp, _):
    torch._foreach_mul_([one.data for one in ddp.parameters()], 0.9)


def _step_and_go_on(ddp, optimizer, x):
    """Later steps do not wait for the answer: without versions, the next pass raises."""
    optimizer.step()
    optimizer.zero_grad()
    runs.backward(ddp, x)


def _foreach_writes(_):
    """Writes by operators on lists of tensors, which raise no versions on a GPU."""
    x = runs.batches(1)[0]
    for change in (_clip, _unscale, _set_to_zero, _decay):
        for first in (0, 2):  # the first step in which the loop does it
            ddp = runs.make_ddp()
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=True)
            handle = overlap_optimizer(ddp, optimizer)
            runs.train_on(ddp, optimizer, [x] * first)
            runs.backward(ddp, x)
            change(ddp, optimizer)
            with pytest.raises(RuntimeError, match=r"changed .* after the step"):
                _step_and_go_on(ddp, optimizer, x)
            for call in (optimizer.step, handle.wait):  # until the overlap is removed
                with pytest.raises(ConfigError, match=r"changed .* after the step"):
                    call()
            handle.remove()


@on_every_backend
def test_writes_without_versions_are_seen(backend, world_size):
    _on(backend, world_size, _foreach_writes)
