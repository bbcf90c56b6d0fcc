"""Finite means stay finite: every combination of values near the end of a range, on 2, 3 and 4 ranks."""

import itertools
import math

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from hook_buckets import FOREIGN, HOOKS, foreign_hook, make_bucket, run_hook, state_of
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook
from dist_utils.testing import run_ranks

NAMES = [name for name in HOOKS if name not in FOREIGN]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def combinations(choices, world_size):
    """Return one row of values per rank; the columns are all combinations."""
    return torch.tensor(list(itertools.product(choices, repeat=world_size)), dtype=torch.float64).T


def at_the_end(dtype, wire):
    """Return values near the end of the narrower range, which rounding cannot make infinite, and others."""
    step = max(torch.finfo(kind).eps for kind in (dtype, wire))
    largest = min(torch.finfo(kind).max for kind in (dtype, wire)) * (1 - dist.get_world_size() * step)
    return [largest, -largest, largest * (1 - step), largest * 0.75, 1.0]


def exact_mean(rows):
    """Return the mean in fp64, without overflow even for its largest numbers."""
    largest = torch.finfo(torch.float64).max
    return (rows / len(rows)).sum(0).clamp(-largest, largest)


def sparse(values):
    """Return values as a sparse bucket with two entries per index."""
    places = torch.arange(values.numel()).repeat(2)
    return torch.sparse_coo_tensor(
        places[None], torch.cat([values / 2, values / 2]), values.shape, check_invariants=True
    )


def _in_range(rank):
    world_size, bucket, compared = dist.get_world_size(), make_bucket(), 0
    for name in NAMES:
        for dtype in DTYPES:
            real = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
            wire = HOOKS[name][1] or real
            rows = combinations(at_the_end(real, wire), world_size)
            rows = torch.cat([rows, rows[:, :1]], 1) if rows.shape[1] % 2 else rows
            inputs = rows.to(real)
            mine = inputs[rank].clone()
            tensor = torch.view_as_complex(mine.view(-1, 2)) if dtype.is_complex else mine
            result = run_hook(name, bucket, tensor)
            result = torch.view_as_real(result).flatten() if dtype.is_complex else result
            assert result.isfinite().all(), (name, dtype, rows[:, ~result.isfinite()])
            first = result.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, result), (name, dtype)
            # One rounding in the wire dtype per share and addition, at the end of the range.
            eps = torch.finfo(wire).eps + torch.finfo(real).eps
            allowed = world_size * eps * inputs.double().abs().max()
            error = (result.double() - exact_mean(inputs.double())).abs().max()
            assert error <= allowed, (name, dtype, error / allowed)
            compared += 1
    for dtype in (torch.bfloat16, torch.float32, torch.float64):  # torch cannot add sparse fp16
        values = combinations(at_the_end(dtype, dtype), world_size)[rank].to(dtype)
        bucket.set_buffer(sparse(values))
        result = HOOKS["allreduce_hook"][0](None, bucket).wait()
        assert result.coalesce().values().isfinite().all(), dtype
        compared += 1
    return compared


def _larger_than_the_wire(rank):
    """Values that partly exceed the wire dtype's range, with a mean inside it, summed in fp32."""
    world_size, bucket, compared = dist.get_world_size(), make_bucket(), 0
    for hook, wire in ((fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)):
        eps = torch.finfo(wire).eps
        largest = torch.finfo(wire).max * (1 - eps)
        state = CompressState(accumulate="fp32")
        # Shares that are rounded up in fp16 and bf16, with means near the end of the range.
        random = torch.rand(world_size, 20_000, generator=torch.Generator().manual_seed(3)).double()
        signs = torch.where(torch.arange(20_000) % 2 == 0, 1.0, -1.0)
        inputs = random / random.sum(0) * signs * largest * (world_size if wire == torch.float16 else 1)
        inputs = inputs.to(torch.float32)
        inputs = torch.where(
            inputs.double().sum(0).abs() / world_size > largest, inputs * (1 - 2**-22), inputs
        )
        bucket.set_buffer(inputs[rank].clone())
        result = hook(state, bucket).wait()
        assert result.isfinite().all(), (wire, inputs[:, ~result.isfinite()][:, 0].tolist())
        error = (result.double() - exact_mean(inputs.double())).abs().max()
        assert error <= (world_size + 1) * eps * largest
        compared += 1
    # A mean that exceeds fp16's range by more than rounding is a visible infinity.
    state = CompressState(accumulate="fp32")
    bucket.set_buffer(torch.tensor([66_000.0, -66_000.0, 65_472.0]))
    assert fp16_compress_hook(state, bucket).wait().tolist() == [torch.inf, -torch.inf, 65_472.0]
    # bf16 lacks fp16's largest number, and the result of a wrapped hook is rounded to a number above it.
    bucket.set_buffer(torch.tensor([65_504.0, torch.inf], dtype=torch.float16))
    held, infinite = bf16_compress_wrapper(foreign_hook)(None, bucket).wait().tolist()
    assert 65_000 < held <= 65_504
    assert infinite == torch.inf
    return compared


def _not_finite(rank):
    world_size, bucket, compared = dist.get_world_size(), make_bucket(), 0
    for name in NAMES:
        for dtype in DTYPES[:4]:
            largest = at_the_end(dtype, HOOKS[name][1] or dtype)[0]
            special = [torch.inf, -torch.inf, torch.nan, largest] if rank == world_size - 1 else [largest] * 4
            infinity, minus, nan, finite = run_hook(name, bucket, torch.tensor(special, dtype=dtype)).tolist()
            assert (infinity, minus) == (torch.inf, -torch.inf), (name, dtype)
            assert math.isnan(nan), (name, dtype)
            assert 0.9 * largest < finite < torch.inf, (name, dtype)
            compared += 1
    return compared


def _all(rank):
    return [check(rank) for check in (_in_range, _larger_than_the_wire, _not_finite)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mean_of_finite_values_is_finite(world_size):
    expected = [len(NAMES) * len(DTYPES) + 3, 2, 4 * len(NAMES)]
    assert run_ranks(_all, world_size, timeout=200) == [expected] * world_size


def _compiled(rank):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    compared = 0
    for dtype, names in (
        (torch.float16, ["allreduce_hook", "bf16_compress_hook"]),
        (torch.float32, ["fp16_compress_hook", "fp16_compress_hook/fp32"]),
    ):
        for name in names:
            largest = 64_000.0
            gradient = torch.tensor([largest, -largest, 1.0, torch.inf], dtype=dtype)
            torch._dynamo.reset()
            model = DistributedDataParallel(_Times(gradient))
            model.register_comm_hook(state_of(name), HOOKS[name][0])
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                compiled().backward()
            high, low, one, infinity = model.module.weight.grad.tolist()
            assert (low, infinity) == (-high, torch.inf), name
            assert high == pytest.approx(largest, rel=2**-8), name
            assert one == pytest.approx(1.0, rel=2**-6), name
            compared += 1
    return compared


class _Times(torch.nn.Module):
    """A module whose gradient is the given one."""

    def __init__(self, gradient):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros_like(gradient))
        self.register_buffer("gradient", gradient)

    def forward(self):
        return (self.weight[:3] * self.gradient[:3]).sum() + (self.weight[3:] * self.gradient[3:]).sum()


def test_a_mean_of_finite_values_is_finite_under_compile():
    assert run_ranks(_compiled, 3, timeout=200) == [4, 4, 4]
