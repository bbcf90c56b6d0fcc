"""The functions with PyTorch's names, on CPUs: the bits of the ordinary loop."""

import copy
import functools
import io
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from overlap_runs import OPTIMIZERS, Net, batches, make_ddp, named, require_held, run_parts, same, snapshot
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    UnsupportedOptimizerError,
    apply_optim_in_backward_hook,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
    hook_then_optimizer,
    overlap_optimizer,
    register_fused_optim,
)
from dist_utils.testing import run_ranks


class FunctionalSGD:
    """Like PyTorch's functional optimizers: steps one parameter with its gradient."""

    def __init__(self, lr):
        self.lr = lr

    def step_param(self, param, grad):
        if grad is not None:
            param.add_(grad, alpha=-self.lr)


def _train(ddp, optimizer=None, steps=3):
    for x in batches(steps):
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
    return snapshot(ddp)


def _ordinary(make, options, **ddp_options):
    ddp = make_ddp(**ddp_options)
    return _train(ddp, make(ddp.parameters(), **options))


def _hook_then_optimizer(seen):
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        ddp.register_comm_hook(
            None, hook_then_optimizer(allreduce_hook, OptimizerHookState(FunctionalSGD(0.1)))
        )
        seen["functional", view] = same(_train(ddp), _ordinary(torch.optim.SGD, {"lr": 0.1}))
        with pytest.raises(DoubleBackwardError):
            ddp(batches(1)[0]).sum().backward()
    for name in ("AdamW", "NAdam", "Adafactor"):
        make, options = OPTIMIZERS[name]
        ddp = make_ddp()
        state = OptimizerHookState(make(ddp.parameters(), **options))
        ddp.register_comm_hook(dist.group.WORLD, hook_then_optimizer(allreduce_hook, state))
        seen["torch.optim", name] = same(_train(ddp), _ordinary(make, options))
    ddp = make_ddp()
    chosen = list(ddp.module.layers.parameters())
    before = snapshot(ddp)
    state = OptimizerHookState(FunctionalSGD(0.1), chosen)
    assert state.params_to_optimize == set(chosen)
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
    moved = [not torch.equal(one, other) for one, other in zip(before, _train(ddp), strict=True)]
    seen["params"] = moved == [False, False] + [True] * 8


def _step_left_in_the_loop(seen):
    """It finds nothing left to do, and a scheduler does not warn without it."""
    for name, call_step in (("step in the loop", True), ("no step in the loop", False)):
        runs = []
        for ours in (False, True):
            ddp = make_ddp()
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            if ours:
                hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer))
                ddp.register_comm_hook(None, hook)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                for x in batches(3):
                    optimizer.zero_grad()
                    ddp(x).square().sum().backward()
                    if call_step or not ours:
                        optimizer.step()
                    scheduler.step()
            runs.append(snapshot(ddp))
        seen[name] = same(*runs)
    embeddings = torch.nn.Sequential(*[torch.nn.Embedding(10, 4, sparse=True) for _ in range(2)])
    OptimizerHookState(torch.optim.SparseAdam(embeddings.parameters()))


