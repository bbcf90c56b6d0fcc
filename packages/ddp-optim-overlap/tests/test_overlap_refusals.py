"""What cannot give right results is refused, with a reason: at the call, in backward() or in step()."""

import contextlib
import copy
import types
from functools import partial

import numpy as np
import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import Loop, one_adamw
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    DoubleBackwardError,
    OptimizerHookState,
    StepError,
    UnsupportedGradientError,
    UnsupportedOptimizerError,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward

# Refused by overlap_optimizer: the model, the optimizer, options, the error and its words


def lbfgs(ddp):
    return torch.optim.LBFGS(ddp.parameters())


class TakesWhat(torch.nn.Module):
    """A sparse embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)


class OwnAdam(torch.optim.Adam):
    """Must be declared, and like Adam cannot step with sparse gradients."""


def _with_pre_hook(ddp):
    optimizer = runs.sgd(ddp)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _foreign(ddp):
    return torch.optim.SGD([*ddp.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)


def _hooked():
    ddp = runs.make_ddp()
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def _built_in():
    ddp = runs.make_ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return ddp


def _ignoring():
    net = runs.Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["layers.0.weight"])
    return runs.make_ddp(net)


def _overlapped():
    ddp = runs.make_ddp()
    overlap_optimizer(ddp, runs.sgd(ddp))
    return ddp


def _with_option(name, value):
    """Set it afterwards: one needs a GPU if torch is built with CUDA, the other is not in every torch."""
    ddp = runs.make_ddp()
    setattr(ddp, name, value)
    return ddp


def _sparse():
    return runs.make_ddp(TakesWhat())


def _static_of_two_dtypes():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
    return runs.make_ddp(net, static_graph=True)


def _sharing_memory():
    """Two layers that are tied by their values, and not by their parameters."""
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
    net[1].weight.data = net[0].weight.data
    return runs.make_ddp(net)


def _sliced():
    """Two layers whose weights are slices of one tensor, as of a flat parameter."""
    net, flat = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)]), torch.ones(2, 8, 8)
    for layer, weight in zip(net, flat, strict=True):
        layer.weight = torch.nn.Parameter(weight)
    return runs.make_ddp(net)


def _some(ddp):
    return torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)


def _refused(words, *, model=runs.make_ddp, make=runs.sgd, kind=ConfigError, **options):
    return model, make, options, kind, words


REFUSED = {
    "LBFGS": _refused("LBFGS", make=lbfgs, kind=UnsupportedOptimizerError),
    "pre-hook": _refused(r"pre-hook.*ordinary loop", make=_with_pre_hook),
    "foreign parameter": _refused("group 0 of SGD", make=_foreign),
    "no optimizer": _refused("no optimizer", make=lambda _: []),
    "no optimizer's class": _refused("Linear", make=lambda _: [torch.nn.Linear(2, 2)], kind=TypeError),
    "clip": _refused("ClipPolicy", kind=TypeError, clip=1.0),
    "unused": _refused("'skip' or 'step'", kind=ValueError, unused="zero"),
    "another hook": _refused("allreduce_hook", model=_hooked),
    "built-in hook": _refused("built-in", model=_built_in),
    "second overlap": _refused("remove", model=_overlapped),
    "ignored parameter": _refused("never be stepped", model=_ignoring),
    "mixed precision": _refused(
        "mixed_precision", model=partial(_with_option, "mixed_precision", types.SimpleNamespace())
    ),
    "skip_all_reduce": _refused(
        "skip_all_reduce", model=partial(_with_option, "skip_all_reduce_unused_params", True)
    ),
    "manual finalization": _refused(
        "lets backward.. end", model=partial(_with_option, "require_manual_backward_finalization", True)
    ),
    "static, dtypes": _refused("buckets of its first pass apart", model=_static_of_two_dtypes),
    "shared memory": _refused("share memory", model=_sharing_memory),
    "slices": _refused(r"share memory.*\(8, 8\)", model=_sliced),
    "no DDP": _refused("Net", model=runs.Net, kind=TypeError),
    "compiled DDP": _refused(
        "got OptimizedModule", model=lambda: torch.compile(runs.make_ddp()), kind=TypeError
    ),
    "sparse": _refused(r"embedding\.weight", model=_sparse, make=runs.adamw, kind=UnsupportedGradientError),
    "sparse, declared": _refused(
        "trial of OwnAdam failed on small copies .*does not support sparse gradients",
        model=_sparse,
        make=lambda ddp: OwnAdam(ddp.parameters()),
        kind=UnsupportedOptimizerError,
        steps_per_parameter=True,
    ),
    "sparse, clip": _refused("sparse", model=_sparse, clip=ByValue(1.0)),
    "released, not stepped": _refused(r"shape \(4,", make=_some, release_gradients=True),
}


@runs.cases(REFUSED)
def check_call(make_model, make, options, kind, words):
    """Nothing is left behind."""
    ddp = make_model()
    optimizer, before = make(ddp), runs.snapshot(ddp)
    for _ in range(2):
        with pytest.raises(kind, match=words):
            overlap_optimizer(ddp, optimizer, **options)
    runs.assert_same(runs.snapshot(ddp), before)
    if isinstance(optimizer, torch.optim.Optimizer):
        runs.assert_same(optimizer.state_dict()["state"], {})
        assert "step" not in vars(optimizer)
    if make_model is runs.make_ddp:
        other = runs.sgd(ddp)
        overlap_optimizer(ddp, other)
        runs.train_on(ddp, other, runs.batches(1))
        runs.assert_same(runs.changed(ddp, before), runs.EVERY)


def check_frozen_parameters_need_no_step():
    net = runs.Net()
    net.conv.requires_grad_(False)
    ddp, optimizer, _ = runs.start(_some, net=net, options={"release_gradients": True})
    before = runs.snapshot(ddp)
    runs.train_on(ddp, optimizer, runs.batches(2))
    runs.assert_same(runs.changed(ddp, before), runs.EVERY[2:])


@runs.as_ordinary
def check_one_optimizer_in_two_overlaps(*, overlapped):
    """Refused at the call, and the first overlap goes on."""
    net = runs.Net()
    ddp, other = runs.make_ddp(net), runs.make_ddp(net)
    optimizer = runs.adamw(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    runs.train_on(ddp, optimizer, runs.batches(1))
    if overlapped:
        for overlap_again in (
            partial(overlap_optimizer, other, [runs.sgd(other), optimizer]),
            partial(OptimizerHookState, optimizer),
        ):
            with pytest.raises(ConfigError, match=r"AdamW .*overlapped"):
                overlap_again()
    return runs.train_on(ddp, optimizer, runs.batches(2))


def check_inside_backward():
    ddp = runs.make_ddp(torch.nn.Linear(4, 4))
    x = call_in_backward(
        torch.ones(2, 4, requires_grad=True), lambda: overlap_optimizer(ddp, runs.adamw(ddp))
    )
    with pytest.raises(ConfigError, match=r"inside backward\(\)"):
        ddp(x).sum().backward()


# Refused by step(): what was changed after backward(), and the words


@torch.no_grad()
def _edit_one(ddp, _):
    next(ddp.parameters()).mul_(0.9)


def _clamp_all(ddp, _):
    for parameter in ddp.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _clamp_gradients(ddp, _):
    for parameter in ddp.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def _nudge(ddp, _):
    gradient = ddp.module.layers[2].weight.grad
    gradient[7, 7:8].copy_(gradient[7, 7].nextafter(torch.tensor(9.0)))


def _drop_some(ddp, _):
    for parameter in ddp.module.layers[3].parameters():
        parameter.grad = None


def _unscale(_, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _load(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _put_one(ddp, _):
    next(ddp.parameters()).grad = torch.ones_like(next(ddp.parameters()))


def _add_group(_, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


TOO_LATE = {
    "a rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.1), "lr of parameter group 0"),
    "a group": (_add_group, "parameter groups were added"),
    "a parameter": (_edit_one, "parameters were changed"),
    "all parameters behind torch's back": (_clamp_all, "parameters were changed"),
    "norm clipped": (
        lambda ddp, _: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3),
        r"gradients were changed.*clip=.*ordinary loop.*get_total_norm",
    ),
    "norm clipped without a limit": (
        lambda ddp, _: torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf")),
        "gradients were changed",
    ),
    "one bit of a gradient": (_nudge, "gradients were changed"),
    "all gradients behind torch's back": (_clamp_gradients, "gradients or parameters were changed"),
    "some gradients": (_drop_some, "set to None"),
    "all gradients": (lambda _, optimizer: optimizer.zero_grad(), "set to None"),
    "unscaled": (_unscale, "unscaled"),
    "a pre-hook": (lambda _, optimizer: _pre_hook(optimizer), "a step pre-hook was registered"),
    "loaded": (_load, "state was loaded"),
    "a list": (lambda _, optimizer: optimizer.param_groups[0]["betas"].insert(0, 0.5), "betas of parameter"),
    "a list in a dictionary": (
        lambda _, optimizer: optimizer.param_groups[0]["own"]["marks"].append(1),
        "own of parameter group 0",
    ),
    "a tensor in a tuple": (
        lambda _, optimizer: optimizer.param_groups[0]["own"]["pair"][0].add_(1),
        "own of parameter group 0",
    ),
}
OF_RELEASED = {
    "a gradient": (_put_one, "gradients were changed"),
    "a rate": TOO_LATE["a rate"],
}


@runs.cases(
    {
        **{name: (*case, False) for name, case in TOO_LATE.items()},
        **{f"{name}, released": (*case, True) for name, case in OF_RELEASED.items()},
    }
)
def check_too_late(change, words, released):
    """The inputs and results of a step must not change before the loop calls step()."""
    for view in (False, True):
        options = {"release_gradients": released}
        ddp, optimizer, _ = runs.start(gradient_as_bucket_view=view, options=options)
        own = {"marks": [], "pair": (torch.ones(2), 1)}
        optimizer.param_groups[0].update(betas=[0.9, 0.99], own=own)
        runs.train_on(ddp, optimizer, runs.batches(1))
        runs.backward(ddp, runs.batches(1)[0])
        change(ddp, optimizer)
        now = runs.snapshot(ddp)
        for _ in range(2):
            with pytest.raises(ConfigError, match=words):
                optimizer.step()
        runs.assert_same(runs.snapshot(ddp), now)


@runs.cases(
    {
        "gradients changed": (_clamp_gradients, (), "gradients or parameters were changed"),
        "a closure": (lambda *_: None, (lambda: None,), "closure would come too late"),
    }
)
def check_a_refused_call_after_remove(change, arguments, words):
    """It is no second step, nor is the next one; with new gradients step() is an ordinary one."""
    ddp, optimizer, handle = runs.start()
    runs.train_on(ddp, optimizer, runs.batches(1))
    runs.backward(ddp, runs.batches(1)[0])
    handle.remove()
    after = runs.snapshot(ddp)
    change(ddp, optimizer)
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            optimizer.step(*arguments)
    with contextlib.suppress(ConfigError):
        optimizer.step()
    runs.assert_same(runs.snapshot(ddp), after)
    optimizer.zero_grad()
    runs.train_on(ddp, optimizer, runs.batches(1))
    runs.assert_same(runs.changed(ddp, after), runs.EVERY)


def check_gradients_added_to_used_ones_after_remove():
    ddp, _, handle = runs.start()
    runs.backward(ddp, runs.batches(1)[0])
    handle.remove()
    with ddp.no_sync(), pytest.raises(DoubleBackwardError, match="zero_grad"):
        runs.backward(ddp, runs.batches(1)[0])


def check_looking_is_allowed():
    """A norm of gradients, and gradients by torch.autograd.grad; options that do not equal themselves."""
    ddp, optimizer, handle = runs.start(find_unused_parameters=True)
    optimizer.param_groups[0].update(best=float("nan"), mask=np.ones(3), tags=[torch.ones(3)])
    for number, x in enumerate(runs.batches(4), start=1):
        ddp.module.skipped = (3,) if number == 2 else ()
        runs.backward(ddp, x)
        grads = [one.grad for one in ddp.parameters() if one.grad is not None]
        assert torch.nn.utils.get_total_norm(grads) > 0
        optimizer.step()
        torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters()), allow_unused=True)
        optimizer.zero_grad()
        runs.assert_same(handle.wait().number, number)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, head):
        return getattr(self, head)(x)


@runs.cases({"local": ("local", 0), "no_sync": ("no_sync", 0), "local, in a later step": ("local", 1)})
def check_gradients_that_come_after_the_step(how, before):
    """An ordinary step would use the gradients that were stepped with once more."""
    ddp, optimizer, _ = runs.start(runs.sgd, net=TwoHeads(), find_unused_parameters=True)
    x = torch.ones(2, 4)
    for _ in range(before):
        ddp(x, "a").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp(x, "a").square().mean().backward()
    after = runs.snapshot(ddp)
    if how == "local":
        ddp.module.b.weight.square().sum().backward()
    else:
        with ddp.no_sync():
            ddp(x, "b").square().mean().backward()
    with pytest.raises(ConfigError, match="gradients have come between"):
        optimizer.step()
    runs.assert_same(runs.snapshot(ddp), after)


def check_arguments_and_closures_that_come_too_late():
    class TakesMore(torch.optim.SGD):
        def step(self, closure=None, *, flag=None):
            return super().step(closure)

    def again():
        ddp.zero_grad()
        runs.backward(ddp, runs.batches(1)[0])

    ran = []
    options = {"steps_per_parameter": True}
    ddp, optimizer, handle = runs.start(lambda ddp: TakesMore(ddp.parameters(), lr=0.1), options=options)
    runs.backward(ddp, runs.batches(1)[0])
    after = runs.snapshot(ddp)
    with pytest.raises(ConfigError, match="flag"):
        optimizer.step(flag=True)
    with handle.pause(), pytest.raises(ConfigError, match="closure would come too late"):
        optimizer.step(lambda: ran.append(1))
    with pytest.raises(ConfigError, match=r"step\(closure\)"):  # its pass would step again
        optimizer.step(again)
    runs.assert_same((ran, runs.snapshot(ddp)), ([], after))


def check_steps_that_are_not_replaced():
    """A step from before the overlap, and that of the class, would step again."""
    ddp = runs.make_ddp()
    optimizer = runs.adamw(ddp)
    step = optimizer.step
    handle = overlap_optimizer(ddp, optimizer)
    for call in (step, lambda: type(optimizer).step(optimizer)):
        runs.backward(ddp, runs.batches(1)[0])
        after = runs.snapshot(ddp)
        with pytest.raises(ConfigError, match="would step again"):
            call()
        runs.assert_same(runs.snapshot(ddp), after)
        optimizer.step()
        optimizer.zero_grad()
    with handle.pause():
        runs.backward(ddp, runs.batches(1)[0])
        step()
    runs.assert_same(runs.changed(ddp, after), runs.EVERY)


# Refused in the last word of a loop, by backward() unless it makes no pass: nothing moves


class BadLoop(Loop):
    """A loop with more words, which notes the parameters before each pass."""

    def backward(self):
        self.before = runs.snapshot(self.ddp)
        super().backward()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1e-3)

    def keep_one(self):
        """The gradient of a parameter that is not the first to get one in the next pass."""
        for name, parameter in self.ddp.module.named_parameters():
            parameter.grad = parameter.grad.mul_(0.5) if name == "layers.2.bias" else None
        self.ddp.module.skipped = (3,)

    def set_one(self):
        self.layers[1].weight.grad = torch.ones(64, 64)

    def drop_group(self):
        del self.optimizers[0].param_groups[0]

    def zero_the_rest(self):
        self.optimizers[0].zero_grad()

    def add_foreign(self):
        _add_group(self.ddp, self.optimizers[0])

    def pre_hook(self):
        _pre_hook(self.optimizers[0])

    def post_hook(self):
        self.optimizers[0].register_step_post_hook(lambda *_: None)

    def load_differentiable(self):
        self._load(differentiable=True)

    def load_coupled(self):
        self._load(eps=(None, 1e-3))

    def _load(self, **options):
        """Load a state dict with other options than those that were accepted."""
        loaded = copy.deepcopy(self.optimizers[0].state_dict())
        loaded["param_groups"][0].update(options)
        self.optimizers[0].load_state_dict(loaded)

    def lay_out_columns_first(self):
        for parameter in self.ddp.parameters():
            parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)

    def two_passes_in_closure(self):
        def run():
            self.backward()
            self.zero()
            self.backward()

        self.optimizers[0].step(run)


def _pre_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


def _two_dtypes():
    net = runs.Net()
    net.unused = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    return net


def _frozen_layer():
    net = runs.Net()
    net.layers[1].requires_grad_(False)
    return net


def _adafactor(ddp):
    return [torch.optim.Adafactor(ddp.parameters(), eps=(1e-7, 1e-3))]


def _two_groups(ddp):
    parts = ddp.module.conv, ddp.module.layers
    return [torch.optim.SGD([{"params": list(part.parameters())} for part in parts], lr=0.1)]


def _halves(ddp):
    return [torch.optim.SGD(list(ddp.parameters())[part::2], lr=0.1) for part in range(2)]


def _in_loop(words, text, *, kind=ConfigError, make=one_adamw, overlap=None, **options):
    return words, text, kind, make, overlap or {}, options


IN_LOOPS = {
    "again": _in_loop("overlap backward backward", "zero_grad", kind=DoubleBackwardError),
    "again, view": _in_loop(
        "overlap to_zeros backward zero backward backward",
        "zero_grad",
        kind=DoubleBackwardError,
        gradient_as_bucket_view=True,
    ),
    "again in no_sync": _in_loop("overlap backward no_sync backward", "zero_grad", kind=DoubleBackwardError),
    "again in pause": _in_loop("overlap backward pause backward", "zero_grad", kind=DoubleBackwardError),
    "again after clipping": _in_loop("overlap backward clip backward", "zero_grad", kind=DoubleBackwardError),
    "one is left": _in_loop(
        "overlap backward step keep_one backward",
        "zero_grad",
        kind=DoubleBackwardError,
        find_unused_parameters=True,
    ),
    "of a parameter that has left": _in_loop(
        "overlap train backward step drop_group zero_the_rest backward",
        r"zero_grad\(\) of the model",
        kind=DoubleBackwardError,
        make=_two_groups,
    ),
    "pre-hook": _in_loop("overlap pre_hook backward", "pre-hook"),
    "post-hook without step()": _in_loop(
        "overlap backward post_hook zero backward", "AdamW has a step post-hook"
    ),
    "added": _in_loop("overlap train add_foreign backward", "model averages"),
    "unfrozen": _in_loop("overlap train unfreeze backward", "model averages", make_net=_frozen_layer),
    "a gradient by hand": _in_loop(
        "overlap train set_one backward", "model averages", make_net=_frozen_layer
    ),
    "layout": _in_loop("overlap train lay_out_columns_first backward", "layout"),
    "loaded": _in_loop(
        "overlap train load_differentiable backward", "differentiable=True", kind=UnsupportedOptimizerError
    ),
    "loaded, coupled": _in_loop(
        "overlap train load_coupled backward",
        "first parameter of a group",
        kind=UnsupportedOptimizerError,
        make=_adafactor,
        make_net=_two_dtypes,
        find_unused_parameters=True,
    ),
    "released, not stepped": _in_loop(
        "overlap train drop_group backward",
        "release_gradients",
        make=_two_groups,
        overlap={"release_gradients": True},
    ),
    # Not every backward pass is a step.
    "step() left out": _in_loop("overlap train backward zero backward", "was not called"),
    "optimizers take turns": _in_loop(
        "overlap backward step_one zero backward", "was not called", make=_halves
    ),
    "two passes in a closure": _in_loop("overlap two_passes_in_closure", "was not called"),
}


@runs.cases(IN_LOOPS)
def check_loop(words, text, kind, make, overlap, options):
    loop = BadLoop(make, overlap, **options)
    before, _, last = words.rpartition(" ")
    loop.follow(before)
    with pytest.raises(RuntimeError, match=text) as caught:
        loop.follow(last)
    loop.end()
    if kind is DoubleBackwardError:
        assert type(caught.value) is DoubleBackwardError, repr(caught.value)
    else:
        for call in (loop.step, loop.handle.wait):
            with pytest.raises(kind, match=text) as caught:
                call()
            assert caught.value.report.stepped == (), caught.value
    runs.assert_same(runs.snapshot(loop.ddp), loop.before)


def check_an_ordinary_step_after_one_that_was_left_out():
    """As after a loss that is not finite."""
    loop = Loop(one_adamw, {})
    loop.follow("overlap train backward zero accumulate")
    with pytest.raises(ConfigError, match="was not called"):
        loop.step()


def check_static_later_with_two_dtypes():
    """DDP hands over all buckets as bucket 0 and none as the last one: an error, and no hang."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
    net[0].register_forward_hook(lambda *arguments: arguments[2].double())
    ddp, optimizer, _ = runs.start(runs.sgd, net=net)
    ddp._set_static_graph()
    before = runs.snapshot(ddp)
    with pytest.raises(RuntimeError, match="static_graph"):
        ddp(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match="static_graph"):
        optimizer.step()
    runs.assert_same(runs.snapshot(ddp), before)


