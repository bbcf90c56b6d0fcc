"""A hook or a step that fails: an error on every rank, never a hang, and no wrong step.

A peer that dies or hangs is in integration_tests/test_peers.py.
"""

import contextlib
import copy
import gc
import os
import threading
import time
import weakref
from functools import partial

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ClipPolicy,
    CommunicationError,
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    OverlapError,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward, patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL, default_store

GROUP_TIMEOUT = 40.0


def momentum(ddp, kind=torch.optim.SGD):
    return kind(ddp.parameters(), lr=0.1, momentum=0.9)


class Refuses(ClipPolicy):
    """Clips nothing, and fails for a chosen parameter, perhaps late."""

    victim, seconds = None, 0.0

    def clip(self, parameters):
        if any(one is self.victim for one in parameters):
            time.sleep(self.seconds)
            raise ValueError("not today")


class CallingNet(runs.Net):
    """Calls something in backward, after later layers' buckets were started."""

    call = None

    def forward(self, x):
        x = self.conv(x).mean(1).flatten(1)
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1 and self.call is not None:
                x = call_in_backward(x, self.call)
        return x


class Job:
    """A model after two steps: DDP has rebuilt its buckets.

    Attributes:
        fails: How its hook fails from now on, in the second bucket.
        policy: Clips nothing.
        cause: That of the error that its pass has raised.
    """

    def __init__(self, net=runs.Net, kind=runs.Failing, *, released=False, **ddp_options):
        self.fails, self._in_bucket, self._averages = None, {}, []
        self.policy = Refuses()
        options = {"comm_hook": self._hook, "steps_per_parameter": True, "release_gradients": released}
        options["clip"] = self.policy
        self.ddp, self.optimizer, self.handle = runs.start(
            lambda ddp: momentum(ddp, kind), net=net(), options=options, **ddp_options
        )
        runs.train_on(self.ddp, self.optimizer, runs.batches(2))
        self.handle.wait()
        self.before = runs.snapshot(self.ddp)

    def _hook(self, _, bucket):
        self._in_bucket[bucket.index()] = bucket.parameters()
        return self._fail(bucket) if self.fails and bucket.index() == 1 else allreduce_hook(None, bucket)

    def _fail(self, bucket):
        if self.fails == "raises":
            raise KeyError("not today")
        if self.fails == "no future":
            return 0.5
        without_values = torch.empty_like(bucket.buffer(), device="meta")
        wrong = {"no tensor": "text", "another size": torch.zeros(3, 3), "no values": without_values}
        wrong = wrong.get(self.fails)
        future = torch.futures.Future()
        if wrong is not None:
            future.set_result(wrong)
        else:  # when all ranks have averaged: they fail late
            average = allreduce_hook(None, bucket)
            threading.Thread(target=partial(_fail_after, average, future)).start()
        return future.then(lambda done: done.value())

    def moved(self):
        return runs.changed(self.ddp, self.before)

    def require_raised(self, kind, words, error=None):
        """Fail unless the next pass and later calls raise with the type, and a true report; return that."""
        with pytest.raises(error or kind, match=words if error is None else "") as raised:
            runs.backward(self.ddp, runs.batches(1)[0])
        self.cause = raised.value.__cause__
        for call in (self.handle.wait, self.optimizer.step):
            with pytest.raises(kind, match=words) as caught:
                call()
        report, place = caught.value.report, {one: at for at, one in enumerate(self.ddp.parameters())}

        def of(buckets):
            return {place[one] for index in buckets for one in self._in_bucket[index]}

        moved = set(self.moved())
        assert of(report.stepped) <= moved <= of(report.stepped) | of(report.partial), (moved, report)
        return report


def _fail_after(average, future):
    average.wait()
    future.set_exception(ValueError("not today"))


@runs.cases(
    {
        "raises": ("raises", CommunicationError, "not today"),
        "future": ("future", CommunicationError, "not today"),
        "no tensor": ("no tensor", ConfigError, "must hold a tensor, got str"),
        "another size": ("another size", ConfigError, "elements, got 9"),
        "no values": ("no values", ConfigError, "its bucket can take"),
        "no future": ("no future", ConfigError, "must return a future, got float"),
    }
)
def check_hook_fails(how, kind, words):
    job = Job()
    job.fails = how
    report = job.require_raised(kind, words)
    assert set(report.stepped) <= {0}, report


