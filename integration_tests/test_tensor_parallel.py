"""Tensor parallelism in one dimension of a mesh, DDP in the other: hooks and steps stay in theirs."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, fp16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import run_ranks, same_on_all_ranks

HOOKS = {
    "none": lambda group: (None, None),
    "8 bits": lambda group: (
        QuantizedAllreduceState(group, min_bytes=0, error_feedback="both"),
        quantized_allreduce_hook,
    ),
    "16 bits": lambda group: (CompressState(group, accumulate="fp32"), fp16_compress_hook),
}


class _Job:
    def __init__(self, mesh, hook, *, overlaps=False):
        self.mesh = mesh
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 32)
        )
        net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.ddp = DistributedDataParallel(net, device_mesh=mesh["dp"], bucket_cap_mb=0.005)
        # After the first forward pass, torch's adapter between the two no longer lists DTensor parameters.
        self.parameters = list(self.ddp.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        self.state, function = HOOKS[hook](mesh["dp"])
        if hook == "8 bits":
            self.state.bind(self.ddp)
        self.handle = None
        if overlaps:
            self.handle = overlap_optimizer(
                self.ddp, self.optimizer, comm_hook=function, comm_state=self.state
            )
        elif function is not None:
            self.ddp.register_comm_hook(self.state, function)

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.mesh["dp"].get_local_rank())
            self.optimizer.zero_grad()
            self.ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
            self.optimizer.step()
        return self

    def values(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def gradients(self):
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters])


def _resumed(mesh):
    """Return the parameters of a run with residuals that was resumed, and of an uninterrupted one."""
    through = _Job(mesh, "8 bits", overlaps=True).train(range(3))
    saved = copy.deepcopy((through.values(), through.optimizer.state_dict(), through.state.state_dict()))
    through.train(range(3, 5))
    resumed = _Job(mesh, "8 bits", overlaps=True)
    with resumed.handle.pause():  # a pass, so that DDP makes its final buckets
        resumed.ddp(torch.ones(8, 32)).sum().backward()
    resumed.optimizer.zero_grad()
    with torch.no_grad():
        for parameter, values in zip(
            resumed.parameters, saved[0].split([one.numel() for one in resumed.parameters]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))
    resumed.optimizer.load_state_dict(saved[1])
    resumed.state.load_state_dict(saved[2])
    return through.values(), resumed.train(range(3, 5)).values()


def _both_dimensions(rank):
    del rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for hook in HOOKS:
        job = _Job(mesh, hook).train([0])
        gradients, values = job.gradients(), job.train(range(1, 5)).values()
        overlapped = _Job(mesh, hook, overlaps=True).train(range(5)).values()
        same = same_on_all_ranks([values], mesh["dp"])
        found[hook] = gradients, torch.equal(values, overlapped), same
    return found, _resumed(mesh)


def test_tensor_parallel_beside_hooks_and_overlap():
    for found, (through, resumed) in run_ranks(_both_dimensions, 4, timeout=240):
        exact, _, _ = found["none"]
        for hook, (gradients, overlapped, same) in found.items():
            assert overlapped
            assert same
            # The loss of 8 bits relative to a block's largest value, and three roundings to 11 bits.
            limit = {"none": 0, "8 bits": 2e-2, "16 bits": 3 * 2**-11}[hook]
            assert (gradients - exact).norm() <= limit * exact.norm()
        assert torch.equal(through, resumed)
