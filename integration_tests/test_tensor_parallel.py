"""Tensor parallelism in one dimension of a mesh, DDP in the other: hooks and steps stay in theirs."""

import functools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainings import HOOKS, WIDTH, assert_resumes, assert_same_bits, no_hook, with_hook

from dist_utils.testing import run_ranks, same_on_all_ranks

ALL = {"none": no_hook} | {name: HOOKS[name] for name in ("8 bits, feedback", "bf16, fp32 sums")}
# The loss of 8 bits relative to a block's largest value, and three roundings to 8 bits.
LIMITS = {"none": 0, "8 bits, feedback": 2e-2, "bf16, fp32 sums": 3 * 2**-8}


def _begin(mesh, hook, overlap=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    )
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dp = mesh["dp"]
    return with_hook(dp.get_group(), ALL[hook], overlap, net=net, process_group=None, device_mesh=dp)


def _both_dimensions(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = {}
    for hook in ALL:
        training = _begin(mesh, hook).train([0])
        gradients[hook] = torch.cat(
            [one.grad.flatten() for one in training.optimizer.param_groups[0]["params"]]
        )
        found = training.train(range(1, 5)).parameters()
        assert_same_bits(_begin(mesh, hook, {}).train(range(5)).parameters(), found)
        assert same_on_all_ranks(found, mesh["dp"])
    assert_resumes(functools.partial(_begin, mesh, "8 bits, feedback", {}))
    return {hook: (each - gradients["none"]).norm() / each.norm() for hook, each in gradients.items()}


def test_tensor_parallel_beside_hooks_and_overlap():
    for errors in run_ranks(_both_dimensions, 4, timeout=240):
        assert {hook: error for hook, error in errors.items() if not error <= LIMITS[hook]} == {}