@runs.cases({"raises": (ValueError("not today"),), "exits": (SystemExit(3),)})
def check_step_fails(error):
    """In a bucket in the middle; a bucket whose step failed may be stepped in part."""
    job = Job(released=True)  # each bucket is stepped by itself
    job.optimizer.victim, job.optimizer.error = job.ddp.module.layers[1].weight, error
    words = f"{type(error).__name__}: {error}.*parameters of bucket 2 may be stepped in part"
    report = job.require_raised(StepError, words, SystemExit if isinstance(error, SystemExit) else StepError)
    assert isinstance(job.cause, ValueError) == isinstance(error, ValueError)
    # Layers 3 and 2 are stepped before it, and the layers before layer 1 after it.
    runs.assert_same((report.stepped, report.partial, job.moved()), ((0, 1), (2,), [6, 7, 8, 9]))


def check_nothing_steps_after_an_error_of_the_model():
    """While buckets are being averaged: those are not stepped."""
    averages = []

    def hook(state, bucket):
        average = allreduce_hook(None, bucket)
        if not state:
            return average
        late = torch.futures.Future()
        averages.append(late)
        threading.Timer(0.2, lambda: late.set_result(average.wait())).start()
        return late.then(lambda done: done.value())

    def bad_layer():
        raise ValueError("a bad layer")

    state = {}
    ddp, optimizer, _ = runs.start(
        runs.sgd, net=CallingNet(), options={"comm_hook": hook, "comm_state": state}
    )
    runs.train_on(ddp, optimizer, runs.batches(2))
    state["late"], ddp.module.call, before = True, bad_layer, runs.snapshot(ddp)
    with pytest.raises(ValueError, match="a bad layer"):
        runs.backward(ddp, runs.batches(1)[0])
    with pytest.raises(StepError, match="no parameter was stepped"):
        optimizer.step()
    for average in averages:
        average.wait()
    time.sleep(0.2)  # for a step that must not come
    assert averages
    runs.assert_same(runs.changed(ddp, before), [])


# What makes a pass fail on all ranks, and how to undo that


def _victim(job):
    job.optimizer.victim = job.ddp.module.layers[1].weight


def _policy(job):
    job.policy.victim = job.ddp.module.layers[1].weight


def _pre_hook(job):
    job.undo = job.optimizer.register_step_pre_hook(lambda *_: None).remove


def _fails(job):
    job.fails = "raises"


def _late_change(job):
    group = job.optimizer.param_groups[0]
    runs.backward(job.ddp, runs.batches(1)[0])
    group["lr"], job.undo = 0.2, partial(group.update, lr=0.1)
    with pytest.raises(ConfigError, match="lr of parameter group 0"):
        job.optimizer.step()
    job.optimizer.zero_grad()


BROKEN = (
    (_victim, "not today"),
    (_policy, "ValueError.*not today"),
    (_pre_hook, "pre-hook"),
    (_fails, "not today"),
    (_late_change, "lr of"),
)


@runs.cases(
    {
        f"{how.__name__.strip('_')}, {'overlapped again' if again else 'ordinary'}": (how, words, again)
        for how, words in BROKEN
        for again in (False, True)
    }
)
def check_an_error_stays_until_remove(how, words, again):
    """backward(), step() and wait() raise it; afterwards the ordinary loop and a new overlap are right.

    No step uses the gradients of a failed pass again, of which some buckets may be stepped, or all.
    """
    job = Job()
    ddp, optimizer, job.undo = job.ddp, job.optimizer, lambda: None
    how(job)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=words):
            runs.backward(ddp, runs.batches(1)[0])
        after = runs.snapshot(ddp)
        for call in (optimizer.step, job.handle.wait, partial(runs.Failing.step, optimizer)):
            with pytest.raises(OverlapError, match=words):
                call()
        optimizer.zero_grad()
    job.undo()
    optimizer.victim = job.policy.victim = job.fails = None
    job.handle.remove()
    optimizer.step()
    runs.assert_same(runs.changed(ddp, after), [])
    with ddp.no_sync():
        runs.backward(ddp, runs.batches(1)[0])
    job.handle.remove()  # once more, which takes no later gradients away
    runs.assert_same([one is None for one in runs.gradients(ddp)], [False] * len(after))
    optimizer.zero_grad()
    ordinary = runs.make_ddp()
    ordinary.module.load_state_dict(ddp.module.state_dict())
    theirs = momentum(ordinary)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if again:
        handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
    for x in runs.batches(4):
        runs.assert_same(runs.train_on(ddp, optimizer, [x]), runs.train_on(ordinary, theirs, [x]))
    if again:
        runs.assert_same(runs.assert_stepped(handle).number, 4)


