"""Hooks inside a compiled backward: no bucket, no future, functional collectives, one graph."""

import pytest
import torch
import torch.distributed as dist
from hook_buckets import HOOKS, OURS, state_of
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, fp16_compress_hook
from dist_utils.testing import run_ranks, same_on_all_ranks

SATURATE = ["saturate wire", "saturate fp32"]
LARGEST = 60_000.0


class _Net(torch.nn.Module):
    """A layer, and a weight whose gradient is near the end of fp16's range, but for an infinity."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(30, 31)
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("gradient", torch.tensor([LARGEST, -LARGEST, 1.0, torch.inf]))

    def forward(self, x):
        ends = (self.weight[:3] * self.gradient[:3]).sum() + (self.weight[3:] * self.gradient[3:]).sum()
        return self.layer(x).square().sum() + ends


def _compiled(rank, backend, names):
    """Compare gradients of a compiled step with each hook with those of plain DDP."""
    inputs = torch.rand(4, 30, generator=torch.Generator().manual_seed(rank))
    reference = DistributedDataParallel(_Net())
    reference(inputs).backward()
    expected = reference.module.layer.weight.grad
    seen = {}
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = DistributedDataParallel(_Net())
        if name in SATURATE:
            state = CompressState(accumulate=name.split()[1], saturate=True)
            model.register_comm_hook(state, fp16_compress_hook)
        else:
            model.register_comm_hook(state_of(name), HOOKS[name][0])
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
                compiled(inputs).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert same_on_all_ranks(gradients), name
        assert dict(torch._dynamo.utils.counters["graph_break"]) == {}
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
        error = (model.module.layer.weight.grad - expected).norm() / expected.norm()
        seen[name] = error.item(), model.module.weight.grad.tolist()
        dist.barrier()
    return seen


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ["bf16_compress_hook/fp32", "saturate wire"]),
        pytest.param("inductor", [*OURS, *SATURATE], marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_backward_is_one_graph_with_the_means_of_finite_values_finite(backend, names):
    for seen in run_ranks(_compiled, 2, backend, names, timeout=300):
        assert list(seen) == names
        for name, (error, (high, low, one, infinity)) in seen.items():
            wire = HOOKS[name][1] if name in HOOKS else torch.float16
            eps = torch.finfo(wire).eps if wire in (torch.float16, torch.bfloat16) else 2**-21
            assert error < 1.5 * eps  # two casts and a sum, each rounded by half an epsilon
            assert (low, infinity) == (-high, torch.inf), name
            assert high == pytest.approx(LARGEST, rel=eps)
            assert one == pytest.approx(1.0, rel=eps)
