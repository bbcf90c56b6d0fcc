"""Hooks inside a compiled backward: no bucket, no future, functional collectives, one graph."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from hook_buckets import FOREIGN, HOOKS, state_of
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, fp16_compress_hook
from dist_utils.testing import run_ranks

NAMES = [*(name for name in HOOKS if name not in FOREIGN), "saturate wire", "saturate fp32"]


def _saturating(accumulate):
    return CompressState(accumulate=accumulate, saturate=True)


def _loss(model, rank):
    generator = torch.Generator().manual_seed(rank)
    return model(torch.rand(4, 30, generator=generator)).square().sum()


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 31), torch.nn.ReLU(), torch.nn.Linear(31, 1))


def _compiled(rank, backend, names):
    """Gradients of a compiled step with each hook, and of plain DDP."""
    reference = DistributedDataParallel(_net())
    _loss(reference, rank).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    seen = {}
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = DistributedDataParallel(_net())
        if name.startswith("saturate"):
            model.register_comm_hook(_saturating(name.split()[1]), fp16_compress_hook)
        else:
            model.register_comm_hook(state_of(name), HOOKS[name][0])
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
                _loss(compiled, rank).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
        captured = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
        dist.barrier()
        error = (gradient - expected).norm() / expected.norm()
        seen[name] = error.item(), breaks, captured, gradient
    return seen


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ["bf16_compress_hook/fp32", "saturate wire"]),
        pytest.param("aot_eager", NAMES, marks=pytest.mark.exhaustive),
        pytest.param("inductor", NAMES, marks=pytest.mark.exhaustive),
    ],
    ids=["aot_eager", "aot_eager, every hook", "inductor, every hook"],
)
def test_compiled_backward(backend, names):
    first, second = run_ranks(_compiled, 2, backend, names, timeout=600)
    assert list(first) == names
    for name in first:
        (error, breaks, captured, gradient), (_, _, _, other) = first[name], second[name]
        wire = HOOKS[name][1] if name in HOOKS else torch.float16
        assert error < {torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}.get(wire, 2**-20)
        assert breaks == {}
        assert captured > 0
        assert torch.equal(gradient, other)
