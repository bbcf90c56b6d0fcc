"""Shared by the tests of FSDP2: a small model, ways to shard it, and training runs."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_quant_hooks import QuantizedAllreduceState
from dist_utils.testing import call_in_backward

needs_hooks = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook",
)
needs_reset = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"),
    reason="FSDP cannot go on after an error in this torch (no FSDPModule.reset_iter_state)",
)
BF16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
EXACT = 1 << 40
"""``min_bytes`` of a state that sends all values without compression."""


class Net(torch.nn.Module):
    """Rows that two ranks divide unevenly, a parameter of the root, and a layer that can be used twice."""

    def __init__(self, *, twice=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.rand(37))
        self.twice = twice

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.twice:
            x = torch.tanh(self.layers[1](x))
        return x * self.scale


class Halves(torch.nn.Module):
    """A module that tensor parallelism cuts in two."""

    def __init__(self, mesh, shards):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(37, 8), torch.nn.Linear(8, 37)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fsdp.fully_shard(parallelize_module(self, mesh["tensor"], plan), mesh=shards)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def served_device():
    """Return the kind of devices that the default group serves."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def nodes_and_shards(shards=2):
    """Return a mesh of nodes that hold so many shards each, on the devices that the default group serves."""
    sizes = dist.get_world_size() // shards, shards
    return init_device_mesh(served_device(), sizes, mesh_dim_names=("node", "shard"))


def sharded(mesh, *, twice=False, cut=(), **options):
    """Return the model, sharded by layers over a mesh; ``cut`` has layers that the root takes."""
    net = Net(twice=twice)
    for index, layer in enumerate(net.layers):
        if index not in cut:
            fsdp.fully_shard(layer, mesh=mesh, **options)
    return fsdp.fully_shard(net, mesh=mesh, **options)


def state_between(mesh, **options):
    """Return a state that quantizes everything unless told otherwise."""
    return QuantizedAllreduceState(mesh["node"], **{"min_bytes": 0, **options})


def kept_names(state):
    """Return the names under which the state keeps residuals."""
    return set(state.state_dict()["keys"])


def batch(step, width=37):
    """Return a different batch for every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def local(tensor):
    """Return this rank's shard, or the tensor if it is not sharded."""
    return getattr(tensor, "to_local", tensor.detach)().detach().clone()


def gradients(net):
    """Return this rank's shards of all gradients."""
    return [local(parameter.grad) for parameter in net.parameters()]


def parameters(net):
    """Return this rank's shards of all parameters."""
    return [local(parameter) for parameter in net.parameters()]


def backward(net, step, *, more=False):
    """Add the gradients of a batch; ``more``: through a second forward pass of the same batch."""
    device = next(net.parameters()).device
    loss = net(batch(step).to(device)).square().mean()
    if more:
        loss = loss + net(batch(step + 50).to(device)).square().mean()
    loss.backward()


def train(net, steps, *, first=0, accumulate=False, optimizer=None):
    """Train a few steps; return the shards of parameters.

    Args:
        net: The model.
        steps: The number of steps.
        first: The number of the first.
        accumulate: Whether each step has two micro-batches.
        optimizer: Of the model; plain SGD with momentum if not given.
    """
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        if accumulate:
            net.set_requires_gradient_sync(False)
            backward(net, 1000 + step)
            net.set_requires_gradient_sync(True)
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(net)


needs_custom_gathers = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather"),
    reason="this torch has no FSDPModule.set_custom_all_gather",
)


class Watched(torch.nn.Module):
    """A layer that notes its weights in its forward and in its backward pass, or raises in the one named."""

    fails = None

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.seen = {"forward": [], "backward": []}

    def forward(self, x):
        self._note("forward")
        x = call_in_backward(x, lambda: self._note("backward"))
        return torch.tanh(self.layer(x))

    def _note(self, when):
        if when == self.fails:
            raise ZeroDivisionError
        self.seen[when].append([local(parameter) for parameter in self.layer.parameters()])


def watched_layers(*, layers=3, width=37, dtype=torch.float32):
    """Return a model of layers that note their weights; two ranks divide the rows unevenly."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Watched(torch.nn.Linear(width, width).to(dtype)) for _ in range(layers)))


def shard_layers(net, mesh, **options):
    """Shard each layer of a model, and then the model."""
    for layer in net:
        fsdp.fully_shard(layer, mesh=mesh, **options)
    return fsdp.fully_shard(net, mesh=mesh, **options)


def whole(net):
    """Return all parameters as they are in the shards of all ranks, together."""
    return [parameter.full_tensor().detach().clone() for parameter in net.parameters()]


def with_weights(net, parameters):
    """Yield each layer of such a model with those of all its parameters that are the layer's."""
    rest = iter(parameters)
    for layer in net:
        yield layer, [next(rest) for _ in layer.parameters()]
