"""FSDP2 after a failed pass: what that left behind changes nothing, with any options."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    EXACT,
    all_equal,
    backward,
    gradients,
    needs_hooks,
    needs_reset,
    nodes_and_shards,
    sharded,
    state_between,
)
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks.fsdp import quantize_all_reduce
from dist_utils.testing import patience, run_ranks, same_on_all_ranks
from dist_utils.torch_compat import default_store

pytestmark = [needs_hooks, needs_reset]


class Failing(torch.autograd.Function):
    """Raises in backward while ``failing`` is set."""

    failing = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if Failing.failing:
            raise ZeroDivisionError
        return gradient


class Net(torch.nn.Module):
    """Layers with a place in the middle where backward can fail; optionally under reentrant checkpoints."""

    def __init__(self, mesh, *, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(3))
        self.reentrant = reentrant
        for layer in self.layers:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(self, mesh=mesh)

    def forward(self, x):
        if self.reentrant:
            x.requires_grad_()
        for index, layer in enumerate(self.layers):
            if index == 1:
                x = Failing.apply(x)
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def _fails(net, step, *, forward=False, here=True):
    """Run a pass that fails on this rank, or on its peer; then make FSDP ready for the next."""
    Failing.failing = here and not forward
    handle = net.layers[2].register_forward_pre_hook(_raise) if forward else None
    with pytest.raises(ZeroDivisionError if here else RuntimeError):
        backward(net, step)
    Failing.failing = False
    if handle is not None:
        handle.remove()
    net.reset_iter_state()


def _raise(*_):
    raise ZeroDivisionError


def _accumulated(net):
    net.set_requires_all_reduce(False)
    backward(net, 0)
    net.set_requires_all_reduce(True)
    backward(net, 1)
    return gradients(net)


def _interrupted_sums(_):
    """A step starts over after its second micro-batch failed: in the sum, in the average, or in forward."""
    mesh = nodes_and_shards(1)
    results = []
    for averaged, forward in ((False, False), (True, False), (False, True)):
        nets = [Net(mesh), Net(mesh["shard"])]
        quantize_all_reduce(nets[1], state_between(mesh, min_bytes=EXACT))
        for net in nets:
            net.set_requires_all_reduce(False)
            backward(net, 5)
            net.set_requires_all_reduce(averaged)
            _fails(net, 6, forward=forward)
            net.zero_grad()
        results.append(all_equal(*map(_accumulated, nets)))
    return results


def _zeroed_gradients(_):
    """The exchanges of a failed pass may still run when its gradients are set to zero."""
    mesh = nodes_and_shards(1)
    results = []
    for _ in range(3):
        nets = [Net(mesh), Net(mesh["shard"])]
        quantize_all_reduce(nets[1], state_between(mesh, min_bytes=EXACT))
        for net in nets:
            _fails(net, 0)
            net.zero_grad(set_to_none=False)
            backward(net, 1)
        results.append(all_equal(*map(gradients, nets)))
    return all(results)


def _keys(_):
    """Under reentrant checkpoints, the passes inside a failed one do not count for the next one."""
    mesh = nodes_and_shards(1)
    net, state = Net(mesh["shard"], reentrant=True), state_between(mesh, bits=4)
    quantize_all_reduce(net, state)
    _fails(net, 0)
    net.zero_grad()
    backward(net, 1)
    return sorted(state.stand_ins.named)


def _after_failures(rank):
    return _interrupted_sums(rank), _zeroed_gradients(rank), _keys(rank)


def test_nothing_of_a_failed_pass_comes_into_the_next():
    wanted = ([True] * 3, True, ["layers.0", "layers.1", "layers.2"])
    assert run_ranks(_after_failures, 2, timeout=100) == [wanted] * 2


def _one_rank_failed(rank):
    mesh = nodes_and_shards(1)
    net, state = Net(mesh["shard"], reentrant=True), state_between(mesh, bits=4)
    quantize_all_reduce(net, state)
    backward(net, 0)
    if rank == 1:
        _fails(net, 1)
        state.close()
    else:
        _fails(net, 1, here=False)
        state.close()
    net.zero_grad()
    backward(net, 2)
    return same_on_all_ranks(gradients(net))


def test_close_is_a_fresh_start_under_reentrant_checkpoints():
    assert all(run_ranks(_one_rank_failed, 2, timeout=100, group_timeout=20))


def _late(rank, timeout):
    """Ranks wait for each other in vain and make the step again. The root has a parameter of its own."""
    nodes = dist.new_group([0, 1], timeout=timedelta(seconds=timeout))
    shard = [dist.new_group([one]) for one in range(2)][rank]
    mesh = DeviceMesh.from_group(
        [nodes, shard], "cpu", mesh=torch.arange(2).view(2, 1), mesh_dim_names=("node", "shard")
    )
    nets, state = [sharded(mesh), sharded(mesh["shard"])], state_between(mesh, min_bytes=EXACT)
    net = nets[1]
    quantize_all_reduce(net, state)
    if rank == 1:
        default_store().wait(["raised"], timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="did not"):
        backward(net, 0)
    default_store().set("raised", "")
    dist.barrier()
    state.close()
    net.zero_grad()
    net.reset_iter_state()
    net.zero_grad()
    for one in nets:
        backward(one, 1)
    return all_equal(*map(gradients, nets))


def test_ranks_that_waited_in_vain_can_make_the_step_again():
    assert all(run_ranks(_late, 2, patience(1.0), timeout=100))
