"""A peer, a hook or a step that fails: an error on every rank, never a hang, and no wrong step."""

import gc
import itertools
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from overlap_runs import Net, batches, changed, same, snapshot, step_buckets_of
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    CommunicationError,
    OptimizerHookState,
    OverlapError,
    OverlapMode,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.comm_hooks import failed_future
from dist_utils.testing import call_in_backward, patience, run_ranks, stop_process
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

GROUP_TIMEOUT = 40.0


def _end_process(how):
    if how == "exits":
        os._exit(3)
    if how == "stops":
        stop_process()


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


class RaisesOnce(torch.optim.SGD):
    """An optimizer whose step fails for the chosen parameter, on the chosen ranks."""

    victim = None

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter is self.victim for parameter in group["params"]):
                raise ValueError("no step today")
        return super().step(closure)


def _start(mode, net=Net, make=torch.optim.SGD, comm_hook=allreduce_hook, comm_state=None, **options):
    """Train two steps, so that DDP has rebuilt its buckets; each is stepped by itself."""
    step_buckets_of(1)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.002, **options)
    optimizer = make(ddp.parameters(), lr=0.1)
    ddp.in_bucket = {}

    def recorded(state, bucket):
        if bucket.index() == 0:
            ddp.in_bucket.clear()
        ddp.in_bucket[bucket.index()] = bucket.parameters()
        return comm_hook(state, bucket)

    handle = overlap_optimizer(ddp, optimizer, mode=mode, comm_hook=recorded, comm_state=comm_state)
    for x in batches(2):
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
    optimizer.zero_grad()
    handle.wait()
    return ddp, optimizer, handle


def _told_exactly(ddp, before, report):
    """Whether exactly the parameters of stepped buckets moved, except in buckets whose step failed."""
    place = {parameter: index for index, parameter in enumerate(ddp.parameters())}

    def of(buckets):
        return {place[parameter] for index in buckets for parameter in ddp.in_bucket[index]}

    moved = set(changed(ddp, before))
    return of(report.stepped) <= moved <= of(report.stepped) | of(report.partial)


def _peer_dies(rank, mode, how):
    ddp, optimizer, handle = _start(mode, net=CallingNet)
    before = snapshot(ddp)
    ddp.module.call = partial(_end_process, how) if rank == 1 else None
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        ddp(batches(1)[0]).square().sum().backward()
    seconds = time.monotonic() - start
    with pytest.raises(CommunicationError) as caught:
        handle.wait()
    with pytest.raises(CommunicationError):
        optimizer.step()
    with pytest.raises(RuntimeError):  # nothing works after that
        ddp(batches(1)[0]).square().sum().backward()
    report = caught.value.report
    return len(changed(ddp, before)), _told_exactly(ddp, before, report), report, seconds


@pytest.mark.parametrize("mode", OverlapMode)
def test_survivors_raise_within_the_timeout(mode):
    first, died, last = run_ranks(
        _peer_dies, 3, mode, "exits", may_die={1}, group_timeout=GROUP_TIMEOUT, timeout=90
    )
    assert died is None
    for moved, told, report, seconds in (first, last):
        assert report.number == 3
        assert told
        assert moved == 0 or mode is OverlapMode.BUCKET
        # Gloo may miss a connection that closes just as a wait on it starts, with plain DDP, too.
        assert seconds < GROUP_TIMEOUT + 5


@pytest.mark.parametrize(
    "mode", [OverlapMode.BUCKET, pytest.param(OverlapMode.AFTER_REDUCE, marks=pytest.mark.exhaustive)]
)
def test_a_peer_that_stops_raises_at_the_timeout(mode):
    """Like one that dies, but with open connections: only the group's timeout reveals it."""
    limit = patience(3.0)
    first, _, last = run_ranks(_peer_dies, 3, mode, "stops", may_die={1}, group_timeout=limit, timeout=90)
    for moved, told, report, seconds in (first, last):
        assert report.number == 3
        assert told
        assert (moved, report.stepped) == (0, ()) or mode is OverlapMode.BUCKET
        assert seconds < 7 * limit


