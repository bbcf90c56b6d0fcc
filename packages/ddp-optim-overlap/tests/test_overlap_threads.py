"""Which thread steps, who waits for whom, what the report says of it, and which ranks take part."""

import contextlib
import gc
import itertools
import threading
import time
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    PoisonedPages,
    adamw,
    backward,
    batches,
    begin_overlap,
    both,
    differences,
    make_ddp,
    named,
    one_group,
    require_held,
    run_parts,
    same,
    snapshot,
)
from parity_cases import ADAMW
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    OverlapError,
    OverlapMode,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import default_store


class OnThread(torch.optim.SGD):
    """Records the thread that steps; if told to, delays one parameter until a key is in the store."""

    names = None
    late = None
    key = ""

    def step(self, closure=None):
        if self.names is not None:
            self.names.add(threading.current_thread().name)
        if any(parameter is self.late for group in self.param_groups for parameter in group["params"]):
            default_store().wait([self.key])
        return super().step(closure)


def _who_steps(seen):
    for mode, thread in ((OverlapMode.BUCKET, "ddp-optim-overlap"), (OverlapMode.AFTER_REDUCE, "MainThread")):
        ddp = make_ddp()
        optimizer = OnThread(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer, mode=mode)
        optimizer.names = set()  # without those of the trial
        for x in batches(2):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        seen[mode.name] = optimizer.names == {thread}


def _backward_does_not_wait_for_an_average(seen):
    """The first bucket's average does not complete before the first layer's gradients are computed."""
    in_time = []

    def run(*, overlapped):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        computed = threading.Event()
        ddp.module.conv.weight.register_hook(lambda _: computed.set())

        def hook(_, bucket):
            average = allreduce_hook(None, bucket)
            if bucket.index() > 0:
                return average
            late = torch.futures.Future()

            def finish():
                in_time.append(computed.wait(10))
                late.set_result(average.wait())

            threading.Thread(target=finish).start()
            return late.then(lambda done: done.value())

        if overlapped:
            overlap_optimizer(ddp, optimizer, comm_hook=hook)
        for x in batches(3):
            computed.clear()
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(ddp), optimizer.state_dict()

    seen["same bits"] = both(run)
    seen["in time"] = in_time == [True] * 3


