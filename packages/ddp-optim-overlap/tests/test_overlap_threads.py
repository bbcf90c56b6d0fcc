"""Who steps and who waits for whom, what reports and profilers show, and weights that are read twice."""

import itertools
import threading
import time

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    StepReport,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward
from dist_utils.torch_compat import default_store


class Watched(torch.optim.SGD):
    """Records threads and numbers of parameters; waits for a peer in a chosen parameter's step."""

    threads, sizes, late, stepped = set(), [], None, threading.Event()

    def step(self, closure=None):
        parameters = [one for group in self.param_groups for one in group["params"]]
        self.threads.add(threading.get_ident())
        self.sizes.append(len(parameters))
        if any(one is self.late for one in parameters):
            default_store().wait(["waited"])
        super().step(closure)
        self.stepped.set()


def watched(ddp):
    Watched.threads, Watched.sizes = set(), []
    return Watched(ddp.parameters(), lr=0.1)


DECLARED = {"steps_per_parameter": True}


def check_who_steps_what():
    """The loop's own thread: buckets that are there together, or each by itself if it is freed."""
    for released, fewest, most in ((False, 1, 2), (True, 5, 5)):
        ddp, optimizer, _ = runs.start(watched, options={**DECLARED, "release_gradients": released})
        runs.train_on(ddp, optimizer, runs.batches(2))
        Watched.threads.clear()
        Watched.sizes.clear()
        runs.train_on(ddp, optimizer, runs.batches(1))
        runs.assert_same(Watched.threads, {threading.get_ident()})
        runs.assert_same(sum(Watched.sizes), 10)
        assert fewest <= len(Watched.sizes) <= most, Watched.sizes


@runs.as_ordinary
def check_backward_does_not_wait_for_an_average(*, overlapped):
    """The first bucket's average does not complete before the first layer's gradients are computed."""
    ddp, in_time = runs.make_ddp(), []
    optimizer, computed = runs.adamw(ddp), threading.Event()
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
    for x in runs.batches(3):
        computed.clear()
        found = runs.train_on(ddp, optimizer, [x])
    runs.assert_same(in_time, [True] * 3 if overlapped else [])
    return found


@runs.cases({"several buckets": (0.01,), "one bucket": (25,)})
def check_what_was_hidden(cap):
    """The steps before the last, if the last average is slow; none, if there is only one bucket."""

    def hook(_, bucket):
        if bucket.index() == 0:
            Watched.stepped.clear()
        averaged = allreduce_hook(None, bucket)
        if not bucket.is_last():
            return averaged
        # On a thread: if the future is complete, a callback would run before then() returns.
        later, several = torch.futures.Future(), bucket.index() > 0

        def slow():
            assert not several or Watched.stepped.wait(20)
            time.sleep(0.5)  # time for the checks that follow a step, also on a busy machine
            later.set_result(averaged.wait())

        threading.Thread(target=slow).start()
        return later

    options = {**DECLARED, "comm_hook": hook}
    ddp, optimizer, handle = runs.start(watched, options=options, bucket_cap_mb=cap)
    with runs.early_steps():
        runs.train_on(ddp, optimizer, runs.batches(2))
    report = handle.wait()
    assert 0 <= report.seconds_hidden < report.seconds, report
    assert (report.buckets > 1) == (report.seconds_hidden > 0) == (cap < 1), report


class Slow(torch.optim.SGD):
    """Takes four milliseconds for a :class:`runs.Net`: too short for a call of its own elsewhere."""

    def step(self, closure=None):
        time.sleep(4e-4 * sum(len(group["params"]) for group in self.param_groups))
        super().step(closure)


def check_short_steps_behind_a_slow_wire():
    """They are hidden as soon as a pass has shown that it mostly waits."""

    def hook(_, bucket):
        averaged, later = allreduce_hook(None, bucket), torch.futures.Future()

        def slow():
            time.sleep(0.02 * (1 + bucket.index()))
            later.set_result(averaged.wait())

        threading.Thread(target=slow).start()
        return later

    options = {**DECLARED, "comm_hook": hook}
    ddp, optimizer, handle = runs.start(lambda ddp: Slow(ddp.parameters(), lr=0.1), options=options)
    runs.train_on(ddp, optimizer, runs.batches(4))
    report = runs.assert_stepped(handle)
    assert report.seconds_hidden > report.seconds / 4, report


def check_a_slow_peer():
    ddp, optimizer, handle = runs.start(watched, options=DECLARED)
    runs.train_on(ddp, optimizer, runs.batches(1))
    handle.wait()
    if dist.get_rank() == 1:
        optimizer.late = ddp.module.conv.weight  # in the last bucket
    runs.backward(ddp, runs.batches(1)[0])
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="a peer has not finished its step"):
            handle.wait(timeout=0.1)
        default_store().set("waited", "")
    runs.assert_same(handle.wait(timeout=30).number, 2)


# Calls in the middle of a pass

ASKS = {
    "wait": lambda handle, _: handle.wait(),
    "step": lambda _, optimizer: optimizer.step(),
    "remove": lambda handle, _: handle.remove(),
}