def _hook_waits_in_vain(rank, limit):
    """A rank stops in its hook, and the others' hooks give up. These would tell it what they have used."""

    def hook(state, bucket):
        if not state["fails"]:
            return allreduce_hook(None, bucket)
        if rank == 1:
            stop_process()
        return failed_future(TimeoutError("rank 1 did not come"), bucket.buffer())

    step_buckets_of(1)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, find_unused_parameters=True)
    state = {"fails": False}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    for x in batches(2):
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        handle.wait()
    state["fails"] = True
    optimizer.zero_grad()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        ddp(batches(1)[0]).square().sum().backward()
    seconds = time.monotonic() - start
    assert seconds < limit


def test_what_a_hook_has_waited_for_is_not_waited_for_again():
    timeout = patience(10.0)  # it passes at the end: Gloo waits for what DDP has sent to the stopped rank
    run_ranks(_hook_waits_in_vain, 2, timeout / 2, may_die={1}, group_timeout=timeout, timeout=90)


def _hook_raises_everywhere(mode):
    def hook(state, bucket):
        if state["fails"] and bucket.index() == 1:
            raise ValueError("a bad hook")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    state = {"fails": False}
    ddp, optimizer, handle = _start(mode, comm_hook=hook, comm_state=state)
    state["fails"] = True
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="a bad hook"):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(CommunicationError, match="a bad hook") as caught:
        handle.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(CommunicationError, match="a bad hook"):
        optimizer.step()
    moved = changed(ddp, before)
    assert _told_exactly(ddp, before, caught.value.report)
    return set(moved) < set(range(len(before))) and (mode is OverlapMode.BUCKET or not moved)


def _hook_future_fails(mode):
    """The hook's future has an error, or something other than a gradient."""
    found = []
    for value in (ValueError("lost"), "text", torch.zeros(3)):

        def hook(state, bucket, value=value):
            future = torch.futures.Future()
            result = future.then(lambda done: done.value())
            if state["fails"] and isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value if state["fails"] else bucket.buffer())
            return result

        state = {"fails": False}
        ddp, _, handle = _start(mode, comm_hook=hook, comm_state=state)
        state["fails"] = True
        before = snapshot(ddp)
        with pytest.raises(RuntimeError):
            ddp(batches(1)[0]).square().sum().backward()
        with pytest.raises(CommunicationError) as caught:
            handle.wait()
        found.append(not changed(ddp, before) and caught.value.report.stepped == ())
    return all(found)


def _step_raises_everywhere(mode):
    ddp, optimizer, handle = _start(mode, make=RaisesOnce)
    before = snapshot(ddp)
    optimizer.victim = ddp.module.layers[1].weight  # in a bucket in the middle
    with pytest.raises(RuntimeError, match="no step today"):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(StepError, match="no step today") as caught:
        handle.wait()
    moved, report = changed(ddp, before), caught.value.report
    assert _told_exactly(ddp, before, report)
    if mode is OverlapMode.AFTER_REDUCE:
        return not moved and report.stepped == ()
    # Layers 3 and 2 are stepped before it, and the layers before layer 1 after it.
    return 0 < len(moved) < len(before) and 0 < len(report.stepped) < report.buckets


