"""The functions with PyTorch's names: the bits of the ordinary loop."""

import copy
import functools
import gc
import io
import subprocess
import sys
import warnings
import weakref

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import Loop
from parity_cases import OPTIMIZERS
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook, bf16_compress_wrapper
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


@declare_steps_per_parameter
class Declared(torch.optim.SGD):
    """An optimizer that this package does not know."""


def _hook(ddp, optimizer, *params, state=None):
    hook_state = OptimizerHookState(optimizer, *params)
    ddp.register_comm_hook(state, hook_then_optimizer(allreduce_hook, hook_state))
    return hook_state


def _functional_of_pytorch(ddp):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        from torch.distributed.optim.utils import as_functional_optim  # noqa: PLC0415

        return as_functional_optim(torch.optim.AdamW, 0.01, weight_decay=0.1)


def _in_backward(ddp, kind, options):
    apply_optimizer_in_backward(kind, ddp.module.parameters(), options)


def _hook_in_backward(ddp, state):
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    ddp.register_comm_hook(state, apply_optim_in_backward_hook(False))


def _pass_over(model, data, optimizer):
    """Train with the optimizer, or without, if ``backward()`` steps."""
    for x in data:
        runs.backward(model, x)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()


def _of(name):
    kind, options = OPTIMIZERS[name]
    return lambda ddp: kind(ddp.parameters(), **options)


ADAMW_LOOP = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
WAYS = {
    "hook_then_optimizer": (lambda ddp: _hook(ddp, FunctionalSGD(0.1)), runs.sgd),
    "PyTorch's functional": (
        lambda ddp: _hook(ddp, _functional_of_pytorch(ddp)),
        lambda ddp: torch.optim.AdamW(ddp.parameters(), **ADAMW_LOOP),
    ),
    "hook_then_optimizer, NAdam": (
        lambda ddp: _hook(ddp, _of("NAdam")(ddp), state=dist.group.WORLD),
        _of("NAdam"),
    ),
    "hook_then_optimizer, declared": (lambda ddp: _hook(ddp, Declared(ddp.parameters(), lr=0.1)), runs.sgd),
    "register_fused_optim": (
        lambda ddp: register_fused_optim(ddp, torch.optim.Adam, 0.01, betas=(0.8, 0.9)),
        lambda ddp: torch.optim.Adam(ddp.parameters(), lr=0.01, betas=(0.8, 0.9)),
    ),
    "register_fused_optim, declared": (lambda ddp: register_fused_optim(ddp, Declared, 0.1), runs.sgd),
    "in backward": (lambda ddp: _in_backward(ddp, *OPTIMIZERS["SGD momentum"]), _of("SGD momentum")),
    "in backward, Adadelta": (lambda ddp: _in_backward(ddp, *OPTIMIZERS["Adadelta"]), _of("Adadelta")),
    "in backward, declared": (lambda ddp: _in_backward(ddp, Declared, {"lr": 0.1}), runs.sgd),
    "hook in backward": (lambda ddp: _hook_in_backward(ddp, None), runs.sgd),
    "hook in backward, group": (lambda ddp: _hook_in_backward(ddp, dist.group.WORLD), runs.sgd),
    "hook in backward, model": (lambda ddp: _hook_in_backward(ddp, weakref.ref(ddp)), runs.sgd),
}


class DropIn(Loop):
    """A loop in which something else than an overlap steps in ``backward()``, if anything does."""

    def overlap(self):
        if self._options is not None:
            self._options(self.ddp)

    def step(self):
        if self._options is None:
            super().step()


THREE_STEPS = "overlap train train train"
LOOPS = {
    name: (THREE_STEPS, {"gradient_as_bucket_view": bool(n % 2)}, *WAYS[name]) for n, name in enumerate(WAYS)
}
LOOPS |= {
    # It takes part in averages under join() though its model is never called.
    f"{name}, a rank without any data": ("overlap join train_more end", {}, *WAYS[name])
    for name in ("hook_then_optimizer", "register_fused_optim", "in backward")
}
LOOPS |= {
    f"in backward, unused{name}": (words, {"find_unused_parameters": True}, *WAYS["in backward"])
    for name, words in {
        "": "overlap train train skip train use train",
        ", no_sync": "overlap accumulate train accumulate train skip accumulate train use accumulate train",
    }.items()
}