@runs.cases({"dynamic": ({},), "static": ({"static_graph": True},)})
def check_a_model_goes_on_after_its_first_pass_has_failed(options):
    """Before DDP has rebuilt its buckets."""
    state = {"fails": True}

    def hook(state, bucket):
        if state["fails"]:
            raise ValueError("not today")
        return allreduce_hook(None, bucket)

    ddp, optimizer, handle = runs.start(runs.sgd, options={"comm_hook": hook, "comm_state": state}, **options)
    with pytest.raises(RuntimeError, match="not today"):
        runs.backward(ddp, runs.batches(1)[0])
    handle.remove()
    state["fails"] = False
    optimizer.zero_grad()
    other, ordinary, _ = runs.start(runs.sgd, overlapped=False, **options)
    runs.assert_same(
        runs.train_on(ddp, optimizer, runs.batches(4)), runs.train_on(other, ordinary, runs.batches(4))
    )


def momentum_failing(ddp):
    return momentum(ddp, runs.Failing)


def _refuse(*_):
    raise ValueError("not today")


def _fail_and_go(where, options):
    overlap = {"comm_hook": _refuse if where == "hook" else allreduce_hook, "steps_per_parameter": True}
    ddp, optimizer, _ = runs.start(momentum_failing, net=CallingNet(), options=overlap, **options)
    if where == "step":
        optimizer.victim = ddp.module.conv.weight
    if where == "model":
        for batch in runs.batches(2):  # the first pass has one bucket, at its end
            runs.backward(ddp, batch)
            optimizer.step()
            ddp.zero_grad()
        ddp.module.call = _refuse
    with pytest.raises((RuntimeError, ValueError), match="not today"):
        runs.backward(ddp, runs.batches(1)[0])
    with pytest.raises(OverlapError):
        optimizer.step()
    for parameter in ddp.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return ddp.module, weakref.ref(ddp)


@runs.cases(
    {"step": ("step", {}), "hook": ("hook", {"find_unused_parameters": True}), "model": ("model", {})}
)
def check_models_are_freed_after_an_error(where, options):
    """A kept error must not hold the frames in which it was raised, and with them the model.

    Nor does a failed model that is gone take later gradients of its module away.
    """
    net, gone = _fail_and_go(where, options)
    deadline = time.monotonic() + patience(10.0)  # the worker's thread may still notify the peers
    while gone() is not None:
        assert time.monotonic() < deadline, gone()
        gc.collect()
        time.sleep(0.01)
    runs.assert_same(
        [one.grad for one in net.parameters()], [torch.ones_like(one) for one in net.parameters()]
    )


check = runs.on_ranks(__name__, timeout=120, group_timeout=GROUP_TIMEOUT)


def test_a_failure_on_all_ranks(check):
    check()


# One rank alone


def _raises_alone(rank, how, drop_in):
    """Rank 1 raises and ends; the other waits for its part of the average until then."""
    ddp, state, handle = runs.make_ddp(find_unused_parameters=True), {}, None
    optimizer = runs.sgd(ddp)

    def hook(state, bucket):
        if state:
            raise ValueError("not today")
        return allreduce_hook(None, bucket)

    if drop_in:
        ddp.register_comm_hook(state, hook_then_optimizer(hook, OptimizerHookState(optimizer)))
    else:
        handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    runs.train_on(ddp, optimizer, runs.batches(2))
    if rank == 1 and how == "hook":
        state["fails"] = True
    elif rank == 1:
        optimizer.register_step_pre_hook(lambda *_: None)
    before = runs.snapshot(ddp)
    words = {"hook": "not today", "refused": "pre-hook"}[how] if rank == 1 else None
    with pytest.raises(RuntimeError, match=words):
        runs.backward(ddp, runs.batches(1)[0])
    runs.assert_same(runs.changed(ddp, before), [])
    if handle is not None:
        with pytest.raises(OverlapError, match=words):
            handle.wait()
    if rank == 1:
        os._exit(0)