class Reentrant(torch.nn.Module):
    """A layer whose backward is a nested backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


class Calls(torch.nn.Sequential):
    """Calls something in the middle of backward()."""

    call = None

    def forward(self, x):
        for number, layer in enumerate(self, start=1):
            x = layer(x)
            if number == 2 and self.call is not None:
                x = call_in_backward(x, self.call)
        return x


def _on_a_thread(ask):
    other = threading.Thread(target=ask)
    other.start()
    other.join()


WHERE = {
    "from a thread": lambda net, ask: net[1].inner.weight.register_post_accumulate_grad_hook(
        lambda _: _on_a_thread(ask)
    ),
    "in a hook": lambda net, ask: net[1].inner.weight.register_post_accumulate_grad_hook(lambda _: ask()),
    "between nested parts": lambda net, ask: setattr(net, "call", ask),
}


@runs.cases(
    {
        f"{name} {where}, {'reentrant' if nested else 'plain'}": (name, where, nested, bool(place % 2))
        for place, (name, where, nested) in enumerate(itertools.product(ASKS, WHERE, (False, True)))
        if not (nested and where == "from a thread")  # a documented limit
    }
)
@runs.as_ordinary
def check_asked_in_the_middle(name, where, nested, released, *, overlapped):
    """Refused, and nothing is lost."""
    torch.manual_seed(0)
    net = Calls(*[Reentrant() for _ in range(4)])
    if not nested:
        for layer in net:
            layer.forward = layer.inner.forward
    options = {"release_gradients": released}
    ddp, optimizer, handle = runs.start(overlapped=overlapped, net=net, options=options, bucket_cap_mb=0.0005)
    refused = []

    def ask():
        try:
            ASKS[name](handle, optimizer)
        except ConfigError as error:
            refused.append(str(error))

    for step in range(3):
        if overlapped and step == 1:  # the first pass has one bucket, at its end
            WHERE[where](net, ask)
        x = torch.full((3, 16), 1.0 + step + dist.get_rank(), requires_grad=True)
        found = runs.train_on(ddp, optimizer, [x])
    if overlapped:
        assert len(refused) == 2, refused
        assert "while backward() runs" in refused[0], refused
        runs.assert_stepped(handle)
    return found


class CheckpointInside(torch.nn.Module):
    """Buckets come before, in and, unless ``before`` is frozen, after the nested pass of a checkpoint."""

    def __init__(self, *, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inner, self.after = (torch.nn.Linear(64, 64) for _ in range(3))
        self.before.requires_grad_(not frozen)

    def forward(self, x):
        first = self.before(x.flatten(1)[:, :64]).requires_grad_()
        return self.after(checkpoint(self.inner, first, use_reentrant=True))


@runs.cases({"kept": (False, False), "released": (True, False), "nothing trained before": (False, True)})
@runs.as_ordinary
def check_a_nested_pass_between_buckets(released, frozen, *, overlapped):
    options = {"release_gradients": released}
    net = CheckpointInside(frozen=frozen)
    ddp, optimizer, handle = runs.start(overlapped=overlapped, net=net, options=options)
    found = runs.train_on(ddp, optimizer, runs.batches(4))
    if handle is not None:
        runs.assert_stepped(handle)
    return found


# Reports and profilers


def check_reports_and_ranges():
    """Every step has a range by name, also for a profiler of one thread; reports are plain numbers.

    The ranks' meeting is in no profile: it may end after a profiler, whose memory torch would then write to.
    """
    ddp, optimizer, handle = runs.start(
        options={"release_gradients": True}
    )  # every bucket is stepped by itself
    runs.train_on(ddp, optimizer, runs.batches(1))  # after this one DDP forms its final buckets
    with profile() as profiler:
        runs.backward(ddp, runs.batches(1)[0])
        report = handle.wait(timeout=30)
    shown = [event.name for event in profiler.events() if event.name.startswith("overlapped step")]
    runs.assert_same(sorted(shown), [f"overlapped step:bucket_{index}" for index in range(5)])
    runs.assert_same([event.name for event in profiler.events()].count("gloo:all_reduce"), 5)  # the averages
    found = report.as_dict()
    assert {type(value) for value in found.values()} == {int, float}, found
    runs.assert_same([found[name] for name in ("number", "buckets", "stepped")], [2, 5, 5])
    assert 0 <= found["seconds_hidden"] <= found["seconds"], found


# A stepped weight that the same backward pass reads again


class Reuses(torch.nn.Module):
    """A block, maybe a checkpointed one, that uses a later layer's weight without its gradient."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.how = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), how

    def block(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                target = self.last(x)
            return torch.tanh(x * target)
        return torch.tanh(x @ self.last.weight.detach())

    def forward(self, x):
        x = self.first(x)
        x = self.block(x) if self.how == "saved" else checkpoint(self.block, x, use_reentrant=False)
        return self.last(x)


@runs.cases({how: (how,) for how in ("detach", "no_grad", "saved")})
@runs.as_ordinary
def check_weights_that_are_read_again(how, *, overlapped):
    """A step waits until nothing of backward() is left to read what it changes."""
    # A fused step tells autograd nothing.
    ddp, optimizer, _ = runs.start(
        lambda ddp: torch.optim.SGD(ddp.parameters(), lr=1.0, fused=True),
        overlapped=overlapped,
        net=Reuses(how),
        bucket_cap_mb=0.0001,
    )
    return runs.train_on(ddp, optimizer, [torch.full((2, 8), 1.0 + dist.get_rank())] * 4)


check = runs.on_ranks(__name__, timeout=120, group_timeout=60)


def test_threads(check):
    check()


def test_reports_leave_out_what_they_do_not_know():
    assert StepReport(7, 4, (0, 2), (3,), 0.5, 0.25).as_dict() == {
        "number": 7,
        "buckets": 4,
        "stepped": 2,
        "partial": 1,
        "seconds": 0.5,
        "seconds_hidden": 0.25,
        "hidden_ratio": 0.5,
    }
    assert "hidden_ratio" not in StepReport().as_dict()