@runs.cases(LOOPS)
def check_bits(words, options, step_inside, make):
    found, ordinary = (DropIn(lambda ddp: [make(ddp)], inside, **options) for inside in (step_inside, None))
    for loop in (found, ordinary):
        loop.follow(words)
    runs.assert_same(runs.snapshot(found.ddp), runs.snapshot(ordinary.ddp))


class WithHook(Loop):
    """A loop whose hook steps."""

    def overlap(self):
        if self._options is not None:
            _hook(self.ddp, self.optimizers[0])


@runs.cases({"step() is called": ("closure",), "not": ("zero backward left_out",)})
def check_step_left_in_the_loop(words):
    """It finds nothing left to do, also with a closure, and a scheduler does not warn without it."""
    found, ordinary = (WithHook(one_sgd, overlap, scheduled=True) for overlap in ({}, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loop in (found, ordinary):
            loop.follow("overlap" + 3 * f" {words} schedule")
    runs.assert_same(found.outcome(), ordinary.outcome())


def one_sgd(ddp):
    return [runs.sgd(ddp)]


@runs.cases(
    {
        "hook": (lambda ddp: _hook(ddp, FunctionalSGD(0.1), list(ddp.module.conv.parameters())), [0, 1]),
        "hook, none of them": (lambda ddp: _hook(ddp, FunctionalSGD(0.1), []), []),
        "in backward, none of them": (
            lambda ddp: ddp.register_comm_hook(None, apply_optim_in_backward_hook(False)),
            [],
        ),
        "fused": (
            lambda ddp: register_fused_optim(
                ddp, torch.optim.SGD, 0.1, optim_params=ddp.module.conv.parameters()
            ),
            [0, 1],
        ),
    }
)
def check_some_parameters(step_inside, moved):
    ddp = runs.make_ddp()
    before = runs.snapshot(ddp)
    step_inside(ddp)
    runs.backward(ddp, runs.batches(1)[0])
    runs.assert_same(runs.changed(ddp, before), moved)


def check_what_is_returned():
    ddp = runs.make_ddp()
    handle = register_fused_optim(ddp, torch.optim.Adam, 0.01)
    assert [type(one) for one in handle.optimizers] == [torch.optim.Adam]
    ddp = runs.make_ddp()
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    assert [type(one) for one in get_in_backward_optimizers(ddp)] == [torch.optim.SGD] * 10
    runs.backward(ddp, runs.batches(1)[0])
    runs.assert_same(runs.gradients(ddp), [None] * 10)


def check_unused_is_moved_by_hook_then_optimizer():
    """As in PyTorch, a parameter that no rank has used is stepped with a zero gradient; each pass steps."""
    ddp = runs.make_ddp(find_unused_parameters=True)
    ddp.module.skipped = (1,)
    _hook(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.5))
    before = ddp.module.layers[1].weight.detach().clone()
    runs.backward(ddp, runs.batches(1)[0])
    runs.assert_same(ddp.module.layers[1].weight.detach(), before.add(before * 0.5, alpha=-0.1))
    with pytest.raises(DoubleBackwardError):
        runs.backward(ddp, runs.batches(1)[0])


@runs.cases(
    {
        option: (option,)
        for option in ("skip_all_reduce_unused_params", "require_manual_backward_finalization")
    }
)
def check_options_of_a_model_that_is_called(option):
    """Buckets that would be left out, or come too late: refused when the model is called."""
    ddp = runs.make_ddp()
    setattr(ddp, option, True)  # not in every torch
    _hook(ddp, runs.sgd(ddp))
    for _ in range(2):
        with pytest.raises(ConfigError, match=option):
            ddp(runs.batches(1)[0])


def check_a_hook_inside_another():
    """It cannot find its model."""
    ddp = runs.make_ddp()
    inner = hook_then_optimizer(allreduce_hook, OptimizerHookState(runs.sgd(ddp)))
    ddp.register_comm_hook(None, bf16_compress_wrapper(inner))
    with pytest.raises(ConfigError, match="this hook has no engine"):
        runs.backward(ddp, runs.batches(1)[0])


def _compiled(net):
    """Compiled before it is called; the compiler wants the first bucket to be the smallest."""
    return torch.compile(runs.make_ddp(net, bucket_cap_mb=1), backend="eager")


@runs.cases(
    {
        "replicated": (lambda net: replicate(net, bucket_cap_mb=0.001), runs.Net),
        "compiled": (_compiled, runs.Net),
        "a tied weight": (runs.make_ddp, functools.partial(runs.Net, tied=True)),
    }
)
@runs.as_ordinary
def check_in_backward_wrapped(wrap, make_net, *, overlapped):
    """It averages before it steps; a weight that is given twice is stepped once by one call."""
    net = make_net()
    model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    if overlapped:
        parameters = [*net.parameters(), net.layers[0].weight, net.layers[3].weight]
        apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    _pass_over(model, runs.batches(3), None if overlapped else optimizer)
    return runs.snapshot(net)


@runs.as_ordinary
def check_in_backward_wrapped_again(*, overlapped):
    """By two models, one after the other; then the module is trained alone."""
    net = runs.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if overlapped:
        apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for wrap in (runs.make_ddp, runs.make_ddp, lambda net: net):
        model = wrap(net)
        _pass_over(model, runs.batches(2), None if overlapped else optimizer)
        del model
        gc.collect()
    torch.save(net, io.BytesIO())
    return runs.snapshot(net)


def check_in_backward_of_what_ddp_does_not_average():
    """An ignored parameter is stepped with this rank's gradient; one that was frozen is refused."""
    net = runs.Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["layers.0.weight"])
    ddp, before = runs.make_ddp(net), runs.snapshot(net)
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    runs.backward(ddp, runs.batches(1)[0])
    runs.assert_same(runs.changed(ddp, before), runs.EVERY)
    runs.assert_same(runs.gradients(ddp), [None] * 10)
    net = runs.Net()
    net.conv.requires_grad_(False)
    ddp = runs.make_ddp(net)
    net.conv.requires_grad_(True)
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(RuntimeError, match="is not one that this DDP model averages"):
        runs.backward(ddp, runs.batches(1)[0])
    net = torch.nn.Linear(4, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["weight"])
    ddp = runs.make_ddp(net)  # which averages it nevertheless, because it is the root module's
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    runs.backward(ddp, torch.full((1, 4), dist.get_rank() + 1.0))
    others = [torch.empty_like(net.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(others, net.weight.detach())
    runs.assert_same(others, [others[0]] * len(others))
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(4, 4, sparse=True), torch.nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    ddp, before = (
        runs.make_ddp(net, static_graph=True),
        runs.snapshot(net),
    )  # one bucket, without the sparse gradient
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    ddp(torch.tensor([[0, 1]])).sum().backward()
    runs.assert_same(runs.changed(ddp, before), [0, 1, 2])
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    named = [("0.weight", net[0].weight)]
    late = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": net[1].weight}
    ddp = runs.make_ddp(net, bucket_cap_mb=1, **late)  # torch 2.6 takes only an int here
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ConfigError, match="delay_all_reduce_named_params"):
        ddp(torch.ones(1, 4))
    ddp = runs.make_ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="built-in"):
            ddp(runs.batches(1)[0])


