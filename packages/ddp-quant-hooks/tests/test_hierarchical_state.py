"""Nodes: full precision inside, few bits between, the same bits everywhere."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state, run_hook, same_bits, simulate
from torch.distributed.device_mesh import init_device_mesh

import ddp_quant_hooks.state
from ddp_quant_hooks import HierarchicalAllreduceState
from dist_utils.testing import grad_bucket, run_ranks, tcp_bytes_sent


def _inputs(length, dtype=torch.float32):
    return [
        torch.randn(length, generator=torch.Generator().manual_seed(length + peer)).to(dtype)
        for peer in range(dist.get_world_size())
    ]


def _grid(rank, nodes, local):
    """Rank r is on node r // local; returns how many cases were compared."""
    mesh = init_device_mesh("cpu", (nodes, local))
    intra, inter = mesh.get_group(1), mesh.get_group(0)
    bucket = grad_bucket([torch.ones(3)])
    ddp_quant_hooks.state._CHUNK_ELEMENTS = 2000
    compared = 0
    for length in (1, 128, 1000, 12_345):
        for dtype in (torch.float32, torch.bfloat16):
            for by_mesh in (True, False):
                state = (
                    HierarchicalAllreduceState(mesh=mesh, min_bytes=0)
                    if by_mesh
                    else HierarchicalAllreduceState(intra, inter, min_bytes=0)
                )
                inputs = _inputs(length, dtype)
                node_means = [torch.zeros(length) for _ in range(nodes)]
                for peer, values in enumerate(inputs):
                    node_means[peer // local] += values.float() / local
                expected = node_means[0]
                if nodes > 1:
                    # Shards of shards end at block boundaries: the formula is that of the flat exchange.
                    expected = simulate(make_state("int8"), node_means)
                result = run_hook(state, bucket, inputs[rank].clone())
                assert same_bits(result, expected.to(dtype)), (length, dtype)
                compared += 1
                state.close()
    broken = _inputs(1000)
    broken[-1][500] = torch.nan
    state = HierarchicalAllreduceState(mesh=mesh, min_bytes=0, error_feedback="both")
    result = run_hook(state, bucket, broken[rank].clone())
    first = result.clone()
    dist.broadcast(first, 0)
    assert same_bits(first, result)
    assert result[500].isnan()
    ddp_quant_hooks.state._CHUNK_ELEMENTS = 100_000  # little padding, few headers
    before = tcp_bytes_sent()
    for _ in range(3):
        run_hook(state, bucket, _inputs(100_000)[rank])
    sent = tcp_bytes_sent() - before
    # Inside a node (L - 1) / L of fp32 each way; between nodes 1 / L of what a flat exchange sends.
    values_inside = 2 * (local - 1) / local * 4
    between = {1: 0, 2: 1, 4: 1.5}[nodes] * (1 + 4 / 128) / local
    assert sent == pytest.approx(3 * 100_000 * (values_inside + between), rel=0.06)
    return compared


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (1, 2), (4, 1)])
def test_a_grid_gives_the_bits_of_the_formula(nodes, local):
    assert run_ranks(_grid, nodes * local, nodes, local, timeout=90) == [16] * (nodes * local)


def _no_grid(rank):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2])]
    intra = pairs[rank // 2]
    inter = pairs[2 + rank % 2]
    with pytest.raises(ValueError, match="needs intra_group and inter_group, or mesh"):
        HierarchicalAllreduceState(intra)
    with pytest.raises(ValueError, match="do not make a grid"):
        HierarchicalAllreduceState(intra, intra)
    with pytest.raises(ValueError, match="two dimensions"):
        HierarchicalAllreduceState(mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError, match="either mesh, or"):
        HierarchicalAllreduceState(intra, inter, mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="not all of them in process_group"):
        HierarchicalAllreduceState(intra, inter, process_group=intra)
    # Each rank's groups look right alone; together they are no grid: ranks 0 and 3 cross over.
    crossed = pairs[4] if rank in {0, 3} else pairs[5]
    state = HierarchicalAllreduceState(intra, crossed if rank in {0, 3} else inter, min_bytes=0)
    with pytest.raises(RuntimeError, match="the groups are no grid"):
        run_hook(state, grad_bucket([torch.ones(3)]), torch.ones(1000))


def test_groups_that_are_no_grid_are_refused_on_every_rank():
    run_ranks(_no_grid, 4, timeout=60, group_timeout=15)
