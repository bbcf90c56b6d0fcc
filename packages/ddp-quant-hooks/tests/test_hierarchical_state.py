"""Nodes: full precision inside, few bits between them, identical bits on all ranks."""

import copy
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state, run_hook, simulate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ddp_quant_hooks.state
from ddp_quant_hooks import HierarchicalAllreduceState, exchanges, quantized_allreduce_hook
from dist_utils import torch_compat
from dist_utils.testing import grad_bucket, run_ranks, same_bits, same_on_all_ranks, tcp_bytes_sent


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
    ddp_quant_hooks.plans._CHUNK_ELEMENTS = 2000
    compared = 0
    for length in (1, 128, 1000, 12_345):
        for dtype in (torch.float32, torch.bfloat16):
            for by_mesh in (True, False):
                state = (
                    HierarchicalAllreduceState(mesh=mesh, min_bytes=0)
                    if by_mesh
                    else HierarchicalAllreduceState(intra_group=intra, inter_group=inter, min_bytes=0)
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
    assert same_on_all_ranks(result)
    assert result[500].isnan()
    ddp_quant_hooks.plans._CHUNK_ELEMENTS = 100_000  # little padding, few headers
    run_hook(state, bucket, _inputs(100_000)[rank])  # while ranks wait to agree, they poll the store
    counts = []
    for _ in range(5):
        before = tcp_bytes_sent()
        run_hook(state, bucket, _inputs(100_000)[rank])
        counts.append(tcp_bytes_sent() - before)
    sent = statistics.median(counts)  # on a busy machine one of them may include traffic of another
    # Inside a node (L - 1) / L of fp32 each way; between nodes 1 / L of what a flat exchange sends.
    values_inside = 2 * (local - 1) / local * 4
    between = {1: 0, 2: 1, 4: 1.5}[nodes] * (1 + 4 / 128) / local
    assert sent == pytest.approx(100_000 * (values_inside + between), rel=0.06), counts
    return compared


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (1, 2), (4, 1)])
def test_a_grid_gives_the_bits_of_the_formula(nodes, local):
    assert run_ranks(_grid, nodes * local, nodes, local, timeout=90) == [16] * (nodes * local)


def _no_grid(rank):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2])]
    intra = pairs[rank // 2]
    inter = pairs[2 + rank % 2]
    with pytest.raises(ValueError, match="needs intra_group and inter_group, or mesh"):
        HierarchicalAllreduceState(intra_group=intra)
    with pytest.raises(ValueError, match="do not make a grid"):
        HierarchicalAllreduceState(intra_group=intra, inter_group=intra)
    with pytest.raises(ValueError, match="two dimensions"):
        HierarchicalAllreduceState(mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError, match="either mesh, or"):
        HierarchicalAllreduceState(intra_group=intra, mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="not all of them in process_group"):
        HierarchicalAllreduceState(intra, intra_group=intra, inter_group=inter)
    # Each rank's groups look right alone; together they are not a grid: ranks 0 and 3 cross over.
    crossed = pairs[4] if rank in {0, 3} else pairs[5]
    state = HierarchicalAllreduceState(
        intra_group=intra, inter_group=crossed if rank in {0, 3} else inter, min_bytes=0
    )
    with pytest.raises(RuntimeError, match="the groups are not a grid"):
        run_hook(state, grad_bucket([torch.ones(3)]), torch.ones(1000))


def test_groups_that_are_no_grid_are_refused_on_every_rank():
    run_ranks(_no_grid, 4)


def _trains(rank):
    """Train on two nodes of two ranks, with a NaN in one step and a kernel that fails in another."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = HierarchicalAllreduceState(mesh=mesh, min_bytes=0, error_feedback="both")
    model = DistributedDataParallel(torch.nn.Linear(60, 60))
    model.register_comm_hook(state, quantized_allreduce_hook)

    def step(*, poison=False):
        x = torch.randn(3, 60, generator=torch.Generator().manual_seed(rank))
        if poison and rank == 0:
            x[0, 0] = torch.nan  # in one column of a gradient, not in all shards
        model(x).square().sum().backward()
        mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        assert same_on_all_ranks(mine)

    def kept():
        return [bucket["own"].clone() for bucket in state.state_dict(model)["buckets"]]

    for _ in range(5):
        step()
    before = kept()
    assert before[0].abs().max() > 0
    step(poison=True)
    assert torch.equal(before[0], kept()[0])
    with pytest.raises(TypeError, match="does not pickle"):
        copy.deepcopy(state)
    elsewhere = init_device_mesh("cpu", (4, 1))
    with pytest.raises(ValueError, match="the residuals are of intra_group"):
        HierarchicalAllreduceState(mesh=elsewhere, min_bytes=0, error_feedback="both").load_state_dict(
            state.state_dict(model), model
        )
    real = exchanges.kernels.encode_shards

    def broken(*arguments, **options):
        if rank == 1:
            time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
            raise MemoryError("no room for a kernel")
        real(*arguments, **options)

    exchanges.kernels.encode_shards = broken
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        step()
    seconds = time.monotonic() - start
    assert torch.equal(before[0], kept()[0])
    return seconds


def test_a_step_that_fails_anywhere_is_made_nowhere():
    seconds = run_ranks(_trains, 4, group_timeout=50)
    if torch_compat.GROUPS_END_WITHOUT_GIL:
        assert max(seconds) < 40, "long before the timeout"
