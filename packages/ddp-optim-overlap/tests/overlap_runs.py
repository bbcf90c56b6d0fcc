"""One small training run, ordinary or overlapped, for tests that compare the two bitwise."""

import contextlib
import copy
import itertools
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import engine as engines
from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.bucket_memory import PageMemory, StorageMemory
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


def snapshot(ddp):
    """Return copies of the parameters."""
    return [parameter.detach().clone() for parameter in ddp.parameters()]


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
    engines.WORTH_A_STEP = size


class PoisonedPages(PageMemory):
    """Frees pages, and fills the rest with NaN, because small buckets have no whole page."""

    def give_back_part(self, views):
        super().give_back_part(views)
        for view in views:
            view.fill_(torch.nan)

    def give_back(self, gradients, *, alone):
        value, views = super().give_back(gradients, alone=alone)
        gradients.buffer.fill_(torch.nan)
        return value, views


def begin_overlap(ddp, optimizers, *, memory=None, **options):
    """Start an overlap; ``memory`` may replace this device's own way to free gradients."""
    handle = overlap_optimizer(ddp, optimizers, release_gradients=memory is not None, **options)
    if memory is not None:
        engine = handle._engine
        engine.release.memory = memory()
        engine.gradients.tell(engine.release.memory.restore)
    return handle


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
        report = handle.wait()  # otherwise optimizer.step() has done it all, and the overlap nothing
        assert report.stepped == tuple(range(report.buckets)), report
        assert report.buckets
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
    """Return the differences between the ordinary and the overlapped run.

    ``released``: ways to free memory; each adds a run, which must end without gradients.
    """
    options = arguments.pop("options", None) or {}
    ordinary = train(make_optimizers, overlap=False, **arguments)
    overlapped = train(make_optimizers, overlap=True, options=options, **arguments)
    different = [key for key in ordinary if not same(ordinary[key], overlapped[key])]
    if released and not arguments.get("set_to_none", True):  # as released ones are None
        ordinary = train(make_optimizers, overlap=False, **{**arguments, "set_to_none": True})
    for way in released:
        run = train(make_optimizers, overlap=True, options={**options, "memory": way}, **arguments)
        gradients = run.pop("gradients")
        different += [(way.__name__, key) for key in run if not same(ordinary[key], run[key])]
        different += [(way.__name__, "a gradient is left") for one in gradients if one is not None]
    return different


def both(run):
    """Whether ``run(overlapped)`` ends with the same bits in both cases."""
    return same(run(overlapped=False), run(overlapped=True))


def run_parts(_, parts):
    """Run many small checks on a rank; each fills a dictionary with its results."""
    found = {}
    for name, part in parts.items():
        found[name] = {}
        try:
            part(found[name])
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the later parts must run, too
            found[name]["raised"] = traceback.format_exc()
    return found


def named(*parts):
    """Name checks for :func:`run_parts` and ``pytest.mark.parametrize`` by their functions."""
    return {part.__name__.strip("_"): part for part in parts}


def require_held(ranks, name):
    """Assert that a part has checked something on every rank, and that every check passed."""
    for rank in ranks:
        assert rank[name]
        assert all(held is True for held in rank[name].values()), rank[name]
