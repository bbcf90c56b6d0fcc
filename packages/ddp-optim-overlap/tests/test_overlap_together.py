"""Small buckets that wait for each other, and are stepped together."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import assert_stepped, failing_hook, step_buckets_of
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import CommunicationError, PerBucketNorm, StepError, overlap_optimizer
from dist_utils.testing import run_ranks

LAYERS = 6

_seen = {"sizes": [], "fails": False, "limited": [], "waits": []}
"""What a rank's optimizer has recorded, and is told to do."""


class Counts(torch.optim.SGD):
    """Records how many parameters every step has; fails if told to."""

    def step(self, closure=None):
        _seen["sizes"].append(sum(len(group["params"]) for group in self.param_groups))
        while _seen["waits"]:
            _seen["waits"].pop()()
        if _seen["fails"]:
            raise ValueError("no step today")
        return super().step(closure)


class Noted(PerBucketNorm):
    """Records how many parameters' gradients it clips."""

    def clip(self, parameters):
        _seen["limited"].append(len(parameters))
        super().clip(parameters)


def _start(size, comm_hook=None, comm_state=None, *, width=20, layers=LAYERS, **options):
    """Train until DDP has its final buckets, one per layer."""
    step_buckets_of(size)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=width * (width + 1) * 4 / 2**20)
    optimizer = Counts(ddp.parameters(), lr=0.1)
    options |= {"comm_hook": comm_hook, "comm_state": comm_state, "steps_per_parameter": True}
    handle = overlap_optimizer(ddp, optimizer, **options)
    for seed in range(3):
        _pass(ddp, optimizer, seed)
    _seen["sizes"].clear()
    return ddp, optimizer, handle


def _pass(ddp, optimizer, seed=5):
    optimizer.zero_grad()
    width = ddp.module[0].in_features
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed + 100 * dist.get_rank()))
    ddp(x).square().mean().backward()


BUCKET = 20 * 21 * 4
"""Bytes."""


def _sizes(_):
    found = {}
    for size in (1, 2 * BUCKET, 1000 * BUCKET):
        ddp, optimizer, handle = _start(size)
        _pass(ddp, optimizer)
        assert len(assert_stepped(handle).stepped) == LAYERS
        found[size // BUCKET] = _seen["sizes"][:]
    ddp, optimizer, handle = _start(1000 * BUCKET, clip=Noted(1e-3))
    _seen["limited"].clear()
    _pass(ddp, optimizer)
    handle.wait()
    found["limited"] = _seen["limited"]
    return found


def test_small_buckets_are_stepped_together_and_the_last_one_alone():
    for found in run_ranks(_sizes, 2):
        # Ready buckets may be stepped together with waiting ones, or one by one; never the last one.
        assert sum(found[0]) == sum(found[2]) == sum(found[1000]) == 2 * LAYERS
        assert found[0] == [2] * LAYERS
        assert found[2][-1] in (2, 4)
        assert max(found[2]) == 4
        assert found[1000] in ([2 * LAYERS - 2, 2], [2 * LAYERS])
        assert found["limited"] == [2] * LAYERS, "every bucket has a norm of its own"


def _late(state, bucket):
    """Hold back the averages of all buckets but the first until something is stepped."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done = torch.futures.Future()
    if state["late"] and bucket.index():
        _seen["waits"].append(partial(done.set_result, bucket.buffer()))
    else:
        done.set_result(bucket.buffer())
    return done


def _a_late_average(_):
    state = {"late": False}
    ddp, optimizer, handle = _start(2**40, _late, state, width=600)
    state["late"] = True
    _pass(ddp, optimizer)
    return len(assert_stepped(handle).stepped), _seen["sizes"][0]


def test_what_is_averaged_is_stepped_while_the_next_average_is_awaited():
    assert run_ranks(_a_late_average, 2, timeout=30) == [(LAYERS, 2)] * 2


def _a_step_fails(_):
    ddp, optimizer, handle = _start(1000 * BUCKET)
    _seen["fails"] = True
    with pytest.raises(RuntimeError, match=r"the step of bucket 0, 1, 2, 3, 4.* failed: ValueError"):
        _pass(ddp, optimizer)
    with pytest.raises(StepError) as caught:
        handle.wait()
    report = caught.value.report
    assert report.stepped == (), report
    assert report.partial in (tuple(range(LAYERS - 1)), tuple(range(LAYERS))), report


def _a_hook_fails(_):
    """A hook fails while earlier buckets still wait for others; DDP waits for all of them."""

    def hook(state, bucket):
        time.sleep(0.2 if bucket.index() == state.get("at") else 0)  # so that others begin to be stepped
        return failing_hook(state, bucket)

    for size in (1000 * BUCKET, 2 * BUCKET):  # all earlier ones wait, or some have been stepped
        state = {}
        ddp, optimizer, handle = _start(size, hook, state)
        state |= {"fails": "hook", "at": 3}
        with pytest.raises(RuntimeError, match="not today"):
            _pass(ddp, optimizer)
        with pytest.raises(CommunicationError, match="not today") as caught:
            handle.wait()
        handle.remove()
        stepped = caught.value.report.stepped
        assert stepped == () or size < 1000 * BUCKET, stepped
        handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
        _pass(ddp, optimizer)
        assert len(assert_stepped(handle).stepped) == LAYERS


def test_an_error_reaches_the_buckets_that_wait_for_others():
    run_ranks(_a_step_fails, 2)
    run_ranks(_a_hook_fails, 2, group_timeout=60)