@pytest.mark.parametrize(("how", "drop_in"), [("hook", False), ("refused", False), ("refused", True)])
def test_what_raises_on_one_rank_raises_on_every_rank(how, drop_in):
    """DDP itself communicates after the last hook, of which a drop-in does not know."""
    options = {"may_die": {1}, "group_timeout": patience(5.0), "timeout": 120}
    run_ranks(_raises_alone, 2, how, drop_in, **options)


needs_ends_of_groups = pytest.mark.skipif(
    not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process"
)


def _average_fails_late(rank):
    """Rank 1's average fails after the ranks have exchanged their gradients: the other one is told."""
    job = Job()
    job.fails = "future" if rank == 1 else None
    with pytest.raises(RuntimeError, match="not today") if rank == 1 else contextlib.nullcontext():
        runs.backward(job.ddp, runs.batches(1)[0])
    with pytest.raises(CommunicationError, match="not today" if rank == 1 else "another rank failed"):
        job.handle.wait()
    with pytest.raises(RuntimeError):
        runs.backward(job.ddp, runs.batches(1)[0])
    return len(job.moved())


@needs_ends_of_groups
def test_an_average_that_fails_late_on_one_rank_raises_on_every_rank():
    moved, of_failed = run_ranks(_average_fails_late, 2, group_timeout=GROUP_TIMEOUT, timeout=120)
    assert moved == 10, "it had finished its own step"
    assert of_failed < 10


def _refuses_and_lives_on(rank):
    """Rank 1 finds what was changed too late, and stays: its peer need not wait for the timeout."""
    ddp, optimizer, handle = runs.start(runs.sgd, find_unused_parameters=True)
    runs.train_on(ddp, optimizer, runs.batches(2))
    runs.backward(ddp, runs.batches(1)[0])
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.raises(ConfigError, match="lr of parameter group 0 was changed"):
            optimizer.step()
        default_store().wait(["the other one has raised"])
        return []
    optimizer.step()
    optimizer.zero_grad()
    before = runs.snapshot(ddp)
    with pytest.raises(RuntimeError):
        runs.backward(ddp, runs.batches(1)[0])
    with pytest.raises(CommunicationError):
        handle.wait()
    default_store().set("the other one has raised", "")
    return runs.changed(ddp, before)


@needs_ends_of_groups
def test_a_rank_that_refuses_late_and_lives_on_is_an_error_on_every_rank():
    """Long before the group's timeout."""
    runs.assert_same(run_ranks(_refuses_and_lives_on, 2, timeout=60, group_timeout=600), [[], []])


def _recover(rank, released, seconds, *, clip=None, **ddp_options):
    """One rank's step or policy fails, perhaps late; both go on until each has seen an error, and begin anew.

    Without an agreement on the fate of a pass, one rank has then started an average that its peer has not,
    and all later ones are those of different passes.
    """
    options = {"comm_hook": allreduce_hook, "steps_per_parameter": True, "release_gradients": released}
    options["clip"] = clip
    ddp, optimizer, handle = runs.start(momentum_failing, options=options, **ddp_options)
    plain, other, _ = runs.start(momentum, overlapped=False, **ddp_options)
    plain.register_comm_hook(None, allreduce_hook)
    data = iter(runs.batches(9))
    runs.train_on(ddp, optimizer, [next(data), next(data)])
    saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
    fails = clip or optimizer
    if rank == 0:
        fails.victim, fails.seconds = ddp.module.layers[1].weight, seconds
    failed_in = []
    for number in range(2):
        before = runs.snapshot(ddp)
        try:
            optimizer.zero_grad()
            runs.backward(ddp, next(data))
            optimizer.step()
        except RuntimeError:
            failed_in.append(number)
            moved = runs.changed(ddp, before)
            if rank == 0 and number == 0 and not seconds:
                runs.assert_same(moved, [6, 7, 8, 9])  # the layers after the one that fails
            if released:
                runs.assert_same([runs.gradients(ddp)[place] for place in moved], [None] * len(moved))
    assert failed_in in ([0, 1], [1]), failed_in
    handle.remove()
    fails.victim = None
    told = torch.tensor([rank + 7])
    dist.broadcast(told, 0)
    runs.assert_same(told.item(), 7)
    for model, one in ((ddp, optimizer), (plain, other)):
        model.module.load_state_dict(saved[0])
        one.load_state_dict(copy.deepcopy(saved[1]))
        one.zero_grad()
    overlap_optimizer(ddp, optimizer, **options)
    for x in data:
        runs.assert_same(runs.train_on(ddp, optimizer, [x]), runs.train_on(plain, other, [x]))
    return runs.ends(ddp)


