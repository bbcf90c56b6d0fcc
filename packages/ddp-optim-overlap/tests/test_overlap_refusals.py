"""Anything that cannot give right results is refused, with a reason, before any communication."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    adamw,
    as_ordinary,
    assert_same,
    assert_stepped,
    backward,
    batches,
    changed,
    complex_if_sent,
    ends,
    make_ddp,
    on_ranks,
    one_group,
    snapshot,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    DoubleBackwardError,
    UnsupportedGradientError,
    UnsupportedOptimizerError,
    apply_optimizer_in_backward,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


class Subclass(torch.optim.SGD):
    """An optimizer that this package does not know."""


def _sgd(ddp, kind=torch.optim.SGD, **options):
    return kind(ddp.parameters(), lr=0.1, **options)


def _replaced(ddp):
    optimizer = _sgd(ddp)
    optimizer.step = lambda: None
    return optimizer


def _compiled(ddp):
    optimizer = _sgd(ddp)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def _with_pre_hook(ddp):
    optimizer = _sgd(ddp)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _foreign(ddp):
    return torch.optim.SGD([*ddp.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)


def _zero(ddp):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns, which pytest refuses

    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)


REFUSED = {
    "LBFGS": (lambda ddp: torch.optim.LBFGS(ddp.parameters()), {}, UnsupportedOptimizerError, "LBFGS"),
    "ZeRO": (_zero, {}, UnsupportedOptimizerError, "ZeroRedundancyOptimizer"),
    "unknown": (partial(_sgd, kind=Subclass), {}, UnsupportedOptimizerError, "steps_per_parameter"),
    "differentiable": (partial(_sgd, differentiable=True), {}, UnsupportedOptimizerError, "differentiable"),
    "compiled step": (_compiled, {}, UnsupportedOptimizerError, "is compiled"),
    "replaced step": (_replaced, {}, UnsupportedOptimizerError, "replaced"),
    "pre-hook": (_with_pre_hook, {}, ConfigError, r"pre-hook.*ordinary loop"),
    "given twice": (lambda ddp: [_sgd(ddp)] * 2, {}, ConfigError, "given twice"),
    "foreign parameter": (_foreign, {}, ConfigError, "group 0 of SGD"),
    "no optimizer": (lambda _: [], {}, ConfigError, "no optimizer"),
    "mode": (_sgd, {"mode": "after_reduce"}, TypeError, "mode"),
    "clip": (_sgd, {"clip": 1.0}, TypeError, "ClipPolicy"),
    "unused": (_sgd, {"unused": "zero"}, ValueError, "'skip' or 'step'"),
    "optimizer": (lambda _: [torch.nn.Linear(2, 2)], {}, TypeError, "Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(refused, name):
    assert refused[name] is None, refused[name]


def _refused(name, ddp):
    """Return what is wrong with a refusal, which must leave nothing behind."""
    make, options, kind, text = REFUSED[name]
    optimizer, before = make(ddp), snapshot(ddp)
    try:
        overlap_optimizer(ddp, optimizer, **options)
    except Exception as error:  # noqa: BLE001 - the later ones must be tried, too
        fits = type(error) is kind and re.search(text, str(error))
        found = None if fits else f"{type(error).__name__}: {error}"
    else:
        found = "not refused"
    assert_same(snapshot(ddp), before)
    assert_same(len(getattr(optimizer, "state", ())), 0)
    return found


class WithEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.embedding(x).mean(1))


class Odd(torch.nn.Module):
    """Parameters without dimensions or elements, complex ones, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.empty(0))
        dtype = complex_if_sent()
        self.linear = torch.nn.Linear(8, 8, dtype=dtype)
        self.turned = torch.nn.Parameter(torch.randn(8, 4, dtype=dtype).t())
        self.phase = torch.nn.Parameter(torch.randn((), dtype=dtype))

    def forward(self, x):
        values = self.linear(x.to(self.phase.dtype)) @ self.turned.t() * self.phase
        return values.abs().sum() * self.scale.exp() + self.empty.sum()


def _hooked():
    ddp = make_ddp()
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def _ignoring():
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["layers.0.weight"])
    return DistributedDataParallel(net)


