"""The functions with PyTorch's names, on CPUs: the bits of the ordinary loop."""

import copy
import functools
import io
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    OPTIMIZERS,
    Net,
    as_ordinary,
    assert_same,
    backward,
    batches,
    changed,
    ends,
    make_ddp,
    on_ranks,
    snapshot,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    UnsupportedOptimizerError,
    apply_optim_in_backward_hook,
    apply_optimizer_in_backward,
    declare_steps_per_parameter,
    get_in_backward_optimizers,
    hook_then_optimizer,
    overlap_optimizer,
    register_fused_optim,
)


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
        backward(ddp, x)
        if optimizer is not None:
            optimizer.step()
    return snapshot(ddp)


def _ordinary(make, options):
    ddp = make_ddp()
    return _train(ddp, make(ddp.parameters(), **options))


def _register(ddp, optimizer, *params, state=None):
    hook_state = OptimizerHookState(optimizer, *params)
    ddp.register_comm_hook(state, hook_then_optimizer(allreduce_hook, hook_state))
    return hook_state


def check_hook_then_optimizer():
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        _register(ddp, FunctionalSGD(0.1))
        assert_same(_train(ddp), _ordinary(torch.optim.SGD, {"lr": 0.1}))
        with pytest.raises(DoubleBackwardError):
            backward(ddp, batches(1)[0])
    for name in ("AdamW", "NAdam", "Adafactor"):
        make, options = OPTIMIZERS[name]
        ddp = make_ddp()
        _register(ddp, make(ddp.parameters(), **options), state=dist.group.WORLD)
        assert_same(_train(ddp), _ordinary(make, options))
    ddp = make_ddp()
    chosen = list(ddp.module.layers.parameters())
    before = snapshot(ddp)
    assert _register(ddp, FunctionalSGD(0.1), chosen).params_to_optimize == set(chosen)
    _train(ddp)
    assert_same(changed(ddp, before), list(range(2, 10)))
    embeddings = torch.nn.Sequential(*[torch.nn.Embedding(10, 4, sparse=True) for _ in range(2)])
    OptimizerHookState(torch.optim.SparseAdam(embeddings.parameters()))


