"""``release_gradients=True``: the same bits and no gradients left, or it is refused."""

import ctypes
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    PoisonedPages,
    adamw,
    backward,
    batches,
    begin_overlap,
    both,
    changed,
    complex_if_sent,
    differences,
    make_ddp,
    named,
    one_group,
    require_held,
    run_parts,
    same,
    snapshot,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import bf16_compress_hook
from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    GlobalNorm,
    OverlapMode,
    PerBucketNorm,
    PreviousStepNorm,
    StepError,
    overlap_optimizer,
    released_pass,
)
from ddp_optim_overlap.bucket_memory import PageMemory, StorageMemory
from ddp_optim_overlap.gradient_release import require_readable
from ddp_optim_overlap.optimizers import OverlappedOptimizers
from dist_utils.testing import patience, run_ranks

ADAMW = one_group(torch.optim.AdamW, {"lr": 0.01})
WAYS = (PoisonedPages, StorageMemory)


def _gradients(ddp):
    return [parameter.grad for parameter in ddp.parameters()]


def _no_gradients(ddp):
    return _gradients(ddp) == [None] * len(_gradients(ddp))


def _gradients_that_are_left(seen):
    """No gradients are left after a pass that steps; other passes keep theirs."""
    for memory in WAYS:
        for view in (False, True)[: 1 if memory is StorageMemory else 2]:
            ddp = make_ddp(gradient_as_bucket_view=view)
            optimizer = adamw(ddp)
            handle = begin_overlap(ddp, optimizer, memory=memory)
            case = memory.__name__, view
            for number, x in enumerate(batches(3)):
                backward(ddp, x)
                seen[case, "stepped", number] = _no_gradients(ddp)
                optimizer.step()
            with ddp.no_sync():
                backward(ddp, batches(1)[0])
            seen[case, "no_sync"] = all(one is not None and bool(one.any()) for one in _gradients(ddp))
            optimizer.zero_grad()
            plain = make_ddp(gradient_as_bucket_view=view)
            plain.load_state_dict(ddp.state_dict())
            with handle.pause():
                backward(ddp, batches(1)[0])
            backward(plain, batches(1)[0])
            seen[case, "pause"] = same(_gradients(ddp), _gradients(plain))
            backward(ddp, batches(1)[0])
            seen[case, "accumulated"] = _no_gradients(ddp)