class FailsOnTheWay(torch.optim.SGD):
    """Its step fails after moving some parameters."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if self.fails and place == 1:
                    raise ValueError("no step today")
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def _fails_on_the_way(mode):
    """The report names buckets that were stepped in part, and optimizers that had stepped."""
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=25)
    first = torch.optim.SGD(ddp.module.conv.parameters(), lr=0.1)
    optimizer = FailsOnTheWay(ddp.module.layers.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, [first, optimizer], mode=mode)
    optimizer.fails = True
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="no step today"):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(StepError, match="parameters of bucket 0 may be stepped in part, because") as caught:
        handle.wait()
    report = caught.value.report
    expected = (0,) if mode is OverlapMode.AFTER_REDUCE else ()
    return changed(ddp, before) and (report.stepped, report.partial, report.optimizers) == (
        (),
        (0,),
        expected,
    )


def _post_hook_raises(mode):
    if mode is OverlapMode.BUCKET:
        return True  # they run in the loop's own step()
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def fails(*_):
        raise ValueError("a bad hook")

    optimizer.register_step_post_hook(fails)
    handle = overlap_optimizer(ddp, optimizer, mode=mode)
    with pytest.raises(RuntimeError, match="a bad hook"):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(StepError) as caught:
        handle.wait()
    report = caught.value.report
    return report.buckets > 0 and report.partial == tuple(range(report.buckets))


def _nothing_steps_later(mode):
    """A hook or the model raises while other buckets are being averaged: those are not stepped."""

    def hook(state, bucket):
        if state["fails"] == "hook" and bucket.index() == 2:
            raise ValueError("a bad layer")
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def average(done):
            time.sleep(0.3 if state["fails"] else 0)
            return done.value()[0] / 2

        return done.then(average)

    found = []
    for fails in ("hook", "model"):
        state = {"fails": None}
        ddp, optimizer, handle = _start(mode, net=CallingNet, comm_hook=hook, comm_state=state)
        state["fails"] = fails
        ddp.module.call = _bad_layer if fails == "model" else None
        before = snapshot(ddp)
        with pytest.raises((ValueError, RuntimeError), match="a bad layer"):
            ddp(batches(1)[0]).square().sum().backward()
        now = changed(ddp, before)
        with pytest.raises(OverlapError) as caught:
            optimizer.step()
        time.sleep(1.5)
        found.append(changed(ddp, before) == now and _told_exactly(ddp, before, caught.value.report))
        handle.remove()
    return all(found)


def _the_first_error_is_kept(mode):
    """A step fails, and later a hook; or the hook fails for one bucket, and then for the next."""
    failed = threading.Event()

    def hook(state, bucket):
        average = allreduce_hook(None, bucket)
        if state["fails"] and bucket.index() == 2:
            assert failed.wait(10) or mode is OverlapMode.AFTER_REDUCE
            state["handle"]._engine._worker.wait()  # it has recorded the error afterwards
            raise ValueError("later")
        return average

    class Fails(RaisesOnce):
        def step(self, closure=None):
            try:
                return super().step(closure)
            except ValueError:
                failed.set()
                raise

    if mode is OverlapMode.AFTER_REDUCE:
        failed.set()  # its step would come after every hook
    state = {"fails": False}
    ddp, optimizer, handle = _start(mode, make=Fails, comm_hook=hook, comm_state=state)
    optimizer.victim = ddp.in_bucket[0][0]
    state |= {"fails": True, "handle": handle}
    before = snapshot(ddp)
    with pytest.raises(RuntimeError):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(OverlapError) as caught:
        handle.wait()
    told = _told_exactly(ddp, before, caught.value.report)
    if mode is OverlapMode.AFTER_REDUCE:
        return told and "later" in str(caught.value)
    return told and isinstance(caught.value, StepError) and "no step today" in str(caught.value)


def _model_goes_on(mode):
    """Without the overlap after a hook that has raised, in the first pass or a later one."""
    found = []
    for options, failing in itertools.product(({}, {"static_graph": True}), (1, 3)):
        passes = 0

        def hook(state, bucket, failing=failing):
            nonlocal passes
            passes += bucket.index() == 0
            if passes == failing and (bucket.is_last() or failing == 1):
                raise ValueError("a bad hook")
            return allreduce_hook(state, bucket)

        runs = []
        for fails in (True, False):
            ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            if fails:
                handle = overlap_optimizer(ddp, optimizer, mode=mode, comm_hook=hook)
            for number, x in enumerate(batches(5), start=1):
                optimizer.zero_grad()
                if fails and number == failing:
                    before = ddp.state_dict()
                    before = {name: value.clone() for name, value in before.items()}
                    with pytest.raises(RuntimeError, match="a bad hook"):
                        ddp(x).square().sum().backward()
                    handle.remove()
                    ddp.load_state_dict(before)
                    optimizer.zero_grad()
                ddp(x).square().sum().backward()
                optimizer.step()
            runs.append(snapshot(ddp))
        found.append(same(*runs))
    return all(found)


def _fail_and_go(mode, make, comm_hook, options):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
    optimizer = make(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer, mode=mode, comm_hook=comm_hook)
    optimizer.victim = ddp.module.conv.weight
    with pytest.raises(RuntimeError):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(OverlapError):
        optimizer.step()
    return weakref.ref(ddp)


def _models_go(mode):
    """A kept error must not hold the frames in which it was raised, and with them the model."""

    def raises(state, bucket):
        raise ValueError("a bad hook")

    threads = threading.active_count()
    gone = []
    for options in ({}, {"find_unused_parameters": True}):
        for make, hook in ((torch.optim.SGD, raises), (RaisesOnce, allreduce_hook)):
            gone.append(_fail_and_go(mode, make, hook, options))
    deadline = time.monotonic() + patience(10.0)  # the worker's thread may still notify the peers
    while time.monotonic() < deadline:
        gc.collect()
        if all(model() is None for model in gone) and threading.active_count() <= threads:
            return True
        time.sleep(0.01)
    return False


def _everywhere(_):
    return {
        (part.__name__, mode.name): part(mode)
        for part in (
            _hook_raises_everywhere,
            _model_goes_on,
            _models_go,
            _hook_future_fails,
            _step_raises_everywhere,
            _fails_on_the_way,
            _post_hook_raises,
            _nothing_steps_later,
            _the_first_error_is_kept,
        )
        for mode in OverlapMode
    }


def test_a_failure_on_all_ranks():
    for rank in run_ranks(_everywhere, 2, timeout=90, group_timeout=GROUP_TIMEOUT):
        assert len(rank) == 18
        assert all(rank.values()), rank


def _step_raises_on_one(rank, mode, done):
    """Rank 1 fails after its gradients were averaged, but stays alive: rank 0 still learns of it."""
    ddp, optimizer, handle = _start(mode, make=RaisesOnce)
    before = snapshot(ddp)
    if rank == 1:
        optimizer.victim = ddp.module.layers[1].weight
    error = None
    try:
        ddp(batches(1)[0]).square().sum().backward()
    except RuntimeError as raised:
        error = raised
    assert (error is not None) == (rank == 1)
    if rank == 1 and not GROUPS_END_WITHOUT_GIL:
        os._exit(0)  # torch 2.6 cannot destroy a group before its process ends
    with pytest.raises(OverlapError) as caught:
        handle.wait()
    moved = changed(ddp, before)
    assert _told_exactly(ddp, before, caught.value.report)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError):
        ddp(batches(1)[0]).square().sum().backward()
    assert changed(ddp, before) == moved  # nothing more was stepped afterwards
    if rank == 0:
        Path(done).touch()
    deadline = time.monotonic() + 30
    while not Path(done).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return type(caught.value), len(moved), caught.value.report


@pytest.mark.parametrize("mode", OverlapMode)
def test_a_step_that_fails_on_one_rank_raises_on_every_rank(mode, tmp_path):
    zero, one = run_ranks(
        _step_raises_on_one,
        2,
        mode,
        str(tmp_path / "done"),
        may_die={1},
        group_timeout=GROUP_TIMEOUT,
        timeout=90,
    )
    kind, moved, report = zero
    assert kind is CommunicationError
    assert moved == 10  # it had finished its own step, and its report says so
    assert report.stepped == tuple(range(report.buckets))
    if one is not None:
        kind, moved, report = one
        assert kind is StepError
        assert moved < 10
        assert len(report.stepped) < report.buckets


def _hook_raises_on_one(rank, mode, find_unused):
    def hook(state, bucket):
        if state["fails"] and bucket.index() == 1 and rank == 1:
            raise ValueError("a bad hook")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    state = {"fails": False}
    ddp, _, handle = _start(mode, comm_hook=hook, comm_state=state, find_unused_parameters=find_unused)
    state["fails"] = True
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="a bad hook" if rank == 1 else None):
        ddp(batches(1)[0]).square().sum().backward()
    with pytest.raises(CommunicationError, match="a bad hook" if rank == 1 else None) as caught:
        handle.wait()
    return _told_exactly(ddp, before, caught.value.report) and (
        mode is OverlapMode.BUCKET or same(before, snapshot(ddp))
    )


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("mode", OverlapMode)
def test_a_hook_that_raises_on_one_rank_raises_on_every_rank(mode, find_unused):
    """The others wait for its part of the average until it exits or the group times out.

    With ``find_unused_parameters`` DDP itself communicates after the last hook, in their place.
    """
    ranks = run_ranks(_hook_raises_on_one, 2, mode, find_unused, group_timeout=patience(3.0))
    assert ranks == [True, True]


def _drop_in_raises_on_one(rank):
    def hook(state, bucket):
        if state["fails"] and bucket.index() == 1 and rank == 1:
            raise ValueError("a bad hook")
        return allreduce_hook(None, bucket)

    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, find_unused_parameters=True)
    state = {"fails": False}
    stepped = OptimizerHookState(torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp.register_comm_hook(state, hook_then_optimizer(hook, stepped))
    for x in batches(2):
        ddp(x).square().sum().backward()
        ddp.zero_grad()
    state["fails"] = True
    with pytest.raises(RuntimeError, match="a bad hook" if rank == 1 else None):
        ddp(batches(1)[0]).square().sum().backward()


def test_a_drop_in_hook_that_raises_on_one_rank_raises_on_every_rank():
    """It does not know the model, so neither whether DDP itself communicates after the last hook."""
    run_ranks(_drop_in_raises_on_one, 2, group_timeout=patience(3.0))


def _refused_on_one(rank, drop_in):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if drop_in:
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    else:
        overlap_optimizer(ddp, optimizer, comm_hook=allreduce_hook)
    for x in batches(2):
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
    if rank == 1:
        optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.zero_grad()
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match="pre-hook" if rank == 1 else None):
        ddp(batches(1)[0]).square().sum().backward()
    return same(before, snapshot(ddp))


@pytest.mark.parametrize("drop_in", [False, True])
def test_a_pass_that_is_refused_on_one_rank_raises_on_every_rank(drop_in):
    """With ``find_unused_parameters``, of which a drop-in does not know."""
    assert run_ranks(_refused_on_one, 2, drop_in, group_timeout=patience(3.0)) == [True, True]


def _average_fails_on_one(rank):
    """It fails after the ranks exchanged their gradients, so no collective of the hook tells the others."""

    def hook(state, bucket):
        fails = state["fails"] and bucket.index() == 1 and rank == 1

        def average(done):
            if fails:
                raise ValueError("a bad average")
            return done.value()[0] / 2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(average)

    found = {}
    for mode in OverlapMode:
        state = {"fails": False}
        ddp, optimizer, handle = _start(mode, comm_hook=hook, comm_state=state)
        state["fails"] = True
        before = snapshot(ddp)
        if rank == 1:
            with pytest.raises(RuntimeError, match="a bad average"):
                ddp(batches(1)[0]).square().sum().backward()
        else:
            ddp(batches(1)[0]).square().sum().backward()
        with pytest.raises(CommunicationError, match="a bad average" if rank == 1 else "") as caught:
            handle.wait(timeout=GROUP_TIMEOUT / 2)  # rank 0 is told, and does not time out
        report = caught.value.report
        exact = _told_exactly(ddp, before, report)
        found[mode.name, "told"] = (
            exact and (report.stepped == (0,) if mode is OverlapMode.BUCKET else not report.stepped)
            if rank == 1
            else exact
        )
        after = snapshot(ddp)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError):
            ddp(batches(1)[0]).square().sum().backward()
        found[mode.name, "nothing on top"] = same(after, snapshot(ddp))
        dist.barrier()  # ending the overlap would tell the others, too
        handle.remove()
    return found


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_an_average_that_fails_on_one_rank_raises_on_every_rank():
    for rank in run_ranks(_average_fails_on_one, 2, group_timeout=GROUP_TIMEOUT, timeout=60):
        assert len(rank) == 4
        assert all(rank.values()), rank