@as_ordinary((True,), (False,))
def check_step_left_in_the_loop(call_step, *, overlapped):
    """It finds nothing left to do, and a scheduler does not warn without it."""
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if overlapped:
        _register(ddp, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for x in batches(3):
            optimizer.zero_grad()
            backward(ddp, x)
            if call_step or not overlapped:
                optimizer.step()
            scheduler.step()
    return ends(ddp, optimizer)


def check_pytorchs_functional():
    """PyTorch's own functional optimizers work, too, with their deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim.utils import as_functional_optim  # noqa: PLC0415

        functional = as_functional_optim(torch.optim.AdamW, 0.01, weight_decay=0.1)
    ddp = make_ddp()
    _register(ddp, functional)
    options = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
    assert_same(_train(ddp), _ordinary(torch.optim.AdamW, options))


def check_register_fused_optim():
    ddp = make_ddp()
    handle = register_fused_optim(ddp, torch.optim.Adam, 0.01, betas=(0.8, 0.9))
    assert_same(_train(ddp), _ordinary(torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}))
    assert isinstance(handle.optimizers[0], torch.optim.Adam)
    ddp = make_ddp()
    before = snapshot(ddp)
    register_fused_optim(ddp, torch.optim.SGD, 0.1, optim_params=ddp.module.conv.parameters())
    _train(ddp)
    assert_same(changed(ddp, before), [0, 1])


@declare_steps_per_parameter
class Own(torch.optim.SGD):
    """An optimizer that this package does not know."""


def check_declared_class():
    for step_inside in (
        lambda ddp: register_fused_optim(ddp, Own, 0.1),
        lambda ddp: apply_optimizer_in_backward(Own, ddp.module.parameters(), {"lr": 0.1}),
        lambda ddp: _register(ddp, Own(ddp.parameters(), lr=0.1)),
    ):
        ddp = make_ddp()
        step_inside(ddp)
        assert_same(_train(ddp), _ordinary(torch.optim.SGD, {"lr": 0.1}))


def check_in_backward():
    for name in ("SGD momentum", "AdamW", "Adadelta"):
        make, options = OPTIMIZERS[name]
        for view in (False, True):
            net = Net()
            apply_optimizer_in_backward(make, net.parameters(), options)
            ddp = DistributedDataParallel(net, bucket_cap_mb=0.002, gradient_as_bucket_view=view)
            assert len(get_in_backward_optimizers(ddp)) == 10
            assert_same(_train(ddp), _ordinary(make, options))
            assert all(parameter.grad is None for parameter in net.parameters())
    for state in (None, dist.group.WORLD, weakref.ref):
        net = Net()
        apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
        ddp.register_comm_hook(
            weakref.ref(ddp) if state is weakref.ref else state, apply_optim_in_backward_hook(False)
        )
        assert_same(_train(ddp), _ordinary(torch.optim.SGD, {"lr": 0.1}))


@as_ordinary((False,), (True,))
def check_in_backward_unused(accumulates, *, overlapped):
    ddp = make_ddp(find_unused_parameters=True)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(ddp.parameters(), **options)
    if overlapped:
        apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), options)
    for step, (first, second) in enumerate(zip(batches(4), batches(4, seed=1), strict=True)):
        ddp.module.skipped = (1,) if step == 2 else ()
        if accumulates:
            with ddp.no_sync():
                backward(ddp, first)
        backward(ddp, second)
        if not overlapped:
            optimizer.step()
        ddp.zero_grad()
    return snapshot(ddp)


def check_in_backward_wrapped_again():
    net, ordinary = Net(), Net()
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(ordinary.parameters(), lr=0.1)
    for _ in range(2):
        ours = _train(DistributedDataParallel(net, bucket_cap_mb=0.002))
        theirs = _train(DistributedDataParallel(ordinary, bucket_cap_mb=0.002), optimizer)
        assert_same(ours, theirs)
    torch.save(net, io.BytesIO())


def check_copies():
    """A copy of an overlapped model averages, and can be overlapped itself."""
    ddp = make_ddp()
    overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    _train(ddp)
    torch.save(ddp, io.BytesIO())
    one, other = copy.deepcopy(ddp), copy.deepcopy(ddp)
    before = snapshot(one)
    assert_same(_train(one), before)
    overlap_optimizer(one, torch.optim.SGD(one.parameters(), lr=0.1))
    assert_same(_train(one), _train(other, torch.optim.SGD(other.parameters(), lr=0.1)))
    with pytest.raises(ConfigError, match="remove"):
        overlap_optimizer(one, torch.optim.SGD(one.parameters(), lr=0.1))


def check_in_backward_refuses():
    net = Net()
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
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


check = on_ranks(__name__, timeout=120)


def test_the_bits_of_the_ordinary_loop(check):
    check()


def test_outside_of_ddp_each_backward_steps():
    nets = [Net(), Net()]
    apply_optimizer_in_backward(torch.optim.AdamW, nets[0].parameters(), {"lr": 0.01})
    optimizer = torch.optim.AdamW(nets[1].parameters(), lr=0.01)
    for x in batches(3, rank=0):
        backward(nets[0], x)
        assert all(parameter.grad is None for parameter in nets[0].parameters())
        optimizer.zero_grad()
        backward(nets[1], x)
        optimizer.step()
    assert_same(*map(snapshot, nets))
    without = Net()
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, False)
    backward(without, batches(1, rank=0)[0])
    assert_same(snapshot(without), snapshot(Net()))
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, True)  # now with a hook
    backward(without, batches(1, rank=0)[0])
    assert len(changed(without, snapshot(Net()))) == 10


def test_a_non_optimizer_is_refused():
    with pytest.raises(ValueError, match="step_param"):
        OptimizerHookState(object())
    with pytest.raises(TypeError, match="communication hook"):
        hook_then_optimizer(None, OptimizerHookState(FunctionalSGD(0.1)))
    with pytest.raises(TypeError, match="OptimizerHookState"):
        hook_then_optimizer(allreduce_hook, FunctionalSGD(0.1))
