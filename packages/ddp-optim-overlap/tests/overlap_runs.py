"""One small training run, ordinary or overlapped, for tests that compare the two bitwise."""

import contextlib
import copy
import functools
import itertools
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.bucket_memory import PageMemory, StorageMemory
from ddp_optim_overlap.passes import queue
from dist_utils.testing import run_ranks
from dist_utils.testing import same_bits as same

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}
FUSED = ("SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "Adagrad")


class Net(torch.nn.Module):
    """A convolution in channels_last, and linear layers, one of which may be left out or tied."""

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        if tied:
            self.layers[3].weight = self.layers[0].weight
        self.skipped = ()

    def forward(self, x):
        x = self.conv(x).mean(1).flatten(1)
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = torch.tanh(layer(x))
        return x


def complex_if_sent():
    """Return a dtype for parameters. DDP broadcasts them, and Gloo takes no complex ones in torch 2.6."""
    try:
        dist.broadcast(torch.zeros(1, dtype=torch.complex64), 0)
    except RuntimeError:
        return torch.float32
    return torch.complex64


def batches(count, rank=None, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if rank is None else rank))
    return [torch.randn(3, 2, 4, 4, generator=generator) for _ in range(count)]


def adamw(ddp):
    return torch.optim.AdamW(ddp.parameters(), lr=0.01)


def backward(ddp, x):
    ddp(x).square().sum().backward()


def train_on(ddp, optimizer, data):
    """Run an ordinary loop; return the parameters and the optimizer's state dict."""
    for x in data:
        backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
    return ends(ddp, optimizer)


def snapshot(ddp):
    """Return copies of the parameters."""
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def ends(ddp, *optimizers):
    """Return what two runs must have in common at their end."""
    return snapshot(ddp), *[optimizer.state_dict() for optimizer in optimizers]


def changed(ddp, before):
    """Return the positions of the parameters that were moved since a snapshot."""
    return [
        index
        for index, (one, other) in enumerate(zip(before, ddp.parameters(), strict=True))
        if not torch.equal(one, other)
    ]


def rank_device():
    """Return this rank's device: its current GPU, if the test has chosen one."""
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def make_ddp(*, tied=False, bucket_cap_mb=0.002, **options):
    return DistributedDataParallel(Net(tied=tied).to(rank_device()), bucket_cap_mb=bucket_cap_mb, **options)


def one_group(make, options):
    return lambda ddp: [make(ddp.parameters(), **options)]


_together = itertools.cycle((1, 6000, 4 * 2**20))


def step_buckets_of(size=1):
    """Let buckets wait for each other until they have ``size`` bytes; 1 steps each by itself."""
    queue.WORTH_A_STEP = size


class PoisonedPages(PageMemory):
    """Frees pages, and fills the rest with NaN, because small buckets have no whole page."""

    def give_back_part(self, views):
        super().give_back_part(views)
        for view in views:
            view.fill_(torch.nan)

    def give_back(self, bucket, **options):
        freed = super().give_back(bucket, **options)
        bucket.buffer.fill_(torch.nan)
        return freed


class Failing(torch.optim.SGD):
    """An optimizer whose step fails for a chosen parameter, perhaps late."""

    victim, seconds = None, 0.0

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter is self.victim for parameter in group["params"]):
                time.sleep(self.seconds)
                raise ValueError("not today")
        return super().step(closure)


def failing_hook(state, bucket):
    """Average; or fail for one bucket, at once (``"hook"``) or in the future (``"average"``)."""
    fails = bucket.index() == state.get("at", 1) and state.get("fails")
    begun = state.setdefault("all begun", threading.Event())
    if bucket.index() == 0:
        begun.clear()
    if fails == "hook":
        raise ValueError("not today")
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    if bucket.is_last():
        begun.set()
    if fails != "average":
        return future.then(lambda done: done.value()[0] / dist.get_world_size())
    failing = torch.futures.Future()

    def fail():
        begun.wait(10)  # otherwise a peer would be alone with the average of a later bucket
        future.wait()
        failing.set_exception(ValueError("not today"))

    threading.Thread(target=fail).start()
    return failing.then(lambda done: done.value())


