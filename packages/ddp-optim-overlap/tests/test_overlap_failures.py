"""A peer, a hook or a step that fails: an error on every rank, never a hang, and no wrong step."""

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Failing,
    Net,
    assert_same,
    backward,
    batches,
    changed,
    failing_hook,
    on_ranks,
    snapshot,
    step_buckets_of,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    CommunicationError,
    OptimizerHookState,
    OverlapError,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward, patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

GROUP_TIMEOUT = 40.0


def _bad_layer():
    raise ValueError("a bad layer")


class CallingNet(Net):
    """Calls something in backward, after later layers' buckets were started."""

    call = None

    def forward(self, x):
        x = self.conv(x).mean(1).flatten(1)
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1 and self.call is not None:
                x = call_in_backward(x, self.call)
        return x


def _start(net=Net, make=torch.optim.SGD, comm_hook=allreduce_hook, comm_state=None, **options):
    """Train two steps, so that DDP has rebuilt its buckets; each is stepped by itself."""
    step_buckets_of(1)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.002, **options)
    optimizer = make(ddp.parameters(), lr=0.1)
    declared = {} if make is torch.optim.SGD else {"steps_per_parameter": True}
    ddp.in_bucket = {}

    def recorded(state, bucket):
        if bucket.index() == 0:
            ddp.in_bucket.clear()
        ddp.in_bucket[bucket.index()] = bucket.parameters()
        return comm_hook(state, bucket)

    handle = overlap_optimizer(ddp, optimizer, comm_hook=recorded, comm_state=comm_state, **declared)
    for x in batches(2):
        optimizer.zero_grad()
        backward(ddp, x)
    optimizer.zero_grad()
    handle.wait()
    return ddp, optimizer, handle


def _assert_told(ddp, before, report):
    """Fail unless exactly the parameters of stepped buckets moved, except in buckets whose step failed."""
    place = {parameter: index for index, parameter in enumerate(ddp.parameters())}

    def of(buckets):
        return {place[parameter] for index in buckets for parameter in ddp.in_bucket[index]}

    moved = set(changed(ddp, before))
    assert of(report.stepped) <= moved <= of(report.stepped) | of(report.partial), (moved, report)


def _peer_dies(rank):
    ddp, optimizer, handle = _start(net=CallingNet)
    before = snapshot(ddp)
    ddp.module.call = partial(os._exit, 3) if rank == 1 else None
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        backward(ddp, batches(1)[0])
    seconds = time.monotonic() - start
    with pytest.raises(CommunicationError) as caught:
        handle.wait()
    with pytest.raises(CommunicationError):
        optimizer.step()
    with pytest.raises(RuntimeError):  # nothing works after that
        backward(ddp, batches(1)[0])
    _assert_told(ddp, before, caught.value.report)
    assert_same(caught.value.report.number, 3)
    return seconds


def test_survivors_raise_within_the_timeout():
    first, died, last = run_ranks(_peer_dies, 3, may_die={1}, group_timeout=GROUP_TIMEOUT, timeout=90)
    assert died is None
    # Gloo may miss a connection that closes just as a wait on it starts, with plain DDP, too.
    assert max(first, last) < GROUP_TIMEOUT + 5


def check_hook_fails_everywhere():
    """The hook raises, gives no future, or the future has an error, or something other than a gradient."""

    def hook(state, bucket):
        future = torch.futures.Future()
        result = future.then(lambda done: done.value())
        wrong = state["wrong"] if bucket.index() == 1 else None
        if isinstance(wrong, KeyError):
            raise wrong
        if isinstance(wrong, Exception):
            future.set_exception(wrong)
        else:
            future.set_result(bucket.buffer() if wrong is None else wrong)
        return wrong if isinstance(wrong, float) else result

    for wrong, text in (
        (KeyError("a bad hook"), "a bad hook"),
        (ValueError("lost"), "lost"),
        ("text", "must hold a tensor, got str"),
        (torch.zeros(3, 3), "elements, got 9"),
        (0.5, "must return a future, got float"),
    ):
        state = {"wrong": None}
        ddp, optimizer, handle = _start(comm_hook=hook, comm_state=state)
        state["wrong"] = wrong
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match=text):
            backward(ddp, batches(1)[0])
        for call in (handle.wait, optimizer.step):
            with pytest.raises(CommunicationError, match=text) as caught:
                call()
        if isinstance(wrong, KeyError):
            assert isinstance(caught.value.__cause__, KeyError), caught.value.__cause__
        _assert_told(ddp, before, caught.value.report)
        assert len(changed(ddp, before)) < len(before)


def check_step_raises_everywhere():
    ddp, optimizer, handle = _start(make=Failing)
    before = snapshot(ddp)
    optimizer.victim = ddp.module.layers[1].weight  # in a bucket in the middle
    with pytest.raises(RuntimeError, match="not today"):
        backward(ddp, batches(1)[0])
    with pytest.raises(StepError, match="not today") as caught:
        handle.wait()
    moved, report = changed(ddp, before), caught.value.report
    _assert_told(ddp, before, report)
    # Layers 3 and 2 are stepped before it, and the layers before layer 1 after it.
    assert 0 < len(moved) < len(before), moved
    assert 0 < len(report.stepped) < report.buckets, report