def _overlapped():
    ddp = make_ddp()
    overlap_optimizer(ddp, _sgd(ddp))
    return ddp


def _with_option(name, value):
    """Set it afterwards: one needs a GPU if torch is built with CUDA, the other is not in every torch."""
    ddp = make_ddp()
    setattr(ddp, name, value)
    return ddp


MODELS = (
    (_hooked, ConfigError, "allreduce_hook"),
    (_overlapped, ConfigError, "remove"),
    (_ignoring, ConfigError, "never be stepped"),
    (partial(_with_option, "mixed_precision", _MixedPrecision()), ConfigError, "mixed_precision"),
    (partial(_with_option, "skip_all_reduce_unused_params", True), ConfigError, "skip_all_reduce"),
    (Net, TypeError, "Net"),
)


def _refusals(rank):
    ddp = make_ddp()
    seen = {name: _refused(name, ddp) for name in REFUSED}
    overlap_optimizer(ddp, _sgd(ddp))  # none of the refused calls has left a hook
    for make, kind, text in MODELS:
        model = make()
        with pytest.raises(kind, match=text):
            overlap_optimizer(model, _sgd(model))
    _refuses_behind_a_built_in_hook()
    ddp = DistributedDataParallel(WithEmbedding())
    with pytest.raises(UnsupportedGradientError, match=r"embedding\.weight"):
        overlap_optimizer(ddp, torch.optim.AdamW(ddp.parameters()))
    with pytest.raises(ConfigError, match="sparse"):
        overlap_optimizer(ddp, _sgd(ddp), clip=ByValue(1.0))
    frozen = make_ddp()
    frozen.module.layers[1].weight.requires_grad_(False)
    overlap_optimizer(frozen, _sgd(frozen))  # a frozen parameter needs no step
    return seen


@pytest.fixture(scope="module")
def refused():
    (found,) = run_ranks(_refusals, 1, timeout=120)
    return found


def _refuses_behind_a_built_in_hook():
    """A refused overlap leaves nothing in a model with a built-in hook, which trains on."""
    ddp = make_ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = _sgd(ddp)
    for _ in range(2):
        with pytest.raises(ConfigError, match="built-in"):
            overlap_optimizer(ddp, optimizer)
    assert "step" not in optimizer.__dict__
    assert not any(parameter._backward_hooks for parameter in ddp.parameters())
    before = snapshot(ddp)
    backward(ddp, batches(1)[0])
    assert_same(snapshot(ddp), before)
    optimizer.step()
    assert changed(ddp, before)
    in_backward = make_ddp()
    in_backward._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="built-in"):
            in_backward(batches(1)[0])


@as_ordinary(
    (one_group(torch.optim.SGD, {"lr": 0.1}),),
    (one_group(torch.optim.Adagrad, {"lr": 0.1}),),
    (
        lambda ddp: [
            torch.optim.SparseAdam(ddp.module.embedding.parameters(), lr=0.01),
            torch.optim.AdamW(ddp.module.linear.parameters(), lr=0.01),
        ],
    ),
)
def check_sparse(make_optimizers, *, overlapped):
    ddp = DistributedDataParallel(WithEmbedding(), bucket_cap_mb=0.0001)
    optimizers = make_optimizers(ddp)
    handle = overlap_optimizer(ddp, optimizers) if overlapped else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ddp, torch.randint(50, (4, 3), generator=generator))
        for optimizer in optimizers:
            optimizer.step()
    result = copy.deepcopy(ends(ddp, *optimizers))
    if handle is not None:
        assert_stepped(handle)
        ddp.module.linear.zero_grad()  # the sparse gradient is still there
        with pytest.raises(DoubleBackwardError, match="zero_grad"):
            backward(ddp, torch.randint(50, (4, 3), generator=generator))
    return result


@as_ordinary((False,), (True,))
def check_odd_parameters(view, *, overlapped):
    ddp = DistributedDataParallel(Odd(), bucket_cap_mb=0.0001, gradient_as_bucket_view=view)
    optimizer = adamw(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return train_on(ddp, optimizer, [torch.randn(2, 8, generator=generator) for _ in range(4)])


check = on_ranks(__name__, timeout=120)


def test_sparse_and_odd_parameters_are_stepped(check):
    check()
