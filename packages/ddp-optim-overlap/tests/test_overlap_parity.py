"""The bits of ``backward(); optimizer.step()``: every optimizer, way to run DDP, hook and kind of model."""

import functools
import inspect
import types

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import FOUR_STEPS, require_same, two_optimizers
from parity_cases import UNUSED, check_mode, check_optimizer, rare_optimizer  # noqa: F401 - found by name
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from ddp_optim_overlap import (
    ConfigError,
    OptimizerHookState,
    declare_steps_per_parameter,
    hook_then_optimizer,
    overlap_optimizer,
)

# Communication hooks


def new_tensor_hook(state, bucket):
    """Average into another tensor and leave the bucket full of nonsense."""
    other = bucket.buffer().clone()
    bucket.buffer().fill_(1e6)

    def halve(done):
        return done.value()[0] / 2

    return dist.all_reduce(other, async_op=True).get_future().then(halve)


HOOKS = {
    "allreduce_hook": lambda: (allreduce_hook, None),
    "fp16": lambda: (fp16_compress_hook, None),
    "bf16, sums in fp32": lambda: (bf16_compress_hook, CompressState(accumulate="fp32")),
    "bf16 wrapper": lambda: (bf16_compress_wrapper(new_tensor_hook), None),
    "PyTorch's fp16": lambda: (default_hooks.fp16_compress_hook, None),
    "PyTorch's fp16 wrapper, which sets another buffer": lambda: (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        None,
    ),
    "a new tensor": lambda: (new_tensor_hook, None),
}


@runs.cases({name: (hook, bool(place % 2)) for place, (name, hook) in enumerate(HOOKS.items())})
def check_hook(hook, view):
    """The value of the hook's future is the gradient that is stepped with."""
    require_same(FOUR_STEPS, two_optimizers, hook=hook, gradient_as_bucket_view=view)


# Models


def _channels_last(net):
    return net.to(memory_format=torch.channels_last)


def _columns_first(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)
    return net


Conv = torch.nn.Conv2d
# Of a side of 1 torch does not mind the stride, so several strides are called contiguous.
CONVOLUTIONS = {
    "3x3": (4, 6, 3),
    "1x1": (4, 6, 1),
    "of one channel": (4, 1, 3),
}


