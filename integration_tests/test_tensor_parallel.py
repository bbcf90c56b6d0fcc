"""Tensor parallelism in one dimension of a mesh, DDP in the other: hooks and steps stay in theirs."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainings import HOOKS, WIDTH, no_hook, with_hook

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


def _resume(mesh):
    """Return the parameters of a run with residuals that was resumed, and of an uninterrupted one."""
    through = _begin(mesh, "8 bits, feedback", {}).train(range(3))
    saved = copy.deepcopy((through.parameters(), through.optimizer.state_dict(), through.state.state_dict()))
    resumed = _begin(mesh, "8 bits, feedback", {})
    resumed.make_final_buckets()
    for parameter, value in zip(resumed.parameters(), saved[0], strict=True):
        parameter.copy_(value)
    resumed.optimizer.load_state_dict(saved[1])
    resumed.state.load_state_dict(saved[2])
    return resumed.train(range(3, 5)).parameters(), through.train(range(3, 5)).parameters()


def _both_dimensions(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = {}
    for hook in ALL:
        training = _begin(mesh, hook).train([0])
        gradients[hook] = torch.cat(
            [one.grad.flatten() for one in training.optimizer.param_groups[0]["params"]]
        )
        found = training.train(range(1, 5)).parameters()
        torch.testing.assert_close(_begin(mesh, hook, {}).train(range(5)).parameters(), found, rtol=0, atol=0)
        assert same_on_all_ranks(found, mesh["dp"])
    torch.testing.assert_close(*_resume(mesh), rtol=0, atol=0)
    return {hook: (each - gradients["none"]).norm() / each.norm() for hook, each in gradients.items()}


def test_tensor_parallel_beside_hooks_and_overlap():
    for errors in run_ranks(_both_dimensions, 4, timeout=240):
        assert {hook: error for hook, error in errors.items() if not error <= LIMITS[hook]} == {}