def check_a_sparse_weight_that_is_added():
    """To an optimizer that cannot step it: refused before the step."""
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(4, 4, sparse=True), torch.nn.Linear(4, 4))
    ddp, optimizer, _ = runs.start(lambda ddp: torch.optim.Adam(ddp.module[1].parameters()), net=net)
    x = torch.tensor([[0, 1]])
    ddp(x).sum().backward()
    optimizer.step()
    ddp.zero_grad()
    optimizer.add_param_group({"params": [net[0].weight]})
    before = runs.snapshot(ddp)
    with pytest.raises(RuntimeError, match=r"0\.weight, whose gradient is sparse"):
        ddp(x).sum().backward()
    with pytest.raises(UnsupportedGradientError, match=r"0\.weight"):
        optimizer.step()
    runs.assert_same(runs.snapshot(ddp), before)


def check_incomplete_backward():
    """A layer without gradients that DDP was not told of: some buckets never come."""
    ddp, optimizer, _ = runs.start()
    runs.train_on(ddp, optimizer, runs.batches(2))
    ddp.module.skipped = (0,)
    runs.backward(ddp, runs.batches(1)[0])
    with pytest.raises(StepError, match="find_unused_parameters") as caught:
        optimizer.step()
    runs.assert_same(caught.value.report.stepped, ())


check = runs.on_ranks(__name__, 1, timeout=120)  # every rank refuses by itself


def test_refused_with_a_reason(check):
    check()
