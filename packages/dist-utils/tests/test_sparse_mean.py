"""The mean of sparse gradients: Gloo's bits, without Gloo's sparse all-reduce."""

import os

import pytest
import torch
import torch.distributed as dist

from dist_utils.comm_hooks import sparse_mean
from dist_utils.testing import patience, run_ranks, same_bits

SHAPES = {(10, 8): 1, (5,): 1, (6, 7): 2, (6, 7, 3): 2, (10, 0): 1}
"""Sizes of sparse tensors, each with its number of sparse dimensions."""

COUNTS = [(4, 4, 4), (0, 5, 2), (0, 0, 0), (1, 1, 1), (40, 1, 30)]
"""How many entries each rank has. With 40 some are at the same place."""


def _gradient(shape, sparse_dims, count, dtype, generator):
    places = [torch.randint(side, (count,), generator=generator) for side in shape[:sparse_dims]]
    values = torch.randn(count, *shape[sparse_dims:], generator=generator, dtype=torch.float64).to(dtype)
    return torch.sparse_coo_tensor(torch.stack(places), values, shape, check_invariants=True)


def _parts(sparse):
    return sparse.is_coalesced(), sparse._indices(), sparse._values()


def _with_gloo(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    different = []
    for counts in COUNTS:
        for shape, sparse_dims in SHAPES.items():
            gradient = _gradient(shape, sparse_dims, counts[rank], dtype, generator)
            given = [one.clone() for one in _parts(gradient)[1:]]
            expected = gradient / 3
            dist.all_reduce(expected)  # alone, as it is safe
            mean = sparse_mean(dist.group.WORLD, gradient)
            if not same_bits(_parts(mean), _parts(expected)) or not same_bits(_parts(gradient)[1:], given):
                different.append((counts, shape))
    return different


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bits_are_gloos_and_the_gradient_is_only_read(dtype):
    assert run_ranks(_with_gloo, 3, dtype) == [[], [], []]


def _with_a_graph(rank):
    table = torch.nn.Embedding(6, 2, sparse=True)
    (table(torch.tensor([rank, 2])) ** 2).sum().backward(create_graph=True)
    mean = sparse_mean(dist.group.WORLD, table.weight.grad)
    return mean.requires_grad, mean.is_coalesced(), mean.indices().tolist()


def test_a_gradient_with_a_graph_is_averaged_without_it():
    assert run_ranks(_with_a_graph, 3) == [(False, True, [[0, 1, 2]])] * 3


def _of_complex_values(rank):
    gradient = torch.sparse_coo_tensor(
        [[rank, 2]], torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1), (4,), check_invariants=True
    )
    return sparse_mean(dist.group.WORLD, gradient).to_dense().tolist()


def test_complex_values_are_averaged():
    assert run_ranks(_of_complex_values, 2) == [[0.5 + 1j, 1 + 2j, 4.5 - 1.5j, 0j]] * 2


def _peer_dies(rank):
    if rank == 1:
        os._exit(1)
    gradient = torch.sparse_coo_tensor([[1]], [1.0], (4,), check_invariants=True)
    with pytest.raises(RuntimeError, match="Connection"):
        sparse_mean(dist.group.WORLD, gradient)


def test_a_peer_that_is_gone_is_an_error():
    run_ranks(_peer_dies, 2, may_die={1}, group_timeout=patience(5.0))


def _collectives(_):
    with torch.profiler.profile() as profiler:
        sparse_mean(dist.group.WORLD, torch.eye(3).to_sparse())
    return {event.name for event in profiler.events() if event.name.startswith("gloo:")}


def test_gloos_sparse_all_reduce_is_not_called():
    assert run_ranks(_collectives, 2) == [{"gloo:all_gather"}] * 2
