"""``release_gradients=True``: no gradients are left, or it is refused; other suites compare its bits, too.

Single pages are freed where that is possible. With locked memory storages are, as on accelerators.
"""

import ctypes
import mmap
from pathlib import Path

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import one_adamw, run, run_released, two_optimizers
from parity_cases import MODES
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ByValue,
    ClipPolicy,
    ConfigError,
    overlap_optimizer,
)
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import after_backward

RELEASED = {"release_gradients": True}
linux_only = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no pages are given back here")


class LooksAtTheEnd:
    """Notes at the end of each pass which parameters have no gradient, as states with residuals do."""

    def __init__(self, ddp):
        self.parameters, self.without = list(ddp.parameters()), []

    def __call__(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            after_backward(lambda: self.without.append([one.grad is None for one in self.parameters]))
        return allreduce_hook(None, bucket)


@runs.cases({"kept": ({},), "released": (RELEASED,)})
def check_a_hook_sees_at_the_end_which_parameters_were_unused(options):
    unused = [False] * 10
    ddp = runs.make_ddp(find_unused_parameters=True)
    hook, optimizer = LooksAtTheEnd(ddp), runs.sgd(ddp)
    overlap_optimizer(ddp, optimizer, comm_hook=hook, **options)
    for skipped in ((), (1,), ()):
        ddp.module.skipped = skipped
        runs.train_on(ddp, optimizer, runs.batches(1))
    runs.assert_same(hook.without, [unused, [False] * 4 + [True] * 2 + [False] * 4, unused])


class Late:
    """Completes a bucket's average after ``count`` later buckets, or after the last one."""

    def __init__(self, count):
        self.count, self.waiting = count, []
        self.__qualname__ = f"late by {count}"

    def __call__(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size())
        dist.all_reduce(buffer)
        done = torch.futures.Future()
        self.waiting.append((done, buffer))
        while self.waiting and (len(self.waiting) > self.count or bucket.is_last()):
            future, value = self.waiting.pop(0)
            future.set_result(value)
        return done.then(lambda done: done.value())


def another_tensor(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average, and leave the bucket as it was."""
    work = dist.all_reduce(bucket.buffer().clone(), async_op=True)
    return work.get_future().then(lambda total: total.value()[0] / dist.get_world_size())


@runs.cases(
    {
        "clipped": (lambda: {"clip": ByValue(0.01)},),
        "unused": (lambda: {"unused": "step"},),
        "fp16": (lambda: {"comm_hook": fp16_compress_hook},),
        "two buckets late": (lambda: {"comm_hook": Late(2)},),
        "another tensor": (lambda: {"comm_hook": another_tensor},),
    }
)
def check_as_an_overlap_that_keeps_gradients(options):
    """With paused passes between others, and a second overlap after the first."""
    words = "overlap train train remove train overlap train pause backward end train"
    kept, released = (
        run(words, one_adamw, {**options(), "release_gradients": releases}) for releases in (False, True)
    )
    runs.assert_same({**released, "gradients": kept["gradients"]}, kept)


SIZES = []
"""How many parameters every step of the following class had."""


class Counts(torch.optim.SGD):
    def step(self, closure=None):
        SIZES.append(sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


class WithEmpty(torch.nn.Sequential):
    """The first one of its parameters has no values, and so no address."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.empty = torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        return super().forward(x) + self.empty.sum()


class ByNorm(ClipPolicy):
    """Depends on all gradients of a bucket."""

    def clip(self, parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 0.02)


@runs.cases({"kept": ({}, [4]), "released": (RELEASED, [3, 1])})
def check_large_buckets_in_parts(options, sizes):
    """A part is freed before the next one is stepped, and clipping still applies to the whole bucket."""
    both = []
    for overlap in ({}, options):
        torch.manual_seed(0)
        net = WithEmpty(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)])
        ddp, _, _ = runs.start(
            lambda ddp: Counts(ddp.parameters(), lr=0.01),
            net=net,
            bucket_cap_mb=25,
            options={"clip": ByNorm(), "steps_per_parameter": True, **overlap},
        )
        SIZES.clear()
        runs.backward(ddp, torch.ones(1, 2048))  # one bucket of 48 MiB, before DDP rebuilds its buckets
        both.append(runs.snapshot(ddp))
    runs.assert_same(SIZES, sizes)
    runs.assert_same(*both)