def _pytorchs_functional(seen):
    """PyTorch's own functional optimizers work, too, with their deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim.utils import as_functional_optim  # noqa: PLC0415

        functional = as_functional_optim(torch.optim.AdamW, 0.01, weight_decay=0.1)
    ddp = make_ddp()
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(functional)))
    seen["pytorch's functional"] = same(
        _train(ddp), _ordinary(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False})
    )


def _register_fused_optim(seen):
    ddp = make_ddp()
    handle = register_fused_optim(ddp, torch.optim.Adam, 0.01, betas=(0.8, 0.9))
    seen["fused optim"] = same(_train(ddp), _ordinary(torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}))
    assert isinstance(handle.optimizers[0], torch.optim.Adam)
    ddp = make_ddp()
    before = snapshot(ddp)
    register_fused_optim(ddp, torch.optim.SGD, 0.1, optim_params=ddp.module.conv.parameters())
    moved = [not torch.equal(one, other) for one, other in zip(before, _train(ddp), strict=True)]
    seen["optim_params"] = moved == [True, True] + [False] * 8


def _in_backward(seen):
    for name in ("SGD momentum", "AdamW", "Adadelta"):
        make, options = OPTIMIZERS[name]
        for view in (False, True):
            net = Net()
            apply_optimizer_in_backward(make, net.parameters(), options)
            ddp = DistributedDataParallel(net, bucket_cap_mb=0.002, gradient_as_bucket_view=view)
            assert len(get_in_backward_optimizers(ddp)) == 10
            seen["in backward", name, view] = same(_train(ddp), _ordinary(make, options))
            assert all(parameter.grad is None for parameter in net.parameters())
    for state in (None, dist.group.WORLD, weakref.ref):
        net = Net()
        apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
        ddp.register_comm_hook(
            weakref.ref(ddp) if state is weakref.ref else state, apply_optim_in_backward_hook(False)
        )
        seen["by hand", str(state)] = same(_train(ddp), _ordinary(torch.optim.SGD, {"lr": 0.1}))


def _in_backward_unused(seen):
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    runs = []
    for ours in (False, True):
        ddp = make_ddp(find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), **options)
        if ours:
            apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), options)
        for step, x in enumerate(batches(4)):
            ddp.module.skipped = (1,) if step == 2 else ()
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            if not ours:
                optimizer.step()
        runs.append(snapshot(ddp))
    seen["in backward, unused"] = same(*runs)


def _in_backward_wrapped_again(seen):
    net, ordinary = Net(), Net()
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(ordinary.parameters(), lr=0.1)
    for wrapping in range(2):
        ours = _train(DistributedDataParallel(net, bucket_cap_mb=0.002))
        theirs = _train(DistributedDataParallel(ordinary, bucket_cap_mb=0.002), optimizer)
        seen["wrapped", wrapping] = same(ours, theirs)
    torch.save(net, io.BytesIO())


def _copies(seen):
    """A copy of an overlapped model averages, and can be overlapped itself."""
    ddp = make_ddp()
    overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    _train(ddp)
    torch.save(ddp, io.BytesIO())
    one, other = copy.deepcopy(ddp), copy.deepcopy(ddp)
    before = snapshot(one)
    seen["copy averages"] = same(_train(one), before)
    overlap_optimizer(one, torch.optim.SGD(one.parameters(), lr=0.1))
    seen["copy overlapped"] = same(_train(one), _train(other, torch.optim.SGD(other.parameters(), lr=0.1)))
    with pytest.raises(ConfigError, match="remove"):
        overlap_optimizer(one, torch.optim.SGD(one.parameters(), lr=0.1))


def _in_backward_accumulates(seen):
    ddp, ordinary = make_ddp(), make_ddp()
    apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(ordinary.parameters(), lr=0.1)
    for first, second in zip(batches(3), batches(3, seed=1), strict=True):
        for model in (ddp, ordinary):
            with model.no_sync():
                model(first).square().sum().backward()
            model(second).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["in backward, no_sync"] = same(snapshot(ddp), snapshot(ordinary))


def _in_backward_refuses(seen):
    net = Net()
    with pytest.raises(UnsupportedOptimizerError, match="closure"):
        apply_optimizer_in_backward(torch.optim.LBFGS, copy.deepcopy(net).parameters(), {})
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigError, match="overlap_optimizer"):
        ddp(batches(1)[0])
    ddp = DistributedDataParallel(net)
    partial = functools.partial(allreduce_hook)
    partial.__name__ = partial.__qualname__ = "optimizers_in_backward_hook"  # still another hook
    ddp.register_comm_hook(None, partial)
    with pytest.raises(ConfigError, match="overlap_optimizer"):
        ddp(batches(1)[0])
    seen["another hook"] = True


PARTS = named(
    _hook_then_optimizer,
    _step_left_in_the_loop,
    _pytorchs_functional,
    _register_fused_optim,
    _in_backward,
    _in_backward_unused,
    _in_backward_wrapped_again,
    _copies,
    _in_backward_accumulates,
    _in_backward_refuses,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_the_bits_of_the_ordinary_loop(ranks, name):
    require_held(ranks, name)


def test_outside_of_ddp_each_backward_steps():
    nets = [Net(), Net()]
    apply_optimizer_in_backward(torch.optim.AdamW, nets[0].parameters(), {"lr": 0.01})
    optimizer = torch.optim.AdamW(nets[1].parameters(), lr=0.01)
    for x in batches(3, rank=0):
        nets[0](x).square().sum().backward()
        assert all(parameter.grad is None for parameter in nets[0].parameters())
        optimizer.zero_grad()
        nets[1](x).square().sum().backward()
        optimizer.step()
    assert same(*[[parameter.detach() for parameter in net.parameters()] for net in nets])
    without = Net()
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, False)
    without(batches(1, rank=0)[0]).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(without.parameters(), Net().parameters(), strict=True))
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, True)  # now with a hook
    without(batches(1, rank=0)[0]).sum().backward()
    assert not any(torch.equal(p, q) for p, q in zip(without.parameters(), Net().parameters(), strict=True))


def test_a_non_optimizer_is_refused():
    with pytest.raises(ValueError, match="step_param"):
        OptimizerHookState(object())
    with pytest.raises(TypeError, match="communication hook"):
        hook_then_optimizer(None, OptimizerHookState(FunctionalSGD(0.1)))
    with pytest.raises(TypeError, match="OptimizerHookState"):
        hook_then_optimizer(allreduce_hook, FunctionalSGD(0.1))