def _saved(ddp):
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _overlap(ddp):
    return overlap_optimizer(ddp, runs.sgd(ddp))


def _in_backward_sgd(ddp):
    _in_backward(ddp, torch.optim.SGD, {"lr": 0.1})


# What steps in the model, how it is copied, and what may step in the copy; ``None``: the ordinary loop.
COPIES = {
    "overlapped": (_overlap, copy.deepcopy, (None, _overlap)),
    "overlapped, saved": (_overlap, _saved, (None, _overlap)),
    "hook_then_optimizer": (WAYS["hook_then_optimizer"][0], copy.deepcopy, (None,)),
    "register_fused_optim": (WAYS["register_fused_optim"][0], copy.deepcopy, (None,)),
    "in backward": (_in_backward_sgd, copy.deepcopy, (None, _in_backward_sgd, _overlap)),
    "in backward, saved": (_in_backward_sgd, _saved, (None, _in_backward_sgd, _overlap)),
}


@runs.cases(COPIES)
def check_a_copy_averages_as_plain_ddp_does(step_inside, copied_by, ways):
    """It has no optimizers, and takes new ones, or an overlap."""
    ddp = runs.make_ddp()
    step_inside(ddp)
    runs.backward(ddp, runs.batches(1)[0])
    ddp.zero_grad()
    plain, before = runs.make_ddp(copy.deepcopy(ddp.module)), runs.snapshot(ddp)
    runs.train_on(plain, runs.sgd(plain), runs.batches(2))
    for begin in ways:
        copied = copied_by(ddp)
        optimizer = runs.sgd(copied) if begin is None else None
        if begin is not None:
            begin(copied)
        _pass_over(copied, runs.batches(2), optimizer)
        runs.assert_same(runs.snapshot(copied), runs.snapshot(plain))
    runs.assert_same(runs.changed(ddp, before), [])


