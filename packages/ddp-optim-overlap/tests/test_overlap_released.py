"""``release_gradients=True``: the same bits and no gradients left, or it is refused."""

import copy
import ctypes
import itertools
import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Failing,
    PoisonedPages,
    adamw,
    as_ordinary,
    assert_same,
    assert_stepped,
    backward,
    batches,
    begin_overlap,
    changed,
    complex_if_sent,
    ends,
    failing_hook,
    make_ddp,
    on_ranks,
    snapshot,
    start,
    train_on,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import bf16_compress_hook
from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    PerBucketNorm,
    PreviousStepNorm,
    StepError,
    overlap_optimizer,
)
from ddp_optim_overlap.bucket_memory import PageMemory, StorageMemory
from dist_utils.testing import patience, run_ranks

WAYS = (PoisonedPages, StorageMemory)
BOTH_VIEWS = [(PoisonedPages, False), (PoisonedPages, True), (StorageMemory, False)]
"""The ways, and whether gradients are views of buckets."""


def _gradients(ddp):
    return [parameter.grad for parameter in ddp.parameters()]


def _assert_none(ddp):
    assert_same(_gradients(ddp), [None] * len(_gradients(ddp)))


def check_gradients_that_are_left():
    """No gradients are left after a pass that steps; other passes keep theirs."""
    for memory, view in BOTH_VIEWS:
        ddp, optimizer, handle = start(options={"memory": memory}, gradient_as_bucket_view=view)
        for x in batches(3):
            backward(ddp, x)
            _assert_none(ddp)
            optimizer.step()
        with ddp.no_sync():
            backward(ddp, batches(1)[0])
        assert all(one is not None and bool(one.any()) for one in _gradients(ddp)), _gradients(ddp)
        optimizer.zero_grad()
        plain = make_ddp(gradient_as_bucket_view=view)
        plain.load_state_dict(ddp.state_dict())
        with handle.pause():
            backward(ddp, batches(1)[0])
        backward(plain, batches(1)[0])
        assert_same(_gradients(ddp), _gradients(plain))
        backward(ddp, batches(1)[0])
        _assert_none(ddp)


OPTIONS = {
    "by value": lambda: {"clip": ByValue(0.01)},
    "per bucket": lambda: {"clip": PerBucketNorm(0.02)},
    "previous": lambda: {"clip": PreviousStepNorm(0.02)},
    "check": lambda: {"check": True},
    "step": lambda: {"unused": "step"},
    "fp16": lambda: {"comm_hook": fp16_compress_hook},
    "bf16": lambda: {"comm_hook": bf16_compress_hook},
    "a new tensor": lambda: {"comm_hook": _new_tensor},
    "two buckets late": lambda: {"comm_hook": _Late(2)},
}


def check_as_with_gradients():
    """Paused passes between others, weight checks, hooks and clipping: the bits of an ordinary overlap."""

    def run(memory, options=dict, *, view=False, pause=False, again=False):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = adamw(ddp)
        handle = begin_overlap(ddp, optimizer, memory=memory, **options())
        data = iter(batches(8))
        for step in range(4):
            if pause:
                with handle.pause():
                    backward(ddp, next(data))
            train_on(ddp, optimizer, [next(data)])
            if again and step == 1:
                handle.remove()
                train_on(ddp, optimizer, [next(data)])
                handle = begin_overlap(ddp, optimizer, memory=memory, **options())
        handle.wait()
        return ends(ddp, optimizer)

    for name, options in OPTIONS.items():
        kept = run(None, options)
        for memory in WAYS:
            assert_same(run(memory, options), kept, f"with {name}, {memory.__name__}, the value")
    for way, (memory, view) in itertools.product(("pause", "again"), BOTH_VIEWS):
        kept, released = (run(one, view=view, **{way: True}) for one in (None, memory))
        assert_same(released, kept, f"with {way}, {memory.__name__}, {view}, the value")


def _new_tensor(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    mean = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])


class _Late:
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


