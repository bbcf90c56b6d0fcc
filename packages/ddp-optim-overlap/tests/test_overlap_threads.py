"""Which thread steps, who waits for whom, what the report says of it, and which ranks take part."""

import gc
import itertools
import threading
import time
import types
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    PoisonedPages,
    adamw,
    as_ordinary,
    assert_ordinary,
    assert_same,
    assert_stepped,
    backward,
    batches,
    begin_overlap,
    differences,
    ends,
    make_ddp,
    on_ranks,
    one_group,
    start,
    train_on,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward, run_ranks
from dist_utils.torch_compat import default_store


class Delays(torch.optim.SGD):
    """If told to, delays one parameter until a peer has waited."""

    late = None

    def step(self, closure=None):
        if any(parameter is self.late for group in self.param_groups for parameter in group["params"]):
            default_store().wait(["waited"])
        return super().step(closure)


def check_backward_does_not_wait_for_an_average():
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
            train_on(ddp, optimizer, [x])
        return ends(ddp, optimizer)

    assert_ordinary(run)
    assert_same(in_time, [True] * 3)


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


def check_what_was_hidden():
    """The steps before the last, if the last average is slow; none, if there is only one bucket."""
    for cap in (0.002, 25):
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

        handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, steps_per_parameter=True)
        train_on(ddp, optimizer, batches(2))
        report = handle.wait()
        assert 0 <= report.seconds_hidden < report.seconds, report
        assert (report.buckets > 1) == (report.seconds_hidden > 0) == (cap < 1), report


def check_a_slow_peer():
    ddp = make_ddp()
    optimizer = Delays(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
    backward(ddp, batches(1)[0])
    handle.wait()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        optimizer.late = ddp.module.conv.weight  # in the last bucket
    backward(ddp, batches(1)[0])
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="a peer has not finished its step"):
            handle.wait(timeout=0.1)
        default_store().set("waited", "")
    assert_same(handle.wait(timeout=30).number, 2)


ASKS = {
    "wait": lambda handle, _: handle.wait(),
    "step": lambda _, optimizer: optimizer.step(),
    "remove": lambda handle, _: handle.remove(),
}


def _refusing(name, handle, optimizer, refused):
    """Return what asks inside a pass, and records the refusal."""

    def ask(*_):
        try:
            ASKS[name](handle, optimizer)
        except ConfigError as error:
            refused.append(str(error))

    return ask


@as_ordinary(*itertools.product(ASKS, ("thread", "hook"), (None, PoisonedPages)))
def check_asked_in_the_middle(name, where, memory, *, overlapped):
    """In the middle of a backward pass, from a thread or a hook: refused, and nothing is lost."""
    ddp, optimizer, handle = start(overlapped=overlapped, options={"memory": memory})
    refused = []
    ask = _refusing(name, handle, optimizer, refused)

    def ask_elsewhere(_):
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    for step, x in enumerate(batches(3)):
        if overlapped and step == 1:  # the first pass has one bucket, at its end
            weight = ddp.module.layers[1].weight
            weight.register_post_accumulate_grad_hook(ask_elsewhere if where == "thread" else ask)
        found = train_on(ddp, optimizer, [x])
    if overlapped:
        assert len(refused) == 2, refused
        assert all("backward()" in text for text in refused), refused
    return found


class CallsInside(torch.nn.Sequential):
    """Calls something in the middle of backward()."""

    call = None

    def forward(self, x):
        for number, layer in enumerate(self, start=1):
            x = layer(x)
            if number == len(self) // 2 and self.call is not None:
                x = call_in_backward(x, self.call)
        return x


class CheckpointInside(torch.nn.Module):
    """Buckets come before, in and after the nested backward pass of a checkpoint."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inner, self.after = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.after(checkpoint(self.inner, self.before(x), use_reentrant=True))


@as_ordinary(*itertools.product((None, PoisonedPages), (False, True)))
def check_a_nested_pass_between_buckets(memory, view, *, overlapped):
    ddp = DistributedDataParallel(CheckpointInside(), bucket_cap_mb=0.0005, gradient_as_bucket_view=view)
    optimizer = adamw(ddp)
    handle = begin_overlap(ddp, optimizer, memory=memory) if overlapped else None
    for seed in range(4):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
        backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        assert_stepped(handle)
    return ends(ddp, optimizer)


def check_overlapped_inside_backward():
    net = CallsInside(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.00001)
    net.call = partial(overlap_optimizer, ddp, adamw(ddp))
    with pytest.raises(ConfigError, match=r"inside backward\(\)"):
        ddp(torch.ones(2, 4)).sum().backward()


check = on_ranks(__name__, timeout=60, group_timeout=20)


def test_threads(check):
    check()


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
        return
    make = one_group(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    seen = [
        differences(
            make,
            process_group=group,
            find_unused_parameters=unused,
            skip=lambda step, unused=unused: (1,) if unused and step % 2 else (),
        )
        for unused in (False, True)
    ]
    assert_same(seen, [[], []])

    def run(kind, *, overlapped):
        ddp = make_ddp(process_group=group)
        optimizer = adamw(ddp)
        state = {"mesh": mesh, "model": ddp}.get(kind, types.SimpleNamespace(process_group=group))
        hook = hook_then_optimizer(_of, OptimizerHookState(optimizer)) if overlapped else _of
        ddp.register_comm_hook(state, hook)
        return train_on(ddp, optimizer, batches(3))

    for kind in ("mesh", "model", "process_group"):
        assert_ordinary(run, kind)


def test_a_part_of_the_ranks():
    run_ranks(_subgroup, 3, timeout=60, group_timeout=20)


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