# Storages instead of pages

OF_STORAGES = ("plain", "no_sync", "join", "tied", "schedule and resume")


@runs.cases({name: MODES[name] for name in OF_STORAGES})
def check_storages(words, options):
    with runs.locked_memory():
        runs.assert_same(*run_released(words, two_optimizers, {}, **options))


@runs.cases(
    {
        "bucket view": ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view"),
        "unused": ({"find_unused_parameters": True}, "find_unused_parameters"),
        "static": ({"static_graph": True}, "static_graph"),
    }
)
def check_storages_refuse(ddp_options, words):
    ddp = runs.make_ddp(**ddp_options)
    with runs.locked_memory(), pytest.raises(ConfigError, match=f"release_gradients.*{words}"):
        overlap_optimizer(ddp, runs.adamw(ddp), release_gradients=True)
    overlap_optimizer(ddp, runs.adamw(ddp))


def check_memory_of_storages():
    """Freed between passes, and back after remove()."""
    buffers = []

    def hook(_, bucket):
        buffers.append(bucket.buffer())
        mean = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    with runs.locked_memory():
        ddp, optimizer, handle = runs.start(options={"comm_hook": hook, **RELEASED})
        runs.train_on(ddp, optimizer, runs.batches(2))
        buffers.clear()
        runs.train_on(ddp, optimizer, runs.batches(1))
    runs.assert_same([buffer.untyped_storage().nbytes() for buffer in buffers], [0] * 5)
    handle.remove()
    assert min(buffer.untyped_storage().nbytes() - buffer.nbytes for buffer in buffers) == 0
    runs.backward(ddp, runs.batches(1)[0])


check = runs.on_ranks(__name__, timeout=180, group_timeout=60)


def test_released_gradients(check):
    check()


def _waits_for_later_buckets(_):
    ddp, optimizer, handle = runs.start(options={"comm_hook": Late(100), **RELEASED})
    runs.train_on(ddp, optimizer, runs.batches(1))  # in one bucket
    with pytest.raises(RuntimeError, match="leave release_gradients out"):
        runs.backward(ddp, runs.batches(1)[0])
    with pytest.raises(ConfigError, match="no parameter was stepped"):
        handle.wait()


def test_a_hook_that_waits_for_later_buckets_is_an_error_after_the_timeout():
    run_ranks(_waits_for_later_buckets, 2, timeout=90, group_timeout=patience(1.0))


BUCKETS, WIDTH = 12, 1024


def _resident():
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _most_resident(_, released):
    """Return the most memory in use when a bucket is handed over, above that of a model without gradients."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: freed memory goes back to the system
    seen = []

    def hook(_, bucket):
        seen.append(_resident())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)])
    options = {"comm_hook": hook, "release_gradients": released}
    ddp, optimizer, _ = runs.start(
        runs.sgd, net=net, options=options, bucket_cap_mb=4, gradient_as_bucket_view=True
    )
    before = _resident()
    runs.train_on(ddp, optimizer, [torch.ones(1, WIDTH)] * 4)
    runs.assert_same(len(seen), 1 + 3 * BUCKETS)
    return max(seen[1:]) - before


@linux_only
def test_four_buckets_are_in_memory_and_not_all():
    """Two in progress, one that fills up, and a gradient: 16 MiB, and 24 for code and threads."""
    bucket = 4 * WIDTH * WIDTH
    assert max(run_ranks(_most_resident, 2, True)) < 4 * bucket + 3 * 2**23
    assert min(run_ranks(_most_resident, 2, False)) >= BUCKETS * bucket
