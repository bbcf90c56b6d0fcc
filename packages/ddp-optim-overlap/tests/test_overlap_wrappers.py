"""Models and optimizers inside the wrappers of frameworks."""

import overlap_runs as runs
import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook
from ddp_optim_overlap import ConfigError, UnsupportedOptimizerError, overlap_optimizer


class Delegates(torch.optim.Optimizer):
    """Wraps an optimizer, and only decides whether it steps, like Accelerate's wrapper."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer, scaler=None):
        self.optimizer = optimizer
        self.scaler = scaler
        self.calls = 0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.calls += 1
        self.optimizer.step(closure)


class Masks(Delegates):
    """Looks like Accelerate's wrapper, but does more than to step."""

    __module__ = __name__

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].data.zero_()


HOOK = {"comm_hook": bf16_compress_hook, "comm_state": CompressState()}


@runs.cases({"at once": (False, {}), "after a forward pass": (True, {}), "with a hook": (False, HOOK)})
@runs.as_ordinary
def check_replicated(begun, options, *, overlapped):
    """A module that was given to replicate(), which averages every other pass."""
    model = replicate(runs.Net(), bucket_cap_mb=0.001)
    optimizer = runs.adamw(model)
    if begun:
        with torch.no_grad():
            model(runs.batches(1)[0])
    if overlapped:
        overlap_optimizer(model, optimizer, **options)
    elif options:
        model.register_comm_hook(options["comm_state"], options["comm_hook"])
    for number, batch in enumerate(runs.batches(6)):
        model.set_requires_gradient_sync(number % 2 == 1)
        runs.backward(model, batch)
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return runs.ends(model, optimizer)


@runs.as_ordinary
def check_wrapped_optimizer(*, overlapped):
    """Its wrappers are opened; they count calls and decide whether to step."""
    ddp = runs.make_ddp()
    inner = runs.adamw(ddp)
    wrapper = Delegates(Delegates(inner), scaler=torch.amp.GradScaler("cpu", enabled=False))
    if overlapped:
        runs.assert_same(overlap_optimizer(ddp, [wrapper, inner]).optimizers == (inner,), True)
    for x in runs.batches(3):
        runs.backward(ddp, x)
        wrapper.step()
        wrapper.zero_grad()
    runs.assert_same(wrapper.calls, 3)
    return runs.ends(ddp, inner)


REFUSED = {
    "own GradScaler": (
        lambda inner: Delegates(inner, scaler=torch.amp.GradScaler("cpu")),
        ConfigError,
        "Delegates calls its own GradScaler",
    ),
    "does more": (Masks, UnsupportedOptimizerError, "step of Masks has set its attribute 'calls'"),
}


@runs.cases(REFUSED)
def check_refused(wrap, kind, words):
    ddp = runs.make_ddp()
    with pytest.raises(kind, match=words):
        overlap_optimizer(ddp, wrap(runs.adamw(ddp)), steps_per_parameter=True)


class FewBits(torch.Tensor):
    """A quantized class that knows one operator: ``Parameter`` needs it."""

    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{function} of few bits")
        return cls(arguments[0].codes, arguments[0].scale)


class Adapted(torch.nn.Module):
    """A frozen weight of few bits, and an adapter that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        codes = torch.arange(64, dtype=torch.int8).view(8, 8)
        self.weight = torch.nn.Parameter(FewBits(codes, torch.tensor(0.01)), requires_grad=False)
        self.adapter = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = x.flatten(1)[:, :8]
        return x @ (self.weight.codes * self.weight.scale) + self.adapter(x)


@runs.cases({"kept": ({},), "released": ({"release_gradients": True},)})
@runs.as_ordinary
def check_frozen_weights_of_a_quantized_class(options, *, overlapped):
    """DDP was told to leave it out."""
    net = torch.nn.Sequential(Adapted(), torch.nn.Linear(8, 8))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    ddp = runs.make_ddp(net)
    trained = [one for one in net.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    if overlapped:
        overlap_optimizer(ddp, optimizer, **options)
    for x in runs.batches(3):
        runs.backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach().clone() for one in trained], optimizer.state_dict()


def check_module_of_fsdp():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow to import

    model = fully_shard(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="which FSDP averages: wrap the module in DDP"):
        overlap_optimizer(model, runs.adamw(model))


check = runs.on_ranks(__name__, timeout=60)


def test_wrapped_objects(check):
    check()
