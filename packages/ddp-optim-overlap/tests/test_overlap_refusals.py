"""Anything that cannot give right results is refused, with a reason, before any communication."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from overlap_runs import Net, batches, complex_if_sent, differences, make_ddp, one_group, same, train
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    GlobalNorm,
    OverlapError,
    OverlapMode,
    UnsupportedGradientError,
    UnsupportedOptimizerError,
    apply_optimizer_in_backward,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


class ClipsItself(torch.optim.SGD):
    """Limits the norm over all of its parameters, which couples them."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
            torch._foreach_mul_(gradients, (1.0 / norm).clamp(max=1.0))
        return super().step(closure)


class ClipsOneGroup(torch.optim.SGD):
    """Limits the norm over the parameters of each group that has a limit."""

    def step(self, closure=None):
        for group in self.param_groups:
            if "limit" in group:
                torch.nn.utils.clip_grad_norm_(group["params"], group["limit"])
        return super().step(closure)


class Communicates(torch.optim.SGD):
    """Averages gradients again: the same on every rank, but between DDP's own collectives."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        return super().step(closure)


class CountsCalls(torch.optim.SGD):
    """Keeps a counter in the group, as some optimizers do for their schedule."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


class CountsInside(torch.optim.SGD):
    """Keeps a counter in the object."""

    calls = 0

    def step(self, closure=None):
        self.calls = self.calls + 1
        return super().step(closure)


