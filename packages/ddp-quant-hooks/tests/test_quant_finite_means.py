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
from dist_utils import require_same_on_all_ranks
from dist_utils.testing import grad_bucket, run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]

# By name: the hook, and the function that makes its state.
FLAT = {
    "int8": (quantized_allreduce_hook, lambda: make_state("feedback both")),
    "int4": (quantized_allreduce_hook, lambda: make_state("int4", error_feedback="both")),
    "int4/fp16": (quantized_allreduce_hook, lambda: make_state("int4", gather="fp16", error_feedback="both")),
    "16 bits": (quantized_allreduce_hook, lambda: make_state("int8", bits=16)),
    "plain": (quantized_allreduce_hook, lambda: make_state("feedback both", min_bytes=1 << 30)),
    "exact": (quantized_allreduce_hook, lambda: make_state("feedback both", exact_1d=True)),
    "perchannel": (quantization_perchannel_hook, lambda: None),
    "pertensor": (quantization_pertensor_hook, lambda: None),
}


def _inputs(dtype, world_size):
    """Return a row for each rank: all combinations of values near the end of the range, then the largest.

    The largest is one that rounding W shares and their sum cannot make infinite.
    """
    kind = dtype.to_real()
    largest = torch.finfo(kind).max * (1 - world_size * torch.finfo(kind).eps)
    choices = [largest, -largest, largest * 0.506, 0.0]
    rows = torch.tensor(list(itertools.product(choices, repeat=world_size)), dtype=torch.float64).T.to(kind)
    rows = torch.cat([rows, torch.full((world_size, 256), largest, dtype=kind)], 1)
    return torch.view_as_complex(rows.view(world_size, -1, 2)) if dtype.is_complex else rows


def _bad_steps(hook, state, dtype):
    """Return the steps with means that are not finite; they must be the same on all ranks."""
    inputs, means = _inputs(dtype, dist.get_world_size()), []
    half = inputs.shape[1] // 2
    bucket = grad_bucket([torch.ones(1, half), torch.ones(inputs.shape[1] - half)])
    for step in range(3):
        # The next step adds the first one's residual at the very end of the range.
        mine = inputs[dist.get_rank()].clone() if step else inputs[dist.get_rank()] * 0.506
        if step == 2:
            mine.copy_(inputs[0, -1].expand_as(mine))
        means.append(run_hook(state, bucket, mine, hook))
    require_same_on_all_ranks(means)
    if state is not None:
        state.close()
    bad = [mean[~mean.isfinite()].tolist() for mean in means]
    return {step: values for step, values in enumerate(bad) if values}


def _flat(_):
    cases = itertools.product(FLAT.items(), DTYPES)
    found = {(name, dtype): _bad_steps(hook, make(), dtype) for (name, (hook, make)), dtype in cases}
    return {case: bad for case, bad in found.items() if bad}


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_mean_of_finite_values_is_finite(world_size):
    assert run_ranks(_flat, world_size, timeout=200) == [{}] * world_size


def _on_hosts(rank, hosts):
    nodes = [[rank for rank, name in enumerate(hosts) if name == host] for host in sorted(set(hosts))]
    groups, found = [dist.new_group(node) for node in nodes], {}
    options = {"intra_group": groups[int(hosts[rank])], "min_bytes": 0, "error_feedback": "both"}
    kinds = ((8, "full"), (4, "full"), (8, "quantized"))
    for dtype, (bits, inside) in itertools.product(DTYPES, kinds):
        state = HierarchicalAllreduceState(bits=bits, intra_node=inside, **options)
        if bad := _bad_steps(quantized_allreduce_hook, state, dtype):
            found[dtype, bits, inside] = bad
    # The second step adds the residual of the first one to the largest value.
    state, bucket = HierarchicalAllreduceState(**options), grad_bucket([torch.ones(3)])
    for values in ([65504.0] + [33152.0] * 511, [65504.0] * 512):
        result = run_hook(state, bucket, torch.tensor(values, dtype=torch.float16))
    assert result.unique().tolist() == [65504.0]
    values = torch.ones(512, dtype=torch.float16)
    values[7] = torch.inf
    assert not run_hook(state, bucket, values)[7].isfinite()
    state.close()
    return found


@pytest.mark.parametrize(
    "hosts", ["0001", *(pytest.param(hosts, marks=pytest.mark.exhaustive) for hosts in ("0011", "012"))]
)
def test_a_mean_of_finite_values_is_finite_on_hosts(hosts):
    assert run_ranks(_on_hosts, len(hosts), hosts, timeout=200) == [{}] * len(hosts)
