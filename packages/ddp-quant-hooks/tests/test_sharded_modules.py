"""FSDP2's records of a model's modules."""

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks.sharded_modules import require_fsdp_method, sharded_modules
from dist_utils.testing import run_ranks


def _modules(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "shard"))
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    fsdp.fully_shard(net[1], mesh=mesh["shard"])
    fsdp.fully_shard([net[2], net[3]], mesh=mesh["shard"])
    fsdp.fully_shard(net[4], mesh=mesh)
    net[0].weight.requires_grad_(False)
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    found = {module.name: module for module in sharded_modules(torch.nn.Sequential(net))}
    assert list(found) == ["0", "0.1", "0.2", "0.4"]
    assert {name: module.replicated for name, module in found.items() if module.replicated} == {"0.4": True}
    assert found["0"].shard_ranks == [0, 1]
    assert found["0"].shard_of == (rank, 2)
    assert found["0.1"].shard_ranks == [rank]
    assert found["0.1"].shapes == [("weight", (4, 4)), ("bias", (4,))]
    assert [module.places for module in found.values()] == [
        [f"({rank},) of (2,)"],
        ["(0,) of (1,)"],
        ["(0,) of (1,)"],
        [f"({rank}, 0) of (2, 1)"],
    ]
    assert [len(module.parameters) for module in found.values()] == [1, 2, 4, 2]
    assert all(module.all_reduce_wanted for module in found.values())
    net.set_requires_all_reduce(False)
    assert not any(module.all_reduce_wanted for module in found.values())
    assert all(module.divide_factor is None for module in found.values())
    assert sharded_modules(torch.nn.Linear(1, 1)) == []
    one = found["0.4"]
    one.waiting_sum = waiting = torch.ones(3)
    assert one.waiting_sum is waiting
    if hasattr(net, "reset_iter_state"):
        net(torch.ones(1, 4))
        net.reset_iter_state()
        assert one.waiting_sum is None
    assert not one.takes_gradients
    one.parameters[0].register_post_accumulate_grad_hook(print)
    assert one.takes_gradients
    for parameter in one.parameters:
        parameter.grad = torch.ones_like(parameter)
    one.zero_gradients_in(one.parameters[0].grad.to_local())
    assert [bool(parameter.grad.to_local().any()) for parameter in one.parameters] == [False, True]


def test_modules_of_fully_shard_are_found_with_their_shards():
    run_ranks(_modules, 2, timeout=60)


def test_a_method_that_torch_lacks_is_named():
    require_fsdp_method("set_requires_all_reduce")
    with pytest.raises(RuntimeError, match=r"has no FSDPModule\.set_nothing: a newer one is needed"):
        require_fsdp_method("set_nothing")