def _recovers(rank):
    return [
        _recover(rank, released=False, seconds=0.5),
        _recover(rank, released=True, seconds=0.0),
        _recover(rank, released=True, seconds=0.0, gradient_as_bucket_view=True),
        _recover(rank, released=False, seconds=0.5, clip=Refuses()),
    ]


@needs_ends_of_groups
def test_after_a_step_that_failed_on_one_rank_a_new_overlap_averages_the_same_passes():
    # No rank waits for the timeout.
    runs.assert_same(*run_ranks(_recovers, 2, timeout=120, group_timeout=600))


def _recovers_at_another_time(rank, again):
    """Each rank begins anew in the iteration in which it raised, and these are not the same."""
    options = {"comm_hook": allreduce_hook, "steps_per_parameter": True}
    ddp, optimizer, handle = runs.start(momentum_failing, options=options)
    if rank == 0:
        optimizer.victim = ddp.module.layers[1].weight
    errors = []
    for x in runs.batches(5):
        try:
            optimizer.zero_grad()
            runs.backward(ddp, x)
        except RuntimeError as error:
            errors.append(str(error))
            handle.remove()
            handle.remove()  # as at the end of a ``with`` block
            optimizer.victim = None
            if again:
                handle = overlap_optimizer(ddp, optimizer, **options)
    return errors


@needs_ends_of_groups
@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_ranks_that_go_on_in_different_iterations_are_told(again):
    one, other = run_ranks(_recovers_at_another_time, 2, again, timeout=120, group_timeout=patience(3.0))
    assert "not today" in one[0], one
    assert "another rank failed" in other[0], other
    for errors in (one, other):
        assert any("backward passes of the model is" in error for error in errors[1:]), errors


def _workers():
    return [one.name for one in threading.enumerate() if one.name == "ddp-optim-overlap"]


def _await_end_of_workers():
    deadline = time.monotonic() + patience(20.0)
    while _workers():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _destroy_groups(ddp, optimizer, handle):
    """A pass afterwards is an error of the communication."""
    before = runs.snapshot(ddp)
    dist.destroy_process_group()
    if GROUPS_END_WITHOUT_GIL:
        _await_end_of_workers()
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match="was destroyed"):
            runs.backward(ddp, runs.batches(1, 0)[0])
        for call in (optimizer.step, handle.wait):
            with pytest.raises(CommunicationError, match=r"was destroyed.*no parameter was stepped"):
                call()
    runs.assert_same(runs.changed(ddp, before), [])


def _threads(_):
    """However the overlap ends, its thread ends, too."""
    found = []
    for how in ("remove", "garbage", "error", "destroyed"):
        ddp = runs.make_ddp()
        optimizer = runs.adamw(ddp)
        handle = overlap_optimizer(ddp, optimizer)
        runs.backward(ddp, runs.batches(1)[0])
        found.append(len(_workers()))
        gone = weakref.ref(ddp)
        if how == "remove":
            handle.remove()
        elif how == "error":
            with pytest.raises(DoubleBackwardError):
                runs.backward(ddp, runs.batches(1)[0])
        elif how == "destroyed":
            _destroy_groups(ddp, optimizer, handle)
        del ddp, handle
        gc.collect()
        assert gone() is None
        _await_end_of_workers()
        optimizer.step()  # works, and finds the last pass's step done
    return found


def test_no_thread_is_left():
    assert run_ranks(_threads, 2, timeout=90) == [[1, 1, 1, 1]] * 2
