"""Small training runs, ordinary and overlapped, which must end with the same bits; and how ranks run them."""

import contextlib
import ctypes
import functools
import importlib
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.passes import backward_pass
from dist_utils.process_groups import same_error
from dist_utils.testing import run_ranks, same_bits


class Net(torch.nn.Module):
    """A convolution in channels_last, and linear layers that may be left out or tied.

    Each layer has a bucket of its own in :func:`start`, and whole pages of memory in it, which can be freed.
    """

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        if tied:
            self.layers[3].weight = self.layers[0].weight
        self.skipped = ()

    def forward(self, x):
        x = self.conv(x).mean(1).flatten(1)
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = torch.tanh(layer(x))
        return x


EVERY = list(range(10))
"""The positions of all parameters of a :class:`Net`: the convolution's two, and two of each layer."""


def rank_device():
    """Return this rank's device: its current GPU, if the test has chosen one."""
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


COMPLEX = torch.float32 if torch.__version__ < "2.9" else torch.complex64
"""The dtype of complex parameters: DDP broadcasts them, and Gloo takes no complex ones in torch 2.6."""


def batches(count, rank=None, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if rank is None else rank))
    return [torch.randn(3, 2, 8, 8, generator=generator).to(rank_device()) for _ in range(count)]


LAYER_MB = (64 * 64 + 64) * 4 / 2**20
"""The size of a layer of a :class:`Net`."""


def make_ddp(net=None, **options):
    net = Net() if net is None else net
    return DistributedDataParallel(net.to(rank_device()), **{"bucket_cap_mb": LAYER_MB, **options})


def adamw(ddp):
    return torch.optim.AdamW(ddp.parameters(), lr=0.01)


def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


class Failing(torch.optim.SGD):
    """An optimizer whose step fails for a chosen parameter, perhaps late, after others were moved."""

    victim, seconds, error = None, 0.0, ValueError("not today")

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter is self.victim for parameter in group["params"]):
                time.sleep(self.seconds)
                raise type(self.error)(*self.error.args)  # a class would keep an error's frames
        return super().step(closure)


def start(make=adamw, *, overlapped=True, options=None, **ddp_options):
    """Return a model, its optimizer, and the handle of their overlap, or ``None``."""
    ddp = make_ddp(**ddp_options)
    optimizer = make(ddp)
    return ddp, optimizer, overlap_optimizer(ddp, optimizer, **(options or {})) if overlapped else None


def paused(handle):
    """Return ``handle.pause()``, or in an ordinary run a context that does nothing."""
    return contextlib.nullcontext() if handle is None else handle.pause()


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
    pairs = zip(before, ddp.parameters(), strict=True)
    return [place for place, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


def gradients(ddp):
    return [parameter.grad for parameter in ddp.parameters()]


def assert_stepped(handle):
    """Fail unless the last pass has stepped all its buckets, in order; return the report."""
    report = handle.wait()
    assert report.stepped == tuple(range(report.buckets)) != (), report
    return report


def assert_same(found, expected, place="the value"):
    """Fail, and show the first difference, unless two values are bitwise equal."""
    if not same_bits(found, expected):
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
    return next(_difference(*pair, where) for where, *pair in parts if not same_bits(*pair))


@contextlib.contextmanager
def early_steps():
    """Step what waits for a later average at once, as where steps take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_pass, "_LEAST_SECONDS", 0.0)
        yield


@contextlib.contextmanager
def locked_memory():
    """Lock new memory of this process, so that single pages cannot be freed: storages are instead."""
    libc, lock_new_memory = ctypes.CDLL(None), 2  # MCL_FUTURE of Linux
    if libc.mlockall(lock_new_memory) != 0:
        pytest.skip("this process may not lock its memory")
    try:
        yield
    finally:
        libc.munlockall()


# Many small checks in one launch


def cases(table):
    """Run a check once for each entry of a table, whose name pytest shows, with its value as arguments."""

    def mark(check):
        check.cases = table
        return check

    return mark


def as_ordinary(run):
    """Make a check of a run, which must end with the same bits whether it is overlapped or not."""

    @functools.wraps(run)
    def check(*case):
        assert_same(run(*case, overlapped=True), run(*case, overlapped=False))

    return check


def checks_in(module, prefix):
    """Return the checks of a module by name: functions with this prefix, once for each of their cases."""
    found = {}
    for name, check in vars(sys.modules[module]).items():
        if name.startswith(prefix):
            for case, arguments in getattr(check, "cases", {"": ()}).items():
                shown = name.removeprefix(prefix) + (f": {case}" if case else "")
                found[shown] = functools.partial(check, *arguments)
    return found


def run_checks(_, module, prefix="check_"):
    """Run all checks of a module on a rank; return reasons why some were skipped, and tracebacks."""
    importlib.import_module(module)
    skipped, failed = {}, {}
    for name, check in checks_in(module, prefix).items():
        try:
            check()
        except pytest.skip.Exception as reason:
            skipped[name] = str(reason)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the later checks must run, too
            failed[name] = traceback.format_exc()
    return skipped, failed


def on_ranks(module, world_size=2, *, prefix="check_", **options):
    """Return a fixture: a call for each check of a module, which fails if the check has failed on a rank.

    The first call runs all of them on every rank, once.
    """

    @functools.cache
    def launch():
        try:
            return run_ranks(run_checks, world_size, module, prefix, **options)
        except Exception as error:  # noqa: BLE001 - kept, or every test would launch again
            return error

    def require_passed(name):
        outcomes = launch()
        if isinstance(outcomes, Exception):
            raise same_error(outcomes)  # each raise of one error adds to what its report shows
        for rank, (skipped, failed) in enumerate(outcomes):
            if name in failed:
                pytest.fail(f"on rank {rank}: {failed[name]}", pytrace=False)
            if name in skipped:
                pytest.skip(skipped[name])

    return pytest.fixture(params=checks_in(module, prefix), name=prefix.removesuffix("_"))(
        lambda request: functools.partial(require_passed, request.param)
    )