def check_refused():
    net = runs.Net()
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
        apply_optimizer_in_backward(torch.optim.LBFGS, net.parameters(), {})
    runs.assert_same(get_in_backward_optimizers(net), [])
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = runs.make_ddp(net)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigError, match="overlap_optimizer"):
        ddp(runs.batches(1)[0])
    net = runs.Net()
    state = OptimizerHookState(runs.sgd(net))  # of one model only
    models = [runs.make_ddp(net) for _ in range(2)]
    for model in models:
        model.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
    runs.backward(models[0], runs.batches(1)[0])
    net.zero_grad()
    with pytest.raises(RuntimeError, match=r"SGD .*overlapped"):
        runs.backward(models[1], runs.batches(1)[0])


check = runs.on_ranks(__name__, timeout=120)


def test_drop_ins(check):
    check()


def test_outside_of_ddp_each_backward_steps():
    nets = [runs.Net(), runs.Net()]
    apply_optimizer_in_backward(torch.optim.AdamW, nets[0].parameters(), {"lr": 0.01})
    optimizer = torch.optim.AdamW(nets[1].parameters(), lr=0.01)
    for x in runs.batches(3, rank=0):
        runs.backward(nets[0], x)
        runs.assert_same(runs.gradients(nets[0]), [None] * 10)
        runs.train_on(nets[1], optimizer, [x])
    runs.assert_same(*map(runs.snapshot, nets))
    without = runs.Net()
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, False)
    runs.backward(without, runs.batches(1, rank=0)[0])
    runs.assert_same(runs.changed(without, runs.snapshot(runs.Net())), [])
    apply_optimizer_in_backward(torch.optim.SGD, without.parameters(), {"lr": 0.1}, True)  # now with a hook
    runs.backward(without, runs.batches(1, rank=0)[0])
    runs.assert_same(runs.changed(without, runs.snapshot(runs.Net())), runs.EVERY)


_COMPILES_BESIDE = """
import sys
import torch
import ddp_optim_overlap
heavy = {"torch._dynamo", "sympy"}
print(heavy & set(sys.modules))

def count(graph, _):
    graphs.append(graph)
    return graph.forward

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
for beside in (False, True):
    if beside:
        inner = torch.nn.Linear(4, 4)
        ddp_optim_overlap.apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    for fullgraph in (False, True):
        graphs = []
        torch.compiler.reset()
        torch.compile(net, backend=count, fullgraph=fullgraph)(torch.ones(2, 4))
        print(len(graphs))
print(torch.nn.modules.module._global_forward_pre_hooks)
"""


def test_other_modules_are_compiled_as_before():
    """Nor are they slower: no hook runs before the forward pass of every module."""
    command = [sys.executable, "-c", _COMPILES_BESIDE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["set()", "1", "1", "1", "1", "OrderedDict()"], done.stdout + done.stderr


def test_a_frozen_parameter_is_refused_before_anything_is_registered():
    net = runs.Net()
    net.layers[2].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    runs.assert_same(get_in_backward_optimizers(net), [])
    trained = [one for one in net.parameters() if one.requires_grad]
    apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
    other = runs.Net()
    other.layers[2].weight.requires_grad_(False)
    runs.train_on(
        other,
        torch.optim.SGD([one for one in other.parameters() if one.requires_grad], lr=0.1),
        runs.batches(1, 0),
    )
    runs.backward(net, runs.batches(1, 0)[0])
    runs.assert_same(runs.snapshot(net), runs.snapshot(other))


def test_a_non_optimizer_is_refused():
    with pytest.raises(ValueError, match="step_param"):
        OptimizerHookState(object())
    with pytest.raises(TypeError, match="communication hook"):
        hook_then_optimizer(None, OptimizerHookState(FunctionalSGD(0.1)))
    with pytest.raises(TypeError, match="OptimizerHookState"):
        hook_then_optimizer(allreduce_hook, FunctionalSGD(0.1))
