"""FSDP2's other options and companions: each gives the bits of native HSDP in full precision."""

import torch
from fsdp_models import (
    EXACT,
    Net,
    all_equal,
    backward,
    batch,
    gradients,
    local,
    needs_hooks,
    nodes_and_shards,
    state_between,
    train,
)
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce
from dist_utils.testing import run_ranks

pytestmark = needs_hooks


def _by_layers(mesh, *, grouped=False, compiled=False, root=True, frozen=False):
    net = Net()
    if frozen:
        net.layers[0].bias.requires_grad_(False)
        net.layers[1].requires_grad_(False)
    if compiled:
        for layer in net.layers:
            layer.compile(backend="aot_eager")
    units = [[net.layers[0], net.layers[1]], net.layers[2]] if grouped else net.layers
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh)
    if root:
        return fsdp.fully_shard(net, mesh=mesh, **({"ignored_params": {net.scale}} if frozen else {}))
    net.scale.requires_grad_(False)
    return net


def _pair(mesh, **options):
    """Return a model on the mesh for HSDP, and one that is sharded over a node and has hooks."""
    nets = [_by_layers(mesh, **options), _by_layers(mesh["shard"], **options)]
    quantize_all_reduce(nets[1], state_between(mesh, min_bytes=EXACT))
    return nets


def _trained(net):
    parameters = [parameter for parameter in net.parameters() if isinstance(parameter, DTensor)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return [local(parameter) for parameter in parameters]


def _retained(net):
    loss = net(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(net)


def _not_the_last(net):
    net.set_is_last_backward(False)
    backward(net, 0)
    net.set_is_last_backward(True)
    backward(net, 1)
    return gradients(net)


def _with_passes_that_end_nowhere(net):
    with torch.no_grad():
        net(batch(7))
    net(batch(7))
    torch.autograd.grad(net(x := batch(8).requires_grad_()).sum(), x)
    return train(net, 2, accumulate="set_requires_all_reduce")


def _stepped_in_backward(net):
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in net.parameters()
    }

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        backward(net, number)
    return [local(parameter) for parameter in net.parameters()]


def _switches(_):
    mesh, different = nodes_and_shards(), []
    variants = [
        ({"grouped": True}, _trained),
        ({"compiled": True}, _trained),
        ({"root": False}, _trained),
        ({"frozen": True}, _trained),
        ({}, _retained),
        ({}, _not_the_last),
        ({}, _with_passes_that_end_nowhere),
        ({}, _stepped_in_backward),
    ]
    for options, run in variants:
        if not all_equal(*map(run, _pair(mesh, **options))):
            different.append((options, run.__name__))
    return different


class _Halves(torch.nn.Module):
    """A module that tensor parallelism cuts in two."""

    def __init__(self, mesh, shards):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(37, 8), torch.nn.Linear(8, 37)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fsdp.fully_shard(parallelize_module(self, mesh["tensor"], plan), mesh=shards)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def _tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "shard", "tensor"))
    nets = [_Halves(mesh, mesh["node", "shard"]), _Halves(mesh, mesh["shard"])]
    quantize_all_reduce(nets[1], QuantizedAllreduceState(mesh["node"], min_bytes=EXACT))
    generator = torch.Generator().manual_seed(rank // 2)  # a batch for each node
    x = torch.randn(4, 37, generator=generator)
    for net in nets:
        net(x).square().mean().backward()
    return all_equal(*map(gradients, nets))


def _everything(rank):
    return _switches(rank), _tensor_parallel(rank)


def test_switches_and_companions_have_the_bits_of_native_hsdp():
    assert run_ranks(_everything, 4, timeout=120) == [([], True)] * 4
