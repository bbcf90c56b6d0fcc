"""Finite stays finite: values and residuals near the end of every range, in every kind of exchange."""

import itertools

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state, run_hook

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import grad_bucket, run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
STEPS = 3

# By name: the hook, and the function that makes its state.
FLAT = {
    "int8": (quantized_allreduce_hook, lambda: make_state("feedback both")),
    "int4": (quantized_allreduce_hook, lambda: make_state("int4", error_feedback="both")),
    "int4/fp16": (quantized_allreduce_hook, lambda: make_state("int4", gather="fp16", error_feedback="both")),
    "plain": (quantized_allreduce_hook, lambda: make_state("feedback both", min_bytes=1 << 30)),
    "exact": (quantized_allreduce_hook, lambda: make_state("feedback both", exact_1d=True)),
    "perchannel": (quantization_perchannel_hook, lambda: None),
    "pertensor": (quantization_pertensor_hook, lambda: None),
}


def _inputs(dtype, world_size):
    """Return a row for each rank: all combinations of values near the end of the range, then the largest.

    The largest is one that rounding W shares and their sum cannot make infinite.
    """
    kind = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
    largest = torch.finfo(kind).max * (1 - world_size * torch.finfo(kind).eps)
    choices = [largest, -largest, largest * 0.506, 0.0]
    rows = torch.tensor(list(itertools.product(choices, repeat=world_size)), dtype=torch.float64).T.to(kind)
    rows = torch.cat([rows, torch.full((world_size, 256), largest, dtype=kind)], 1)
    return torch.view_as_complex(rows.view(world_size, -1, 2)) if dtype.is_complex else rows


def _run(hook, state, dtype):
    """Return how many steps gave finite means, identical on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, good = _inputs(dtype, world_size), 0
    half = inputs.shape[1] // 2
    bucket = grad_bucket([torch.ones(1, half), torch.ones(inputs.shape[1] - half)])
    for step in range(STEPS):
        # The next step adds the first one's residual at the very end of the range.
        mine = inputs[rank].clone() if step else inputs[rank] * 0.506
        if step == 2:
            mine.copy_(inputs[0, -1].expand_as(mine))
        result = run_hook(state, bucket, mine, hook)
        first = result.clone()
        dist.broadcast(torch.view_as_real(first) if first.is_complex() else first, 0)
        good += bool(result.isfinite().all()) and torch.equal(first, result)
    if state is not None:
        state.close()
    return good


def _flat(rank):
    return {
        (name, dtype): _run(hook, make(), dtype) for name, (hook, make) in FLAT.items() for dtype in DTYPES
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mean_of_finite_values_is_finite(world_size):
    for seen in run_ranks(_flat, world_size, timeout=200):
        assert seen == dict.fromkeys(itertools.product(FLAT, DTYPES), STEPS)


def _on_hosts(rank, hosts):
    nodes = [[rank for rank, name in enumerate(hosts) if name == host] for host in sorted(set(hosts))]
    groups = [dist.new_group(node) for node in nodes]
    options, seen = {"intra_group": groups[int(hosts[rank])], "min_bytes": 0, "error_feedback": "both"}, {}
    for dtype in DTYPES:
        for bits, inside in ((8, "full"), (4, "full"), (8, "quantized")):
            state = HierarchicalAllreduceState(bits=bits, intra_node=inside, **options)
            seen[dtype, bits, inside] = _run(quantized_allreduce_hook, state, dtype)
    # The second step adds the residual of the first one to the largest value.
    state = HierarchicalAllreduceState(**options)
    bucket = grad_bucket([torch.ones(512, dtype=torch.float16)])
    for values in ([65504.0] + [33152.0] * 511, [65504.0] * 512):
        result = run_hook(state, bucket, torch.tensor(values, dtype=torch.float16))
    seen["reported"] = result.tolist() == [65504.0] * 512
    broken = torch.ones(512, dtype=torch.float16)
    broken[7] = torch.inf
    seen["infinity"] = not run_hook(state, bucket, broken)[7].isfinite().item()
    state.close()
    return seen


@pytest.mark.parametrize("hosts", ["0011", "0001", "012"])
def test_a_mean_of_finite_values_is_finite_on_hosts(hosts):
    kinds = [(8, "full"), (4, "full"), (8, "quantized")]
    expected = {(dtype, *kind): STEPS for dtype, kind in itertools.product(DTYPES, kinds)}
    for seen in run_ranks(_on_hosts, len(hosts), hosts, timeout=200):
        assert seen == {**expected, "reported": True, "infinity": True}