class Mixed(torch.nn.Module):
    """Sparse, complex and empty parameters of two dtypes: several kinds of buckets in every pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(10, 8, sparse=True)
        self.first, self.second = torch.nn.Linear(8, 700), torch.nn.Linear(700, 4).double()
        self.turn = torch.nn.Parameter(torch.randn(700, dtype=complex_if_sent()))
        self.empty = torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        x = self.first(self.embedding(x)) * self.turn
        return self.second(x.abs().double()) + self.empty.sum()


@as_ordinary(*[(None, False), (None, True), *BOTH_VIEWS])
def check_buckets_of_all_kinds(memory, view, *, overlapped):
    ddp = DistributedDataParallel(Mixed(), bucket_cap_mb=0.01, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if overlapped:
        begin_overlap(ddp, optimizer, memory=memory)
    for step in range(4):
        ddp(torch.tensor([step, 7])).square().mean().backward()
        if overlapped and memory is not None:
            _assert_none(ddp)
        optimizer.step()
        optimizer.zero_grad()
    return ends(ddp, optimizer)


_PARTS = []
"""How many parameters every step of the following class had."""


class Counts(torch.optim.SGD):
    def step(self, closure=None):
        _PARTS.append(sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


def check_large_buckets_in_parts():
    """A part is freed before the next one is stepped, and clipping still applies to the whole bucket."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)])
    for clip in (None, PerBucketNorm(0.02)):
        runs = []
        for memory in (None, *WAYS):
            ddp = DistributedDataParallel(copy.deepcopy(net))
            optimizer = Counts(ddp.parameters(), lr=0.01)
            begin_overlap(ddp, optimizer, memory=memory, clip=clip, steps_per_parameter=True)
            _PARTS.clear()
            backward(ddp, torch.ones(1, 2048))  # one bucket of 48 MiB, before DDP rebuilds its buckets
            assert_same(_PARTS, [3] if memory is None else [2, 1])
            runs.append(snapshot(ddp))
        assert_same(runs, [runs[0]] * 3)


def check_refused_at_the_call():
    ddp = make_ddp()
    some = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"\(4, 2, 3, 3\)"):
        overlap_optimizer(ddp, some, release_gradients=True)
    overlap_optimizer(ddp, some)  # nothing of the refused one is left
    ddp = make_ddp()
    ddp.module.conv.requires_grad_(False)  # needs no step
    some = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    overlap_optimizer(ddp, some, release_gradients=True)


def check_refused_later():
    for how in ("unowned", "static graph"):
        ddp = make_ddp()
        groups = [{"params": list(part.parameters())} for part in (ddp.module.conv, ddp.module.layers)]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if how == "static graph":
            begin_overlap(ddp, optimizer, memory=StorageMemory)
            ddp._set_static_graph()
        else:
            overlap_optimizer(ddp, optimizer, release_gradients=True)
            backward(ddp, batches(1)[0])
            optimizer.step()
            del optimizer.param_groups[0]
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="release_gradients"):
            backward(ddp, batches(1)[0])
        with pytest.raises(ConfigError, match="release_gradients"):
            optimizer.step()
        assert_same(snapshot(ddp), before)


def check_too_late():
    def put_one(ddp, _):
        next(ddp.parameters()).grad = torch.ones_like(next(ddp.parameters()))

    changes = {
        "gradients were changed": put_one,
        "lr of parameter group 0": lambda _, optimizer: optimizer.param_groups[0].update(lr=1.0),
        "once more": lambda _, optimizer: optimizer.step(),
    }
    for match, change in changes.items():
        ddp = make_ddp()
        optimizer = adamw(ddp)
        overlap_optimizer(ddp, optimizer, release_gradients=True)
        backward(ddp, batches(1)[0])
        change(ddp, optimizer)
        before = snapshot(ddp)
        for _ in range(2):
            with pytest.raises(ConfigError, match=match):
                optimizer.step()
        assert_same(snapshot(ddp), before)