@runs.cases(
    {
        f"{name}, {change.__name__.strip('_')}": (arguments, change, bool(place % 2))
        for place, (name, arguments) in enumerate(CONVOLUTIONS.items())
        for change in (_channels_last, _columns_first)
    }
)
@runs.as_ordinary
def check_memory_layout(arguments, change, view, *, overlapped):
    torch.manual_seed(0)
    inputs, outputs, size = arguments
    net = torch.nn.Sequential(Conv(inputs, outputs, size), Conv(outputs, 4, 1))
    options = {"net": change(net), "bucket_cap_mb": 0.0001, "gradient_as_bucket_view": view}
    ddp, optimizer, _ = runs.start(overlapped=overlapped, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return runs.train_on(ddp, optimizer, [torch.randn(2, 4, 5, 5, generator=generator) for _ in range(4)])


class SomeUsed(torch.nn.Module):
    """The middle one of three convolutions is left out by rank 1 in some passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Conv(4, 4, 3, padding=1) for _ in range(3))
        self.passes = 0

    def forward(self, x):
        first, middle, last = self.layers
        self.passes += 1
        x = first(x)
        return last(x if dist.get_rank() == 1 and self.passes in (1, 3) else middle(x).tanh())


@runs.cases({"small buckets": (0.0005,), "one bucket": (1,)})
@runs.as_ordinary
def check_layout_of_an_unused_gradient(cap, *, overlapped):
    """A gradient has its layout in its bucket, though this rank has no gradient that shows it."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": cap}
    ddp, optimizer, _ = runs.start(overlapped=overlapped, net=_channels_last(SomeUsed()), **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return runs.train_on(ddp, optimizer, [torch.randn(2, 4, 5, 5, generator=generator) for _ in range(5)])


class Mixed(torch.nn.Module):
    """Sparse, complex, empty and 0-dimensional parameters of two dtypes, of which one is not contiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(10, 8, sparse=True)
        self.first, self.second = torch.nn.Linear(8, 700), torch.nn.Linear(700, 4).double()
        self.turn = torch.nn.Parameter(torch.randn(700, dtype=runs.COMPLEX))
        self.columns = torch.nn.Parameter(torch.randn(4, 700).t())
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        x = self.first(self.embedding(x)) * self.turn
        x = (x.abs() @ self.columns).sum() * self.scale.exp() + self.second(x.abs().double())
        return x + self.empty.sum()


@declare_steps_per_parameter
class Declared(torch.optim.SGD):
    """Steps with sparse gradients, too, as its trial must find."""


def sparse_adam(ddp):
    others = [one for name, one in ddp.module.named_parameters() if "embedding" not in name]
    return [torch.optim.SparseAdam(ddp.module.embedding.parameters(), lr=0.01), torch.optim.AdamW(others)]


@functools.cache
def _group_safe_for_sparse_sums():
    """Return a group with one Gloo thread: two may corrupt memory, see ``dist_utils.comm_hooks.sparse_mean``.

    ``new_group`` takes no options for Gloo.
    """

    def make(store, rank, size, timeout):
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, [gloo.create_default_device()]
        return gloo(store, rank, size, options)

    dist.Backend.register_backend("gloo_with_one_thread", make, devices=["cpu"])
    return dist.new_group(backend="gloo_with_one_thread")


@runs.cases(
    {
        f"{name}, {released}": (make, released, view)
        for name, make, view in (
            ("SGD", lambda ddp: [torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)], True),
            ("Adagrad", lambda ddp: [torch.optim.Adagrad(ddp.parameters(), lr=0.01)], False),
            ("declared", lambda ddp: [Declared(ddp.parameters(), lr=0.01, momentum=0.9)], True),
            ("SparseAdam and AdamW", sparse_adam, False),
        )
        for released in ("kept", "released")
    }
)
@runs.as_ordinary
def check_all_kinds_of_parameters(make, released, view, *, overlapped):
    group = None if overlapped else _group_safe_for_sparse_sums()
    ddp = runs.make_ddp(Mixed(), gradient_as_bucket_view=view, process_group=group)
    optimizers = make(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizers, release_gradients=released == "released")
    for step in range(4):
        runs.backward(ddp, torch.tensor([step + dist.get_rank(), 7]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return runs.ends(ddp, *optimizers)


@runs.as_ordinary
def check_names_of_parameters(*, overlapped):
    """An optimizer with named parameters keeps their names."""
    ddp, optimizer, _ = runs.start(
        lambda ddp: torch.optim.AdamW(ddp.named_parameters()), overlapped=overlapped
    )
    return runs.train_on(ddp, optimizer, runs.batches(3))


check = runs.on_ranks(__name__, timeout=300, group_timeout=60)


def test_two_ranks(check):
    check()


rare = runs.on_ranks(__name__, prefix="rare_", timeout=300, group_timeout=60)


@pytest.mark.exhaustive
def test_other_implementations_on_two_ranks(rare):
    rare()


# Three ranks: dividing and multiplying, before or after the sum, give different bits


def _muon(ddp):
    weights = [layer.weight for layer in ddp.module.layers]
    rest = [one for one in ddp.parameters() if all(one is not weight for weight in weights)]
    return [torch.optim.Muon(weights, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


THREE = {
    "gradients in buckets": (two_optimizers, {"gradient_as_bucket_view": True}),
    "tensor lr": (lambda ddp: [torch.optim.SGD(ddp.parameters(), lr=torch.tensor(0.1), foreach=True)], {}),
}
if hasattr(torch.optim, "Muon"):
    THREE["Muon"] = _muon, {}


@runs.cases(THREE)
def three_ranks_as_ordinary(make, options):
    require_same(FOUR_STEPS, make, **options)


def _of(state, bucket):
    """Average over the group that a state of any type stands for."""
    if isinstance(state, DeviceMesh):
        return allreduce_hook(state.get_group(), bucket)
    return allreduce_hook(state.process_group, bucket)


def three_ranks_of_which_two_train():
    """Nothing waits for the third."""
    mesh, group = DeviceMesh("cpu", [0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    require_same(FOUR_STEPS, two_optimizers, process_group=group)
    by_turns = "overlap train skip train use train skip train"
    require_same(by_turns, two_optimizers, process_group=group, **UNUSED)

    def run(kind, *, overlapped):
        ddp = runs.make_ddp(process_group=group)
        optimizer = runs.adamw(ddp)
        state = {"mesh": mesh, "model": ddp}.get(kind, types.SimpleNamespace(process_group=group))
        hook = hook_then_optimizer(_of, OptimizerHookState(optimizer)) if overlapped else _of
        ddp.register_comm_hook(state, hook)
        return runs.train_on(ddp, optimizer, runs.batches(3))

    for kind in ("mesh", "model", "process_group"):
        runs.assert_same(*[run(kind, overlapped=overlapped) for overlapped in (True, False)])


def three_ranks_that_divide():
    """DDP then divides by three, instead of multiplying with a third."""
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        require_same(FOUR_STEPS, two_optimizers, batched_grad_copy=True)


def three_ranks_state_without_a_group_is_of_world():
    """It would average over the ranks of other models."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    ddp = runs.make_ddp(process_group=groups[dist.get_rank()])
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    with pytest.raises(ConfigError, match="give comm_hook a comm_state of the model's process group"):
        overlap_optimizer(ddp, runs.sgd(ddp), comm_hook=powerSGD_hook.powerSGD_hook, comm_state=state)


three_ranks = runs.on_ranks(__name__, 3, prefix="three_ranks_", timeout=120, group_timeout=60)


def test_three_ranks(three_ranks):
    three_ranks()
