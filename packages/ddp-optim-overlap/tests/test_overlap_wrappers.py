"""Models and optimizers inside the wrappers of frameworks."""

import pytest
import torch
import torch.distributed as dist
from overlap_runs import Net, assert_same, batches, snapshot
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook
from ddp_optim_overlap import ConfigError, UnsupportedOptimizerError, overlap_optimizer
from dist_utils.testing import run_ranks


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
        before = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
        super().step(closure)
        self.param_groups[0]["params"][0].data.copy_(before[0])


class Averages(torch.optim.SGD):
    """Wraps an optimizer, and steps parameters of its own besides."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.optimizer = torch.optim.SGD(self.param_groups[0]["params"], lr=lr)


def _run(model, optimizer, step=None):
    for number, batch in enumerate(batches(6)):
        syncs = number % 2 == 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(syncs)
        else:
            model.require_backward_grad_sync = syncs
        model(batch).square().mean().backward()
        if syncs:
            (step or optimizer).step()
            (step or optimizer).zero_grad()
    return snapshot(model)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _replicated(*, overlapped, begun=False, **options):
    model = replicate(Net(), bucket_cap_mb=0.001)
    optimizer = _adamw(model)
    if begun:
        with torch.no_grad():
            model(batches(1)[0])
    if overlapped:
        overlap_optimizer(model, optimizer, **options)
    elif options:
        model.register_comm_hook(options["comm_state"], options["comm_hook"])
    return _run(model, optimizer)


def _wrapped(_):
    ordinary = _replicated(overlapped=False)
    assert_same(_replicated(overlapped=True), ordinary)
    assert_same(_replicated(overlapped=True, begun=True), ordinary)
    hook = {"comm_hook": bf16_compress_hook, "comm_state": CompressState()}
    assert_same(_replicated(overlapped=True, **hook), _replicated(overlapped=False, **hook))

    runs = []
    for overlapped in (False, True):
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
        inner = _adamw(ddp)
        wrapper = Delegates(Delegates(inner), scaler=torch.amp.GradScaler("cpu", enabled=False))
        if overlapped:
            handle = overlap_optimizer(ddp, wrapper)
            assert handle.optimizers == (inner,)
        runs.append(_run(ddp, inner, wrapper))
        assert wrapper.calls == 3
        assert all(state["step"] == 3 for state in inner.state.values())
    assert_same(*runs)
    handle.remove()

    with pytest.raises(ConfigError, match="Delegates calls its own GradScaler"):
        overlap_optimizer(ddp, Delegates(inner, scaler=torch.amp.GradScaler("cpu")))
    with pytest.raises(ConfigError, match="given twice"):
        overlap_optimizer(ddp, [inner, Delegates(inner)])
    for declared in (False, True):
        with pytest.raises(UnsupportedOptimizerError, match="Masks"):
            overlap_optimizer(ddp, Masks(inner), steps_per_parameter=declared)
    with pytest.raises(UnsupportedOptimizerError, match="Averages has another optimizer"):
        overlap_optimizer(ddp, Averages(ddp.parameters(), lr=0.1), steps_per_parameter=True)
    for model, text in (
        (ddp.module, "got Net"),
        (torch.compile(ddp), "got OptimizedModule"),
    ):
        with pytest.raises(TypeError, match=text):
            overlap_optimizer(model, inner)
    dist.barrier()


def test_the_wrapped_objects_are_overlapped():
    run_ranks(_wrapped, 2)


def _fully_sharded(_):
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow to import

    model = fully_shard(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="which FSDP averages: wrap the module in DDP"):
        overlap_optimizer(model, _adamw(model))


def test_a_module_of_fsdp_is_refused():
    run_ranks(_fully_sharded, 2)
