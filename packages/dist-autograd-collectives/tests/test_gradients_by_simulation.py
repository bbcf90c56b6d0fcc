"""Values and gradients against two oracles: a simulation with all ranks' inputs, and finite differences."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import CASES, inputs, loss
from torch.distributed.device_mesh import DeviceMesh

from dist_utils.testing import run_ranks

GROUPS = {"world": None, "1 and 2": [1, 2], "0 and 2": [0, 2], "alone": [1]}
# At most a few dozen roundings, each by half an epsilon of a number no larger than the largest result.
ROUNDINGS = 64


def simulated(case, ranks, shape, dtype, strides):
    """Return all ranks' outputs, gradients and second-order gradients."""
    xs = [inputs(rank, shape, dtype).requires_grad_() for rank in ranks]
    outputs = case.simulate(xs)
    total = sum(loss(rank, out, strides) for rank, out in zip(ranks, outputs, strict=True))
    first = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    if strides == "expanded":
        return outputs, first, None
    scalar = sum(loss(rank + 7, [gradient]) for rank, gradient in zip(ranks, first, strict=True))
    scalar = scalar + sum((0 * x).abs().sum() for x in xs)  # some outputs do not depend on x
    return outputs, first, torch.autograd.grad(scalar, xs, materialize_grads=True)


def measured(case, rank, group, ranks, shape, dtype, strides, device):
    """Return the same of this rank, by communication."""
    x = inputs(rank, shape, dtype).to(device)
    if strides == "transposed" and rank % 2:
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    x.requires_grad_()
    outputs = case.call(x, group, ranks)
    (first,) = torch.autograd.grad(loss(rank, outputs, strides), x, create_graph=True)
    if strides == "expanded":
        return outputs, first, None
    return outputs, first, torch.autograd.grad(loss(rank + 7, [first]), x)[0]


def roundings(ours, right):
    """Return the largest difference in roundings; infinity if shapes, dtypes or NaNs differ."""
    ours = ours.detach().cpu()
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return float("inf")
    if not ours.numel():
        return 0.0
    difference = torch.where(ours == right, 0, ours - right).abs().nan_to_num(nan=float("inf"))
    scale = right.abs().nan_to_num().max().clamp(min=1).item()
    return difference.max().item() / scale / torch.finfo(ours.dtype).eps


def has_meaning(name, shape, dtype):
    """Whether a case works on such tensors."""
    if not CASES[name].linear and dtype is not torch.float64:
        return False  # complex numbers have no order, and ties of rounded ones are others
    if shape == ():
        return "single" not in name and "all_to_all_dim" not in name
    return 0 not in shape or "single, uneven" not in name


def compare(rank, variants, device="cpu", groups=tuple(GROUPS)):
    """Return what differs on this rank, of each case in the groups, as the roundings of its results."""
    wrong = {}
    everyone = list(range(dist.get_world_size()))
    for group_name in groups:
        members = GROUPS[group_name]
        group, ranks = dist.new_group(members), members or everyone
        if rank not in ranks:
            continue
        if group_name == "0 and 2":
            group = DeviceMesh.from_group(group, device)
        for shape, dtype, strides in variants:
            for name, case in CASES.items():
                if not has_meaning(name, shape, dtype):
                    continue
                ours = measured(case, rank, group, ranks, shape, dtype, strides, device)
                right = simulated(case, ranks, shape, dtype, strides)
                mine = ranks.index(rank)
                pairs = [*zip(ours[0], right[0][mine], strict=True), (ours[1], right[1][mine])]
                pairs += [(ours[2], right[2][mine])] if right[2] else []
                errors = [roundings(*pair) for pair in pairs]
                if max(errors) > ROUNDINGS:
                    wrong[group_name, name, shape, dtype, strides] = errors
    return wrong


VARIANTS = {
    "plain": [((2, 3), torch.float64, "plain")],
    "strides": [((2, 3), torch.float64, "transposed"), ((2, 3), torch.float64, "expanded")],
    "shapes": [(shape, torch.float64, "plain") for shape in ((), (0, 3), (2, 0))],
    "dtypes": [((2, 3), torch.complex128, "plain"), ((2, 3), torch.bfloat16, "plain")],
}


@pytest.mark.parametrize("variants", VARIANTS)
def test_values_and_gradients_of_both_orders(variants):
    size, groups = (4, tuple(GROUPS)) if variants == "plain" else (3, ("world",))
    assert run_ranks(compare, size, VARIANTS[variants], "cpu", groups, timeout=100) == [{}] * size


def _compare_on_another_backend(rank, size):
    """Gloo under another name, where the package uses the backend's own collectives."""

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("other", create, devices=["cpu"])
    dist.init_process_group("other", rank=rank, world_size=size)
    return compare(rank, [*VARIANTS["plain"], ((), torch.float64, "plain")], groups=("world", "1 and 2"))


def test_the_collectives_of_other_backends_give_the_same():
    assert run_ranks(_compare_on_another_backend, 3, 3, backend=None, timeout=100) == [{}] * 3


STEP = 1e-6
# The loss's third derivatives are below 1e3 here, so the formula is off by 1e3 STEP^2 / 6; and its two
# values, below 1e3, carry rounding of 1e3 x 2^-53 each, divided by the step.
TOLERANCE = 1e-6


def _total(rank, case, x, ranks):
    total = torch.as_tensor(loss(rank, case.call(x, None, ranks))).detach()
    dist.all_reduce(total)
    return total.item()


def _finite_differences(rank):
    """One element of one rank moves at a time, all ranks' losses count."""
    ranks, wrong = list(range(dist.get_world_size())), {}
    for name, case in CASES.items():
        # Without ties, where the derivative does not exist.
        x = inputs(rank, (2,), torch.float64, ties=False).requires_grad_()
        loss(rank, case.call(x, None, ranks)).backward()
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        numeric = torch.zeros_like(gradient)
        for mover in ranks:
            for element in range(x.numel()):
                step = torch.zeros_like(gradient)
                step[element] = STEP if rank == mover else 0
                above, below = (_total(rank, case, x.detach() + sign * step, ranks) for sign in (1, -1))
                if rank == mover:
                    numeric[element] = (above - below) / (2 * STEP)
        error = (gradient - numeric).abs().max().item()
        if not error <= TOLERANCE * max(1, numeric.abs().max().item()):  # NaN is wrong, too
            wrong[name] = error, gradient.tolist(), numeric.tolist()
    return wrong


def test_every_gradient_is_the_derivative_of_all_ranks_losses():
    assert run_ranks(_finite_differences, 3, timeout=120) == [{}, {}, {}]