def check_errors():
    """Errors in the middle of a pass: handed-over buckets keep no gradients, and the model trains on."""
    for (memory, view), how in itertools.product(BOTH_VIEWS, ("step", "hook", "a layer is left out")):
        options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0005}
        ddp = make_ddp(**options)
        optimizer, state = Failing(ddp.parameters(), lr=0.1), {"at": 3}  # one is stepped by then
        hook = {"comm_hook": failing_hook, "comm_state": state}
        handle = begin_overlap(ddp, optimizer, memory=memory, steps_per_parameter=True, **hook)
        data = batches(4)
        train_on(ddp, optimizer, data[:2])
        before = snapshot(ddp)
        optimizer.victim = ddp.module.layers[1].weight if how == "step" else None
        state["fails"] = how
        if how == "a layer is left out":
            ddp.module.skipped = (0,)
            backward(ddp, data[2])
            with pytest.raises(StepError, match="find_unused"):
                handle.wait()
        else:
            with pytest.raises(RuntimeError, match="not today"):
                backward(ddp, data[2])
        moved = changed(ddp, before)
        assert 0 < len(moved) < len(before), moved
        assert_same([_gradients(ddp)[place] for place in moved], [None] * len(moved))
        if how == "a layer is left out":
            continue  # DDP itself is unusable afterwards
        handle.remove()
        optimizer.victim = state["fails"] = None
        optimizer.zero_grad()
        plain = make_ddp(**options)
        plain.register_comm_hook(state, failing_hook)
        plain.load_state_dict(ddp.state_dict())
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        assert_same(train_on(ddp, optimizer, data[2:])[0], train_on(plain, other, data[2:])[0])


check = on_ranks(__name__, timeout=300)


def test_released_gradients(check):
    check()


def _waits_for_later_buckets(_):
    ddp = make_ddp(bucket_cap_mb=0.0005)
    optimizer = adamw(ddp)
    handle = overlap_optimizer(ddp, optimizer, release_gradients=True, comm_hook=_Late(100))
    backward(ddp, batches(1)[0])  # in one bucket
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="seems to wait for later ones"):
        backward(ddp, batches(1)[0])
    optimizer.step()
    backward(ddp, batches(1)[0])  # it no longer waits
    assert assert_stepped(handle).buckets > 3
    _assert_none(ddp)


def test_a_hook_that_waits_for_later_buckets_ends_the_wait_at_the_timeout():
    limit = patience(2.0)
    run_ranks(_waits_for_later_buckets, 2, timeout=90, group_timeout=limit)


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

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=4, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer, comm_hook=hook, release_gradients=released)
    before = _resident()
    train_on(ddp, optimizer, [torch.ones(1, WIDTH)] * 4)
    assert len(seen) == 1 + 3 * BUCKETS
    return max(seen[1:]) - before


@pytest.mark.skipif(not PageMemory.works(), reason="no pages are given back here")
def test_four_buckets_are_in_memory_and_not_all():
    """Two in progress, one that fills up, and a gradient: 16 MiB, and as much for code and threads."""
    bucket = 4 * WIDTH * WIDTH
    for most in run_ranks(_most_resident, 2, True):
        assert most < 4 * bucket + 2**24
    for most in run_ranks(_most_resident, 2, False):
        assert most >= BUCKETS * bucket


class _Bucket:
    def __init__(self, buffer, views):
        self.buffer, self.views = buffer, views


def test_only_whole_pages_inside_are_freed():
    page = mmap.PAGESIZE
    memory = torch.ones(10 * page, dtype=torch.uint8)
    before = -memory.data_ptr() % page  # up to the first page that is wholly inside
    begin = before + page + 7
    part = memory[begin : begin + 3 * page]
    PageMemory().give_back_part([part])
    expected = torch.ones_like(memory)
    expected[before + 2 * page : before + 4 * page] = 0
    assert torch.equal(memory, expected)
    PageMemory().give_back_part([memory[before + 7 : before + page]])  # no whole page
    assert torch.equal(memory, expected)
    PageMemory().give_back(_Bucket(memory, []), alone=False)
    inside = memory[before : len(memory) - (memory.data_ptr() + len(memory)) % page]
    assert int(memory.count_nonzero()) == len(memory) - len(inside)
    assert not inside.any()


def test_shared_memory_is_not_freed(tmp_path):
    shared = torch.ones(5 * mmap.PAGESIZE, dtype=torch.uint8).share_memory_()
    path = tmp_path / "values"
    path.write_bytes(bytes([1]) * 5 * mmap.PAGESIZE)
    mapped = torch.from_file(str(path), shared=False, size=5 * mmap.PAGESIZE, dtype=torch.uint8)
    for memory in (shared, mapped):
        with pytest.raises(ConfigError, match="cannot be given back"):
            PageMemory().give_back_part([memory])
        assert bool(memory.all())