class FailsOnTheWay(torch.optim.SGD):
    """Its step fails, or exits, after moving some parameters."""

    error = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if self.error is not None and place == 1:
                    raise self.error
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def check_fails_on_the_way():
    """The report names the buckets that were stepped in part; ``sys.exit()`` is an error like any other."""
    for error, text in ((ValueError("not today"), "not today"), (SystemExit(3), "SystemExit: 3")):
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=25)
        first = torch.optim.SGD(ddp.module.conv.parameters(), lr=0.1)
        optimizer = FailsOnTheWay(ddp.module.layers.parameters(), lr=0.1)
        handle = overlap_optimizer(ddp, [first, optimizer], steps_per_parameter=True)
        optimizer.error = error
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match=text):
            backward(ddp, batches(1)[0])
        with pytest.raises(StepError, match="parameters of bucket 0 may be stepped in part") as caught:
            handle.wait()
        assert changed(ddp, before)
        assert_same((caught.value.report.stepped, caught.value.report.partial), ((), (0,)))


def check_nothing_steps_later():
    """A hook or the model raises while other buckets are being averaged: those are not stepped."""

    def hook(state, bucket):
        if state["fails"] == "hook" and bucket.index() == 2:
            raise ValueError("a bad layer")
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def average(done):
            time.sleep(0.3 if state["fails"] else 0)
            return done.value()[0] / 2

        return done.then(average)

    for fails in ("hook", "model"):
        state = {"fails": None}
        ddp, optimizer, handle = _start(net=CallingNet, comm_hook=hook, comm_state=state)
        state["fails"] = fails
        ddp.module.call = _bad_layer if fails == "model" else None
        before = snapshot(ddp)
        with pytest.raises((ValueError, RuntimeError), match="a bad layer"):
            backward(ddp, batches(1)[0])
        now = changed(ddp, before)
        with pytest.raises(OverlapError) as caught:
            optimizer.step()
        time.sleep(1.5)
        assert_same(changed(ddp, before), now)
        _assert_told(ddp, before, caught.value.report)
        handle.remove()


check = on_ranks(__name__, timeout=90, group_timeout=GROUP_TIMEOUT)


def test_a_failure_on_all_ranks(check):
    check()


def _fails_late_on_one(rank, how, done):
    """Rank 1 fails after the ranks exchanged their gradients, but stays alive: rank 0 still learns of it."""
    state = {}
    ddp, optimizer, handle = _start(make=Failing, comm_hook=failing_hook, comm_state=state)
    before = snapshot(ddp)
    if rank == 1:
        optimizer.victim = ddp.module.layers[1].weight if how == "step" else None
        state["fails"] = how
    with pytest.raises(RuntimeError, match="not today") if rank == 1 else contextlib.nullcontext():
        backward(ddp, batches(1)[0])
    if rank == 1 and not GROUPS_END_WITHOUT_GIL:
        os._exit(0)  # torch 2.6 cannot destroy a group before its process ends
    with pytest.raises(OverlapError, match="not today" if rank == 1 else "") as caught:
        handle.wait(timeout=GROUP_TIMEOUT / 2)  # rank 0 is told, and does not time out
    moved = changed(ddp, before)
    _assert_told(ddp, before, caught.value.report)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError):
        backward(ddp, batches(1)[0])
    assert_same(changed(ddp, before), moved)  # nothing more was stepped afterwards
    if rank == 0:
        Path(done).touch()
    deadline = time.monotonic() + 30
    while not Path(done).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return type(caught.value), len(moved), caught.value.report


@pytest.mark.parametrize(("how", "kind"), [("step", StepError), ("average", CommunicationError)])
def test_what_fails_late_on_one_rank_raises_on_every_rank(how, kind, tmp_path):
    options = {"may_die": {1}, "group_timeout": GROUP_TIMEOUT, "timeout": 90}
    zero, one = run_ranks(_fails_late_on_one, 2, how, str(tmp_path / "done"), **options)
    found, moved, report = zero
    assert found is CommunicationError
    if how == "step":
        assert moved == 10  # it had finished its own step, and its report says so
        assert report.stepped == tuple(range(report.buckets))
    if one is not None:
        found, moved, report = one
        assert found is kind
        assert moved < 10
        assert report.stepped == (0,) or (how == "step" and len(report.stepped) < report.buckets)


def _fails_on_one(rank, how, find_unused, drop_in):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state, handle = {}, None
    if drop_in:
        ddp.register_comm_hook(state, hook_then_optimizer(failing_hook, OptimizerHookState(optimizer)))
    else:
        handle = overlap_optimizer(ddp, optimizer, comm_hook=failing_hook, comm_state=state)
    for x in batches(2):
        backward(ddp, x)
        optimizer.zero_grad()
    if how == "hook" and rank == 1:
        state["fails"] = "hook"
    elif rank == 1:
        optimizer.register_step_pre_hook(lambda *_: None)
    before = snapshot(ddp)
    text = {"hook": "not today", "refused": "pre-hook"}[how] if rank == 1 else ""
    with pytest.raises(RuntimeError, match=text):
        backward(ddp, batches(1)[0])
    if handle is not None:
        with pytest.raises(OverlapError, match=text):
            handle.wait()
    if how == "refused":
        assert_same(snapshot(ddp), before)


@pytest.mark.parametrize("how", ["hook", "refused"])
@pytest.mark.parametrize(("find_unused", "drop_in"), [(False, False), (True, False), (True, True)])
def test_what_raises_on_one_rank_raises_on_every_rank(how, find_unused, drop_in):
    """The others wait for its part of the average until it exits or the group times out.

    With ``find_unused_parameters`` DDP itself communicates after the last hook, in their place, of which a
    drop-in does not know.
    """
    run_ranks(_fails_on_one, 2, how, find_unused, drop_in, group_timeout=patience(3.0))
