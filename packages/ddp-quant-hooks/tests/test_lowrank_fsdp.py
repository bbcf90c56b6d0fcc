"""Low rank between nodes under FSDP2: each parameter's shard is a matrix."""

import torch
import torch.distributed as dist
from fsdp_models import backward, gradients, needs_hooks, nodes_and_shards, sharded
from quant_buckets import assert_same
from torch.nn.functional import pad

from ddp_quant_hooks import LowRankState, all_reduce
from ddp_quant_hooks.fsdp import quantize_all_reduce
from ddp_quant_hooks.lowrank.state import divide
from dist_utils.testing import run_ranks, same_on_all_ranks

pytestmark = needs_hooks
STEPS = 4


def _state(mesh, **options):
    return LowRankState(mesh["node"], **{"min_bytes": 0, "rank": 2, "warm_up_steps": 1, **options})


def _gradients(net, step):
    """Return this rank's shards of a batch's gradients; ``net`` keeps none."""
    backward(net, step)
    found = gradients(net)
    net.zero_grad()
    return found


def _like_plain_tensors(_):
    """Gradients have the bits of all-reduces of what FSDP has reduced, also after a resume."""
    mesh = nodes_and_shards()
    ours, native, resumed = (sharded(mesh["shard"]) for _ in range(3))
    state, of_tensors, other = _state(mesh), _state(mesh), _state(mesh)
    quantize_all_reduce(ours, state)
    names = [name for name, _ in native.named_parameters()]
    for step in range(STEPS):
        if step == STEPS - 1:
            other.load_state_dict(state.state_dict())
            quantize_all_reduce(resumed, other)
        found, reduced = _gradients(ours, step), dict(zip(names, _gradients(native, step), strict=True))
        # 37 rows are 19 and 18: FSDP pads the shorter shard with zeros.
        padded = {
            name: pad(one, (0, 0) * (one.ndim - 1) + (0, 19 - len(one))) for name, one in reduced.items()
        }
        with of_tensors.step():
            for module in ("layers.2", "layers.1", "layers.0", "scale"):
                parts = [one for name, one in padded.items() if name.startswith(module)]
                all_reduce(parts, dist.ReduceOp.AVG, of_tensors, key=module)
        assert_same(found, [padded[name][: len(reduced[name])] for name in names], step)
    assert_same(found, _gradients(resumed, STEPS - 1), "resumed")


def _several_matrices(_):
    """A module of several matrices loses nothing for good: equal steps add up to their exact mean."""
    mesh, steps = nodes_and_shards(), 16
    ours, native = sharded(mesh["shard"], cut=(0, 1)), sharded(mesh, cut=(0, 1))
    state = _state(mesh, rank=4)
    quantize_all_reduce(ours, state)
    exact = torch.cat([one.flatten() for one in _gradients(native, 0)])
    total = torch.zeros_like(exact)
    for _ in range(steps):
        total += torch.cat([one.flatten() for one in _gradients(ours, 0)])
    assert (total / steps - exact).norm() < 0.1 * exact.norm()
    assert same_on_all_ranks(total, mesh["node"].get_group())
    assert state.statistics.bytes_between_hosts / steps < 0.4 * exact.numel()  # 0.625 in 4 bits


def _on_two_nodes(rank):
    _like_plain_tensors(rank)
    _several_matrices(rank)


def test_shards_have_the_bits_of_plain_tensors_with_their_shapes_and_lose_nothing_for_good():
    run_ranks(_on_two_nodes, 4, timeout=120)


def _left_for_others(rank):
    """Return what two ranks go on with of three, and what the means of a module lack, by parameter."""
    mesh = nodes_and_shards(1)
    ours, native = (sharded(mesh["shard"], cut=(0, 1, 2)) for _ in range(2))
    state = _state(mesh, residual_bits=1)
    quantize_all_reduce(ours, state)
    parameters = [*ours.layers.parameters(), ours.scale]  # in FSDP's order
    missing = torch.zeros(sum(one.numel() for one in parameters))
    for step in range(STEPS):
        (of_root, *exact), (of_ours, *means) = _gradients(native, step), _gradients(ours, step)
        mean = torch.cat([one.flatten() for one in (*exact, of_root)]) / 3
        dist.all_reduce(mean)
        missing += mean - torch.cat([one.flatten() for one in (*means, of_ours)])
    gathered = state.gather_state_dict()
    if rank != 0:
        return None
    left = torch.zeros_like(missing)
    for part in divide(gathered["ranks"], 2):
        for start, weight, values in part["keys"]["(model)"]["slots"]["own"]["pieces"]:
            left[start : start + len(values)] += weight * values.float()
    lengths = [one.numel() for one in parameters]
    return [*zip(torch.split(left, lengths), torch.split(missing, lengths), strict=True)]


def test_another_number_of_nodes_goes_on_with_what_each_parameter_lacks():
    for left, missing in run_ranks(_left_for_others, 3, timeout=120)[0]:
        assert (left - missing).norm() < 0.05 * missing.norm()  # roundings to bf16