class CountsInDict(torch.optim.SGD):
    """Keeps a counter inside an attribute that a shallow copy shares."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.clock = {"calls": 0}

    def step(self, closure=None):
        self.clock["calls"] += 1
        return super().step(closure)


class CountsInState(torch.optim.SGD):
    """Keeps a counter in state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise, which depends on the order of the parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Wraps(torch.optim.Optimizer):
    """Lets another optimizer step."""

    def __init__(self, base, *, within=lambda base: base):
        self.base = within(base)
        super().__init__([p for group in base.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        self.base.step(closure)


class Elsewhere(torch.optim.SGD):
    """Steps tensors that are not in its groups."""

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in _HIDDEN:
                parameter.add_(0.0)


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


_HIDDEN = []


def _elsewhere(ddp):
    _HIDDEN[:] = ddp.parameters()
    return Elsewhere(ddp.parameters(), lr=0.1)


def _warming_up(ddp):
    """With a rate of zero, coupling would not show in the parameters."""
    return ClipsItself(ddp.parameters(), lr=0.0)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()
        return super().step()


def _replaced(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.step = lambda: None
    return optimizer


def _compiled(ddp):
    optimizer = _sgd(ddp)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


class CompiledClass(torch.optim.SGD):
    step = torch.compile(torch.optim.SGD.step, backend="eager")


class CompiledInside(torch.optim.SGD):
    """Uses a compiled function, which torch would compile for one shape after another."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                _compiled_update(parameter, parameter.grad)


@torch.compile(backend="eager")
def _compiled_update(parameter, gradient):
    parameter.sub_(gradient)


def _clips_one_group(ddp):
    parameters = list(ddp.parameters())
    groups = [{"params": parameters[2:]}, {"params": parameters[:2], "limit": 0.01}]  # not in the smallest
    return ClipsOneGroup(groups, lr=0.1)


def _twice(ddp):
    return [_sgd(ddp)] * 2


def _with_pre_hook(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _foreign(ddp):
    return torch.optim.SGD([*ddp.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)


def _sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


def _zero(ddp):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns, which pytest refuses

    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)


REFUSED = {
    "LBFGS": (lambda ddp: torch.optim.LBFGS(ddp.parameters()), {}, UnsupportedOptimizerError, "closure"),
    "closure": (
        lambda ddp: NeedsClosure(ddp.parameters(), lr=0.1),
        {"mode": OverlapMode.AFTER_REDUCE},
        UnsupportedOptimizerError,
        "closure",
    ),
    "ZeRO": (_zero, {}, UnsupportedOptimizerError, "communicates"),
    "couples": (
        lambda ddp: ClipsItself(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "AFTER_REDUCE",
    ),
    "group counter": (
        lambda ddp: CountsCalls(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "option 'calls'",
    ),
    "own counter": (
        lambda ddp: CountsInside(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "'calls'",
    ),
    "counter in a dict": (
        lambda ddp: CountsInDict(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "'clock'",
    ),
    "counter in the state": (
        lambda ddp: CountsInState(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "belongs to no parameter",
    ),
    "noise": (lambda ddp: Noisy(ddp.parameters(), lr=0.1), {}, UnsupportedOptimizerError, "random numbers"),
    "couples, in a warm-up": (_warming_up, {}, UnsupportedOptimizerError, "AFTER_REDUCE"),
    "wrapper": (lambda ddp: Wraps(_sgd(ddp)), {}, UnsupportedOptimizerError, "'base'"),
    "wrapper, in a list": (
        lambda ddp: Wraps(_sgd(ddp), within=lambda base: {"all": [base]}),
        {"mode": OverlapMode.AFTER_REDUCE},
        UnsupportedOptimizerError,
        "'base'",
    ),
    "steps elsewhere": (_elsewhere, {}, UnsupportedOptimizerError, "not in its groups"),
    "moves nothing": (
        lambda ddp: Idle(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "does not move",
    ),
    "differentiable": (
        lambda ddp: torch.optim.SGD(ddp.parameters(), lr=0.1, differentiable=True),
        {},
        UnsupportedOptimizerError,
        "differentiable",
    ),
    "couples in one group": (_clips_one_group, {}, UnsupportedOptimizerError, "AFTER_REDUCE"),
    "compiled step": (_compiled, {}, UnsupportedOptimizerError, "is compiled"),
    "compiled class": (
        lambda ddp: CompiledClass(ddp.parameters()),
        {},
        UnsupportedOptimizerError,
        "is compiled",
    ),
    "compiled inside": (
        lambda ddp: CompiledInside(ddp.parameters()),
        {},
        UnsupportedOptimizerError,
        "calls a compiled function",
    ),
    "compiled step, after the reduction": (
        _compiled,
        {"mode": OverlapMode.AFTER_REDUCE},
        UnsupportedOptimizerError,
        "is compiled",
    ),
    "communicates": (
        lambda ddp: Communicates(ddp.parameters(), lr=0.1),
        {},
        UnsupportedOptimizerError,
        "c10d::allreduce_",
    ),
    "given twice": (_twice, {}, ConfigError, "given twice"),
    "unused after the reduction": (
        _sgd,
        {"mode": OverlapMode.AFTER_REDUCE, "unused": "step"},
        ConfigError,
        "unused='step'",
    ),
    "replaced step": (_replaced, {}, UnsupportedOptimizerError, "replaced"),
    "pre-hook": (_with_pre_hook, {}, ConfigError, "pre-hook"),
    "foreign parameter": (_foreign, {}, ConfigError, "group 0 of SGD"),
    "global norm": (_sgd, {"clip": GlobalNorm(1.0)}, ConfigError, "AFTER_REDUCE"),
    "scaler": (_sgd, {"scaler": torch.amp.GradScaler("cpu")}, ConfigError, "AFTER_REDUCE"),
    "no optimizer": (lambda _: [], {}, ConfigError, "no optimizer"),
    "mode": (_sgd, {"mode": "bucket"}, TypeError, "OverlapMode"),
    "clip": (_sgd, {"clip": 1.0}, TypeError, "ClipPolicy"),
    "unused": (_sgd, {"unused": "zero"}, ValueError, "'skip' or 'step'"),
    "optimizer": (lambda _: [torch.nn.Linear(2, 2)], {}, TypeError, "Linear"),
}


def _refused(name, ddp):
    make, options, kind, text = REFUSED[name]
    optimizer = make(ddp)
    before = [p.detach().clone() for p in ddp.parameters()]
    with pytest.raises(kind, match=text):
        overlap_optimizer(ddp, optimizer, **options)
    assert issubclass(kind, OverlapError) or kind in (TypeError, ValueError)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    # The trial must leave nothing behind.
    clock = getattr(optimizer, "clock", {"calls": 0})
    kept = same(before, [p.detach() for p in ddp.parameters()])
    return kept and not optimizer.state and clock == {"calls": 0}


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


def _odd_run(*, overlap, view):
    ddp = DistributedDataParallel(Odd(), bucket_cap_mb=0.0001, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    if overlap:
        overlap_optimizer(ddp, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(2, 8, generator=generator)).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()], optimizer.state_dict()


def _refusals(rank):
    ddp = make_ddp()
    seen = {name: _refused(name, ddp) for name in REFUSED}
    overlap_optimizer(ddp, _sgd(ddp))  # none of the refused calls has left a hook
    with pytest.raises(ConfigError, match="remove"):
        overlap_optimizer(ddp, _sgd(ddp))
    hooked = make_ddp()
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigError, match="allreduce_hook"):
        overlap_optimizer(hooked, _sgd(hooked))
    _refuses_behind_a_built_in_hook()
    with pytest.raises(TypeError, match="Net"):
        overlap_optimizer(Net(), _sgd(hooked))
    ignoring = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["layers.0.weight"])
    ddp = DistributedDataParallel(ignoring)
    with pytest.raises(ConfigError, match="never be stepped"):
        overlap_optimizer(ddp, _sgd(ddp))
    _refuses_ddp_options()
    return seen


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
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp(batches(1)[0]).square().sum().backward()
    assert same(before, [p.detach() for p in ddp.parameters()])
    optimizer.step()
    assert not same(before, [p.detach() for p in ddp.parameters()])
    in_backward = make_ddp()
    in_backward._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="built-in"):
            in_backward(batches(1)[0])


def _refuses_ddp_options():
    mixed, skipping = make_ddp(), make_ddp()
    # Set afterwards: one needs a GPU if torch is built with CUDA, the other is not in every torch.
    mixed.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    skipping.skip_all_reduce_unused_params = True
    for name, ddp in {"mixed_precision": mixed, "skip_all_reduce_unused_params": skipping}.items():
        for mode in OverlapMode:
            with pytest.raises(ConfigError, match=name):
                overlap_optimizer(ddp, _sgd(ddp), mode=mode)


def test_refused_with_a_reason():
    for rank in run_ranks(_refusals, 1, timeout=120):
        assert rank == dict.fromkeys(REFUSED, True)


class WithEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.embedding(x).mean(1))


def _sparse_run(make_optimizers, *, overlap, mode=OverlapMode.BUCKET):
    ddp = DistributedDataParallel(WithEmbedding(), bucket_cap_mb=0.0001)
    optimizers = make_optimizers(ddp)
    handle = overlap_optimizer(ddp, optimizers, mode=mode) if overlap else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(torch.randint(50, (4, 3), generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    result = (
        [p.detach().clone() for p in ddp.parameters()],
        [copy.deepcopy(o.state_dict()) for o in optimizers],
    )
    if handle is not None:
        report = handle.wait()
        assert report.stepped == tuple(range(report.buckets))
        ddp.module.linear.zero_grad()  # the sparse gradient is still there
        with pytest.raises(DoubleBackwardError, match="zero_grad"):
            ddp(torch.randint(50, (4, 3), generator=generator)).square().sum().backward()
    return result


def _odd_options(mode):
    """Options whose ``==`` is false or ambiguous with themselves do not count as changed."""
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    optimizer.param_groups[0].update(best=float("nan"), mask=np.ones(3), tags=[torch.ones(3)])
    overlap_optimizer(ddp, optimizer, mode=mode)
    before = [p.detach().clone() for p in ddp.parameters()]
    for x in batches(2):
        ddp(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return not any(torch.equal(p, one) for p, one in zip(ddp.parameters(), before, strict=True))


def _sparse(_):
    supported = {
        "SGD": one_group(torch.optim.SGD, {"lr": 0.1}),
        "Adagrad": one_group(torch.optim.Adagrad, {"lr": 0.1}),
        "SparseAdam": lambda ddp: [
            torch.optim.SparseAdam(ddp.module.embedding.parameters(), lr=0.01),
            torch.optim.AdamW(ddp.module.linear.parameters(), lr=0.01),
        ],
    }
    seen = {
        (name, mode.name): same(_sparse_run(make, overlap=False), _sparse_run(make, overlap=True, mode=mode))
        for name, make in supported.items()
        for mode in OverlapMode
    }
    for view in (False, True):
        seen["odd", view] = same(*[_odd_run(overlap=overlap, view=view) for overlap in (False, True)])
    for mode in OverlapMode:
        ddp = DistributedDataParallel(WithEmbedding())
        with pytest.raises(UnsupportedGradientError, match=r"embedding\.weight"):
            overlap_optimizer(ddp, torch.optim.AdamW(ddp.parameters()), mode=mode)
    with pytest.raises(ConfigError, match="sparse"):
        overlap_optimizer(ddp, _sgd(ddp), mode=OverlapMode.AFTER_REDUCE, clip=GlobalNorm(1.0))
    # Optimizers that couple parameters may step all at once.
    seen["couples"] = not differences(
        one_group(ClipsItself, {"lr": 0.1}), options={"mode": OverlapMode.AFTER_REDUCE}
    )
    seen["group counter"] = not differences(
        one_group(CountsCalls, {"lr": 0.1}), options={"mode": OverlapMode.AFTER_REDUCE}
    )
    for mode in OverlapMode:
        seen["odd options", mode.name] = _odd_options(mode)
    frozen = make_ddp()
    frozen.module.layers[1].weight.requires_grad_(False)
    overlap_optimizer(frozen, _sgd(frozen))  # a frozen parameter needs no step
    return seen


def test_sparse_and_odd_parameters_are_stepped_or_refused():
    for rank in run_ranks(_sparse, 2, timeout=120):
        assert len(rank) == 12
        assert all(rank.values()), rank


def _unused_step(_):
    """With unused='step' weight decay moves an unused layer; by default it does not."""
    make = one_group(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5})
    moved = {}
    for unused in ("skip", "step"):
        runs = [
            train(
                make,
                overlap=True,
                steps=steps,
                find_unused_parameters=True,
                skip=lambda step: (1,) if step else (),
                options={"unused": unused},
            )["parameters"]
            for steps in (1, 2)
        ]
        changed = [not torch.equal(one, other) for one, other in zip(*runs, strict=True)]
        moved[unused] = changed
    return moved


def test_a_parameter_that_no_rank_has_used_is_skipped_or_stepped():
    weight = 4  # conv.weight, conv.bias, then two per layer
    for rank in run_ranks(_unused_step, 2, timeout=60):
        assert rank["skip"][weight] is False
        assert rank["step"][weight] is True
        assert all(rank["skip"][:2])