def _as_with_gradients(seen):
    """Paused passes between others, weight checks, hooks and clipping: the bits of an ordinary overlap."""

    def run(memory, options, *, view=False, pause=False, again=False):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = adamw(ddp)
        handle = begin_overlap(ddp, optimizer, memory=memory, **options())
        data = iter(batches(8))
        for step in range(4):
            if pause:
                with handle.pause():
                    backward(ddp, next(data))
            backward(ddp, next(data))
            optimizer.step()
            optimizer.zero_grad()
            if again and step == 1:
                handle.remove()
                backward(ddp, next(data))
                optimizer.step()
                optimizer.zero_grad()
                handle = begin_overlap(ddp, optimizer, memory=memory, **options())
        handle.wait()
        return snapshot(ddp), optimizer.state_dict()

    cases = {
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
    for name, options in cases.items():
        kept = run(None, options)
        for memory in WAYS:
            seen[name, memory.__name__] = same(kept, run(memory, options))
    for ways in ({"pause": True}, {"again": True}):
        for view in (False, True):
            kept = run(None, dict, view=view, **ways)
            for memory in WAYS[: 1 if view else 2]:
                seen[str(ways), view, memory.__name__] = same(kept, run(memory, dict, view=view, **ways))


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


def _buckets_of_all_kinds(seen):
    for memory in (None, *WAYS):
        for view in (False, True)[: 1 if memory is StorageMemory else 2]:

            def run(*, overlapped, memory=memory, view=view):
                ddp = DistributedDataParallel(Mixed(), bucket_cap_mb=0.01, gradient_as_bucket_view=view)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
                if overlapped:
                    begin_overlap(ddp, optimizer, memory=memory)
                left = []
                for step in range(4):
                    ddp(torch.tensor([step, 7])).square().mean().backward()
                    left += [one for one in _gradients(ddp) if one is not None]
                    optimizer.step()
                    optimizer.zero_grad()
                assert not overlapped or memory is None or not left
                return snapshot(ddp), optimizer.state_dict()

            seen[getattr(memory, "__name__", ""), view] = both(run)


def _counting(step, parts):
    def counted(calls, parameters):
        parts.append(len(parameters))
        step(calls, parameters)

    return counted


def _large_buckets_in_parts(seen):
    """A part is freed before the next one is stepped, and clipping still applies to the whole bucket."""
    whole, released_pass._PART_BYTES = released_pass._PART_BYTES, 600
    try:
        for name, clip in {"": None, "per bucket": PerBucketNorm(0.02)}.items():
            runs = []
            for memory in (None, *WAYS):
                ddp = make_ddp(bucket_cap_mb=25)
                optimizer = adamw(ddp)
                parts = []
                begin_overlap(ddp, optimizer, memory=memory, clip=clip)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(OverlappedOptimizers, "step", _counting(OverlappedOptimizers.step, parts))
                    for x in batches(3):
                        backward(ddp, x)
                        optimizer.step()
                        optimizer.zero_grad()
                runs.append((snapshot(ddp), optimizer.state_dict()))
                seen[name, str(memory)] = sum(parts) == 30 and (max(parts) < 10) is (memory is not None)
            seen[name, "same bits"] = same(runs[0], runs[1]) and same(runs[0], runs[2])
    finally:
        released_pass._PART_BYTES = whole


def _refused_at_the_call(seen):
    def refuses(match, ddp, optimizer, **options):
        with pytest.raises(ConfigError, match=match):
            overlap_optimizer(ddp, optimizer, release_gradients=True, **options)
        overlap_optimizer(ddp, optimizer)  # nothing of the refused one is left
        return True

    after = {"mode": OverlapMode.AFTER_REDUCE}
    scaler = torch.amp.GradScaler("cpu")
    for name, options in {
        "after": after,
        "norm": {**after, "clip": GlobalNorm(1.0)},
        "scaler": {**after, "scaler": scaler},
    }.items():
        ddp = make_ddp()
        seen[name] = refuses("BUCKET", ddp, adamw(ddp), **options)
    ddp = make_ddp()
    some = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    seen["a parameter without an optimizer"] = refuses(r"\(4, 2, 3, 3\)", ddp, some)
    ddp = make_ddp()
    ddp.module.conv.requires_grad_(False)
    some = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    overlap_optimizer(ddp, some, release_gradients=True)
    seen["a frozen one"] = True
    require_readable(PageMemory(), may_leave_out=True, as_view=True)
    for options in ({"may_leave_out": True}, {"may_leave_out": False, "as_view": True}):
        with pytest.raises(ConfigError, match="on this device"):
            require_readable(StorageMemory(), **options)
    seen["StorageMemory"] = True


def _refused_later(seen):
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
        seen[how] = same(before, snapshot(ddp))


def _too_late(seen):
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
        seen[match] = same(before, snapshot(ddp))


class FailsLate(torch.optim.SGD):
    """Its step fails for one parameter."""

    victim = None

    def step(self, closure=None):
        if any(one is self.victim for group in self.param_groups for one in group["params"]):
            raise ValueError("no step today")
        return super().step(closure)


def _failing_hook(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if state["fails"] and bucket.index() == 3:  # one bucket has been stepped by then
        raise ValueError("a bad hook")
    return _new_tensor(None, bucket)


def _left(ddp, places):
    return [one is not None for place, one in enumerate(_gradients(ddp)) if place in places]


def _errors(seen):
    """Errors in the middle of a pass: handed-over buckets keep no gradients, and the model trains on."""
    for memory in WAYS:
        for view in (False, True)[: 1 if memory is StorageMemory else 2]:
            for how in ("step", "hook", "a layer is left out"):
                case = memory.__name__, view, how
                ddp = make_ddp(gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
                optimizer, state = FailsLate(ddp.parameters(), lr=0.1), {"fails": False}
                handle = begin_overlap(
                    ddp, optimizer, memory=memory, comm_hook=_failing_hook, comm_state=state
                )
                first, second, third, fourth = batches(4)
                for x in (first, second):
                    backward(ddp, x)
                    optimizer.step()
                before = snapshot(ddp)
                optimizer.victim = ddp.module.layers[1].weight if how == "step" else None
                state["fails"] = how == "hook"
                if how == "a layer is left out":
                    ddp.module.skipped = (0,)
                    backward(ddp, third)
                    with pytest.raises(StepError, match="find_unused"):
                        handle.wait()
                    moved = changed(ddp, before)
                    seen[case] = 0 < len(moved) < len(before) and not any(_left(ddp, moved))
                    continue  # DDP itself is unusable afterwards
                with pytest.raises(RuntimeError, match=r"no step today|a bad hook"):
                    backward(ddp, third)
                moved = changed(ddp, before)
                handle.remove()
                seen[case, "some moved"] = 0 < len(moved) < len(before)
                seen[case, "stepped ones have none"] = not any(_left(ddp, moved))
                optimizer.victim, state["fails"] = None, False
                optimizer.zero_grad()
                plain = make_ddp(gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
                plain.register_comm_hook(state, _failing_hook)
                plain.load_state_dict(ddp.state_dict())
                other = torch.optim.SGD(plain.parameters(), lr=0.1)
                for x in (third, fourth):
                    for model, one in ((ddp, optimizer), (plain, other)):
                        backward(model, x)
                        one.step()
                        one.zero_grad()
                seen[case, "trains on"] = same(snapshot(ddp), snapshot(plain))


def _few_are_in_progress(seen):
    """Slow averages hold backward() up: it is never three buckets ahead."""
    ahead = []

    def slow(state, bucket):
        current = state["handle"]._engine._passes.running
        ahead.append(bucket.index() - len(current.stepped))
        average = torch.futures.Future()
        buffer = bucket.buffer()
        threading.Timer(0.05, average.set_result, [buffer]).start()
        return average.then(lambda done: done.value())

    for memory in (None, PageMemory):
        ahead.clear()
        state = {}
        ddp = make_ddp(bucket_cap_mb=0.0005)
        optimizer = adamw(ddp)
        state["handle"] = begin_overlap(ddp, optimizer, memory=memory, comm_hook=slow, comm_state=state)
        for x in batches(3):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        seen["kept" if memory is None else "released"] = (max(ahead) > 2) is (memory is None)


def _memory_of_old_buckets(seen):
    """DDP rebuilds its buckets after the first pass: the first ones are not kept, nor allocated again."""
    ddp = make_ddp()
    old = []

    def hook(state, bucket):
        old.append(weakref.ref(bucket.buffer()))
        return _new_tensor(None, bucket)

    optimizer = adamw(ddp)
    handle = begin_overlap(ddp, optimizer, memory=StorageMemory, comm_hook=hook)
    for x in batches(3):
        backward(ddp, x)
        optimizer.step()
    alive = [one() for one in old if one() is not None]
    seen["given back"] = all(one.untyped_storage().nbytes() == 0 for one in alive) and bool(alive)
    seen["the first is gone"] = old[0]() is None
    handle.remove()
    seen["all there again"] = all(one.untyped_storage().nbytes() >= one.nbytes for one in alive)


PARTS = named(
    _gradients_that_are_left,
    _as_with_gradients,
    _buckets_of_all_kinds,
    _large_buckets_in_parts,
    _refused_at_the_call,
    _refused_later,
    _too_late,
    _errors,
    _few_are_in_progress,
    _memory_of_old_buckets,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=300)


@pytest.mark.parametrize("name", PARTS)
def test_released_gradients(ranks, name):
    require_held(ranks, name)


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
    report = handle.wait()
    return _no_gradients(ddp) and report.stepped == tuple(range(report.buckets)) and report.buckets > 3


def test_a_hook_that_waits_for_later_buckets_ends_the_wait_at_the_timeout():
    limit = patience(2.0)
    assert run_ranks(_waits_for_later_buckets, 2, timeout=90, group_timeout=limit) == [True, True]


def _three(_):
    return [
        differences(ADAMW, released=WAYS),
        differences(ADAMW, released=WAYS[:1], gradient_as_bucket_view=True, accumulate=2),
    ]


def test_three_ranks():
    assert run_ranks(_three, 3, timeout=120) == [[[], []]] * 3


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
    for _ in range(4):
        backward(ddp, torch.ones(1, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
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