def begin_overlap(ddp, optimizers, *, memory=None, **options):
    """Start an overlap; ``memory`` may replace this device's own way to free gradients."""
    handle = overlap_optimizer(ddp, optimizers, release_gradients=memory is not None, **options)
    if memory is not None:
        engine = handle._engine
        engine.release.memory = memory()
        engine.gradients.tell(engine.release.memory.restore)
    return handle


def start(make=adamw, *, overlapped=True, options=None, **ddp_options):
    """Return a model, its optimizer, and the handle of their overlap, or ``None``."""
    ddp = make_ddp(**ddp_options)
    optimizer = make(ddp)
    return ddp, optimizer, begin_overlap(ddp, optimizer, **(options or {})) if overlapped else None


def paused(handle):
    """Return ``handle.pause()``, or in an ordinary run a context that does nothing."""
    return contextlib.nullcontext() if handle is None else handle.pause()


def ways_to_release(arguments, ways=(PoisonedPages, StorageMemory)):
    """Return those of these ways to free memory that suit such a run."""
    storage = not any(
        arguments.get(name) for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    )
    on_host = rank_device().type == "cpu"
    return [way for way in ways if (storage if way is StorageMemory else on_host)]


def train(  # noqa: C901 - every way to write the loop
    make_optimizers,
    *,
    overlap,
    steps=4,
    accumulate=1,
    skip=lambda step: (),
    join=0,
    set_to_none=True,
    call_step=True,
    make_schedulers=lambda optimizers: [],
    resume_at=None,
    tied=False,
    comm=None,
    after_backward=lambda ddp: None,
    options=None,
    **ddp_options,
):
    """Train; return parameters, gradients and the optimizers' state dicts.

    ``comm``: makes the hook and its state, which the ordinary run registers itself. ``after_backward``:
    called only in the ordinary loop, between ``backward()`` and ``step()``.
    """
    ddp = make_ddp(tied=tied, **ddp_options)
    optimizers = make_optimizers(ddp)
    schedulers = make_schedulers(optimizers)
    hook, state = comm() if comm is not None else (None, None)
    handle = None
    if overlap:
        step_buckets_of(next(_together))
        handle = begin_overlap(ddp, optimizers, comm_hook=hook, comm_state=state, **(options or {}))
    elif hook is not None:
        ddp.register_comm_hook(state, hook)
    count = steps + join * dist.get_rank()
    data = batches(count * accumulate)
    with ddp.join() if join else contextlib.nullcontext():
        for step in range(count):
            if resume_at == step:
                optimizers, schedulers, handle = _resume(
                    ddp, optimizers, schedulers, handle, make_optimizers, make_schedulers, options or {}
                )
            ddp.module.skipped = skip(step)
            _backward(ddp, data[step * accumulate : (step + 1) * accumulate])
            if not overlap:
                after_backward(ddp)
            if call_step or not overlap:
                for optimizer in optimizers:
                    optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            last = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
    if handle is not None:
        assert_stepped(handle)  # otherwise optimizer.step() has done it all, and the overlap nothing
        handle.remove()
    return {
        "parameters": [p.detach().clone() for p in ddp.parameters()],
        "gradients": last,
        "states": [optimizer.state_dict() for optimizer in optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }


def _backward(ddp, parts):
    for part, x in enumerate(parts):
        with ddp.no_sync() if part < len(parts) - 1 else contextlib.nullcontext():
            ddp(x.to(rank_device())).square().sum().backward()


def _resume(ddp, optimizers, schedulers, handle, make_optimizers, make_schedulers, options):
    """Save, and continue with new optimizers and schedulers that have loaded the checkpoint."""
    saved = copy.deepcopy([one.state_dict() for one in (*optimizers, *schedulers)])
    if handle is not None:
        handle.remove()
    with torch.no_grad():
        model = copy.deepcopy(ddp.module.state_dict())
        for parameter in ddp.parameters():
            parameter.zero_()
        ddp.module.load_state_dict(model)
    optimizers = make_optimizers(ddp)
    schedulers = make_schedulers(optimizers)
    if handle is not None:
        handle = begin_overlap(ddp, optimizers, **options)
    for one, state in zip((*optimizers, *schedulers), saved, strict=True):
        one.load_state_dict(state)
    return optimizers, schedulers, handle


def differences(make_optimizers, *, released=(), **arguments):
    """Describe the first difference between the ordinary and each overlapped run.

    ``released``: ways to free memory; each adds a run, which must end without gradients.
    """
    options = arguments.pop("options", None) or {}
    ordinary = train(make_optimizers, overlap=False, **arguments)
    overlapped = train(make_optimizers, overlap=True, options=options, **arguments)
    different = _differences(overlapped, ordinary, "overlapped")
    if released and not arguments.get("set_to_none", True):  # as released ones are None
        ordinary = train(make_optimizers, overlap=False, **{**arguments, "set_to_none": True})
    for way in released:
        run = train(make_optimizers, overlap=True, options={**options, "memory": way}, **arguments)
        gradients = run.pop("gradients")
        different += _differences(run, {key: ordinary[key] for key in run}, way.__name__)
        different += [f"{way.__name__} has left a gradient" for one in gradients if one is not None]
    return different


def _differences(found, expected, place):
    return [] if same(found, expected) else [_difference(found, expected, place)]


def assert_same(found, expected, place="the value"):
    """Fail, and show the first difference, unless two values are bitwise equal."""
    if not same(found, expected):
        raise AssertionError(_difference(found, expected, place))


def _difference(found, expected, place):
    if isinstance(found, dict) and isinstance(expected, dict) and list(found) == list(expected):
        parts = [(f"{place}[{key!r}]", one, expected[key]) for key, one in found.items()]
    elif all(isinstance(one, (list, tuple)) for one in (found, expected)) and len(found) == len(expected):
        parts = [(f"{place}[{n}]", *pair) for n, pair in enumerate(zip(found, expected, strict=True))]
    elif all(isinstance(one, torch.Tensor) for one in (found, expected)) and found.shape == expected.shape:
        apart = found.detach().to_dense() - expected.detach().to_dense()
        return f"{place}, {found.dtype}, is {apart.abs().max()} from {expected.dtype} at most"
    else:
        return f"{place} is {found!r}, expected {expected!r}"
    return next(_difference(one, other, where) for where, one, other in parts if not same(one, other))


def assert_ordinary(run, *case):
    """Fail unless the overlapped run of a case ends with the bits of the ordinary one."""
    assert_same(run(*case, overlapped=True), run(*case, overlapped=False), f"of {case}, the value")


def as_ordinary(*cases):
    """Make a check of a run, which must end with the same bits whether it is overlapped or not."""

    def make_check(run):
        @functools.wraps(run)
        def check():
            for case in cases or [()]:
                assert_ordinary(run, *case)

        return check

    return make_check


def assert_stepped(handle):
    """Fail unless the last pass has stepped all its buckets, in order; return the report."""
    report = handle.wait()
    assert report.stepped == tuple(range(report.buckets)) != (), report
    return report


def run_parts(_, parts):
    """Run many small checks on a rank; return the traceback of each that has failed."""
    failed = {}
    for name, part in parts.items():
        try:
            part()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the later parts must run, too
            failed[name] = traceback.format_exc()
    return failed


def on_ranks(module, world_size=2, **options):
    """Return a fixture: a call for each ``check_`` function of a module, which fails if the check has failed.

    The first call runs all of them on every rank, once.
    """
    checks = {
        name.removeprefix("check_"): value
        for name, value in vars(sys.modules[module]).items()
        if name.startswith("check_")
    }

    @functools.cache
    def launch():
        try:
            return run_ranks(run_parts, world_size, checks, **options)
        except Exception as error:  # noqa: BLE001 - kept, or every test would launch again
            return error

    def require_held(name):
        if isinstance(launch(), Exception):
            raise launch()
        for rank, failed in enumerate(launch()):
            if name in failed:
                pytest.fail(f"on rank {rank}: {failed[name]}", pytrace=False)

    return pytest.fixture(params=checks, name="check")(
        lambda request: functools.partial(require_held, request.param)
    )