class Checkpoint(torch.nn.Module):
    """A layer whose backward is a nested backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


STEPPED = threading.Event()


class Tells(torch.optim.AdamW):
    """Signals when a bucket was stepped."""

    def step(self, closure=None):
        super().step(closure)
        STEPPED.set()


def _what_was_hidden(seen):
    """The steps before the last, if the last average is slow; none, if there is only one bucket."""
    for buckets, cap in (("several", 0.002), ("one", 25)):
        ddp = make_ddp(bucket_cap_mb=cap)
        optimizer = Tells(ddp.parameters(), lr=0.01)

        def hook(_, bucket):
            if bucket.index() == 0:
                STEPPED.clear()

            averaged = allreduce_hook(None, bucket)
            if not bucket.is_last():
                return averaged
            # On a thread: if the future is complete, a callback would run before then() returns.
            later, index = torch.futures.Future(), bucket.index()

            def slow():
                assert index == 0 or STEPPED.wait(20)
                time.sleep(1.0)  # time for the checks that follow a step, also on a busy machine
                later.set_result(averaged.wait())

            threading.Thread(target=slow).start()
            return later

        handle = overlap_optimizer(ddp, optimizer, comm_hook=hook)
        for x in batches(2):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        report = handle.wait()
        if buckets == "one":
            seen[buckets] = report.buckets == 1 and report.seconds_hidden == 0 < report.seconds
        else:
            seen[buckets] = report.buckets > 1 and 0 < report.seconds_hidden < report.seconds


def _a_slow_peer(seen):
    for mode in OverlapMode:
        ddp = make_ddp()
        optimizer = OnThread(ddp.parameters(), lr=0.1)
        handle = overlap_optimizer(ddp, optimizer, mode=mode)
        backward(ddp, batches(1)[0])
        handle.wait()
        optimizer.zero_grad()
        if dist.get_rank() == 1:
            optimizer.late = ddp.module.conv.weight  # in the last bucket
            optimizer.key = f"{mode.name}: waited"
        backward(ddp, batches(1)[0])
        if dist.get_rank() == 0:
            with pytest.raises(TimeoutError, match="a peer has not finished its step"):
                handle.wait(timeout=0.1)
            default_store().set(f"{mode.name}: waited", "")
        seen[mode.name] = handle.wait(timeout=30).number == 2


def _asked_in_the_middle(seen):
    """step() in the middle of a backward pass, from a thread or a hook: refused, and nothing is lost."""
    for name, ask in (
        ("wait", lambda handle, _: handle.wait()),
        ("step", lambda _, optimizer: optimizer.step()),
        ("remove", lambda handle, _: handle.remove()),
    ):
        for where, memory in itertools.product(("thread", "hook"), (None, PoisonedPages)):
            refused = []

            def run(*, overlapped, ask=ask, where=where, memory=memory, refused=refused):
                ddp = make_ddp()
                optimizer = adamw(ddp)
                handle = begin_overlap(ddp, optimizer, memory=memory) if overlapped else None

                def asks():
                    try:
                        ask(handle, optimizer)
                    except ConfigError as error:
                        refused.append("backward()" in str(error))

                def in_the_middle(_):
                    if where == "thread":
                        other = threading.Thread(target=asks)
                        other.start()
                        other.join()
                    else:
                        asks()

                for step, x in enumerate(batches(3)):
                    if overlapped and step == 1:  # the first pass has one bucket, at its end
                        ddp.module.layers[1].weight.register_post_accumulate_grad_hook(in_the_middle)
                    backward(ddp, x)
                    optimizer.step()
                    optimizer.zero_grad()
                return snapshot(ddp), optimizer.state_dict()

            way = "released" if memory else ""
            seen[name, where, way] = both(run) and refused == [True] * 2


def _asked_between_parts(seen):
    """step() between nested parts of a pass, whose end cannot be known in advance: never silently wrong."""
    for memory in (None, PoisonedPages):
        ddp = DistributedDataParallel(
            torch.nn.Sequential(*[Checkpoint() for _ in range(4)]), bucket_cap_mb=0.0005
        )
        optimizer = adamw(ddp)
        handle = begin_overlap(ddp, optimizer, memory=memory)

        def asks(_, handle=handle):
            with contextlib.suppress(OverlapError):
                handle.wait()

        x = torch.ones(3, 16, requires_grad=True)
        backward(ddp, x)
        optimizer.zero_grad()
        ddp.module[1].inner.weight.register_post_accumulate_grad_hook(asks)
        with pytest.raises(RuntimeError, match=r"while backward\(\) ran"):
            backward(ddp, x)
        with pytest.raises(StepError, match=r"while backward\(\) ran"):
            optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        backward(ddp, x)
        seen["released" if memory else ""] = all(one.grad is not None for one in ddp.parameters())


def _check(seen):
    seen["check=True"] = not differences(ADAMW, options={"check": True})


PARTS = named(
    _who_steps,
    _backward_does_not_wait_for_an_average,
    _what_was_hidden,
    _a_slow_peer,
    _asked_in_the_middle,
    _asked_between_parts,
    _check,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=60, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_threads(ranks, name):
    require_held(ranks, name)


def _of(state, bucket):
    """Average over the group that a state of any type stands for."""
    if isinstance(state, DeviceMesh):
        return allreduce_hook(state.get_group(), bucket)
    return allreduce_hook(state.process_group, bucket)


def _subgroup(rank):
    """Two of three ranks train: nothing may wait for the third."""
    mesh = DeviceMesh("cpu", [0, 1])
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    seen = {}
    make = one_group(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    for mode in OverlapMode:
        for unused in (False, True):
            seen[mode.name, unused] = not differences(
                make,
                process_group=group,
                find_unused_parameters=unused,
                skip=lambda step, unused=unused: (1,) if unused and step % 2 else (),
                options={"mode": mode},
            )
    for kind in ("mesh", "model", "process_group"):

        def run(*, overlapped, kind=kind):
            ddp = make_ddp(process_group=group)
            optimizer = adamw(ddp)
            state = {"mesh": mesh, "model": ddp}.get(kind, types.SimpleNamespace(process_group=group))
            hook = hook_then_optimizer(_of, OptimizerHookState(optimizer)) if overlapped else _of
            ddp.register_comm_hook(state, hook)
            for x in batches(3):
                backward(ddp, x)
                optimizer.step()
                optimizer.zero_grad()
            return snapshot(ddp), optimizer.state_dict()

        seen[kind] = both(run)
    return seen


def test_a_part_of_the_ranks():
    first, second, third = run_ranks(_subgroup, 3, timeout=60, group_timeout=20)
    assert third is None
    for rank in (first, second):
        assert len(rank) == 7
        assert all(rank.values()), rank


def _many_buckets(rank):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1000)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    reference = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1000)]), bucket_cap_mb=1e-6
    )
    reference.load_state_dict(ddp.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ddp, reference)]
    handle = overlap_optimizer(ddp, optimizers[0])
    for step in range(3):
        x = torch.ones(2, 2) * (rank + step)
        for model, optimizer in zip((ddp, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    report = handle.wait()
    return report.buckets, same(snapshot(ddp), snapshot(reference))


@pytest.mark.exhaustive
def test_a_thousand_buckets():
    for buckets, equal in run_ranks(_many_buckets, 2, timeout=120):
        assert buckets >= 1000
        assert equal


def _threads(_):
    """However the overlap ends, its thread ends, too."""
    names = []
    for how in ("remove", "garbage", "error", "destroyed"):
        ddp = DistributedDataParallel(Net())
        optimizer = adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer)
        backward(ddp, batches(1)[0])
        alive = sum(thread.name == "ddp-optim-overlap" for thread in threading.enumerate())
        names.append(alive)
        gone = weakref.ref(ddp)
        if how == "remove":
            handle.remove()
        elif how == "error":
            with pytest.raises(DoubleBackwardError):
                backward(ddp, batches(1)[0])
        elif how == "destroyed":
            dist.destroy_process_group()
        del ddp, handle
        gc.collect()
        assert gone() is None
        deadline = time.monotonic() + 60
        while any(thread.name == "ddp-optim-overlap" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, how
            time.sleep(0.01)
        optimizer.step()  # an ordinary step: nothing is left of the overlap
    return names


def test_no_thread_is_left():
    for names in run_ranks(_threads, 2, timeout=90):
        assert names == [1, 1, 1, 1]
