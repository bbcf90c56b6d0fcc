"""Values and gradients of first and second order against a simulation with all ranks' inputs."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import CASES, inputs, loss
from torch.distributed.device_mesh import DeviceMesh

from dist_autograd_collectives import backend
from dist_utils.testing import run_ranks

GROUPS = {"1 and 2": [1, 2], "0 and 2": [0, 2], "alone": [1]}
# At most a few dozen roundings, each by half an epsilon of a number no larger than the largest result.
ROUNDINGS = 64


def twice(strides):
    """Whether the loss has second derivatives."""
    return strides != "expanded"


def simulated(case, ranks, shape, dtype, strides):
    """Return all ranks' outputs, gradients and second-order gradients."""
    xs = [inputs(rank, shape, dtype).requires_grad_() for rank in ranks]
    outputs = case.simulate(xs)
    total = sum(loss(rank, out, strides) for rank, out in zip(ranks, outputs, strict=True))
    first = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    if not (case.second_order and twice(strides)):
        return outputs, first, None
    scalar = sum(loss(rank + 7, [gradient]) for rank, gradient in zip(ranks, first, strict=True))
    scalar = scalar + sum((0 * x).abs().sum() for x in xs)  # some outputs do not depend on x
    second = torch.autograd.grad(scalar, xs, materialize_grads=True)
    return outputs, first, second


def measured(case, rank, group, ranks, shape, dtype, strides, device="cpu"):
    x = inputs(rank, shape, dtype).to(device)
    if strides == "transposed" and rank % 2:
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    x.requires_grad_()
    outputs = case.call(x, group, ranks)
    if not case.second_order:
        # Not autograd.grad: on a rank whose loss does not depend on x it would not even start.
        loss(rank, outputs, strides).backward()
        return outputs, torch.zeros_like(x) if x.grad is None else x.grad, None
    (first,) = torch.autograd.grad(loss(rank, outputs, strides), x, create_graph=True)
    if not twice(strides):
        return outputs, first, None
    (second,) = torch.autograd.grad(loss(rank + 7, [first]), x)
    return outputs, first, second


def distance(ours, right):
    """Return the largest difference in roundings; infinity if shapes, dtypes or NaNs differ."""
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return float("inf")
    if not ours.numel():
        return 0.0
    difference = torch.where(ours == right, 0, ours - right).abs().nan_to_num(nan=float("inf"))
    scale = right.abs().nan_to_num().max().clamp(min=1).item()
    return difference.max().item() / scale / torch.finfo(ours.dtype).eps


def compare(rank, shape, dtype, names, strides, device="cpu"):
    """Return each case's errors on this rank, in every group that it is in."""
    members = {"world": list(range(dist.get_world_size())), **GROUPS}
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    found = {}
    for group_name, ranks in members.items():
        if rank not in ranks:
            continue
        group = groups[group_name]
        if group_name == "0 and 2":
            group = DeviceMesh.from_group(group, device)
        for name in names:
            case, mine = CASES[name], ranks.index(rank)
            try:
                outputs, first, second = measured(case, rank, group, ranks, shape, dtype, strides, device)
            except Exception as error:
                raise RuntimeError(f"{name} in {group_name}") from error
            all_outputs, all_first, all_second = simulated(case, ranks, shape, dtype, strides)
            errors = [distance(a.cpu(), b) for a, b in zip(outputs, all_outputs[mine], strict=True)]
            found[group_name, name] = (
                max(errors),
                distance(first.cpu(), all_first[mine]),
                0.0 if second is None else distance(second.cpu(), all_second[mine]),
            )
    return found


def wrong_ones(ranks):
    return {
        (rank, *key): errors
        for rank, found in enumerate(ranks)
        for key, errors in found.items()
        if max(errors) > ROUNDINGS
    }


# Linear collectives only: for complex numbers the others have no meaning or no rule for ties.
COMPLEX = [name for name, case in CASES.items() if case.linear]


HAS_A_LAST_DIM = [name for name in CASES if "single" not in name and "all_to_all_dim" not in name]


@pytest.mark.parametrize(
    ("world_size", "shape", "dtype", "names", "strides"),
    [
        (4, (2, 3), torch.float64, list(CASES), "plain"),
        (3, (2, 3), torch.float64, list(CASES), "transposed"),
        (3, (2, 3), torch.float64, list(CASES), "expanded"),
        (3, (), torch.float64, HAS_A_LAST_DIM, "plain"),
        (3, (0, 3), torch.float64, [name for name in CASES if "single, uneven" not in name], "plain"),
        (3, (2, 3), torch.complex128, COMPLEX, "plain"),
        (3, (2, 3), torch.float32, list(CASES), "plain"),
        (3, (2, 3), torch.bfloat16, COMPLEX, "plain"),
    ],
    ids=["float64", "transposed", "expanded", "0-dim", "empty", "complex128", "float32", "bfloat16"],
)
def test_values_and_gradients_of_both_orders(world_size, shape, dtype, names, strides):
    ranks = run_ranks(compare, world_size, shape, dtype, names, strides, timeout=50)
    assert not wrong_ones(ranks)


def _compare_native(rank, *arguments):
    """As on a backend other than Gloo, with the backend's own collectives only."""

    backend.choose = backend.native
    return compare(rank, *arguments)


@pytest.mark.parametrize("shape", [(2, 3), ()], ids=["2-dim", "0-dim"])
def test_the_backends_own_collectives_give_the_same(shape):
    names = HAS_A_LAST_DIM if shape == () else list(CASES)
    ranks = run_ranks(_compare_native, 3, shape, torch.float64, names, "plain", timeout=50)
    assert not wrong_ones(ranks)
