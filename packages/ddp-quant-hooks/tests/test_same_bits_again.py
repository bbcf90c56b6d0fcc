"""Identical bits across releases of torch; of threads and instruction sets: test_kernel_bits.py."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from kernel_backends import SETS, computed_by
from quant_buckets import flat_residuals

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce
from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from dist_utils.testing import run_ranks

COUNT = 5_003
"""The number of values."""
OPTIONS = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "fp16 back": {"bits": 8, "gather": "fp16", "block_size": 64},
}
DIGESTS = {
    2: {
        "8 bits": ("19fc0578af3c8549", "f2c88a1a4fef37e6"),
        "4 bits": ("bcd8420bbc3b7673", "9d1a9d46c91df8a7"),
        "fp16 back": ("12ea95eac909088f", "b58d9e46862a4e9e"),
    },
    3: {
        "8 bits": ("06cfd42243953f7b", "8b047885fd945ae8", "06e1777d3d8260ad"),
        "4 bits": ("6639224c7ee34e3c", "22d9623f2b7a2252", "3fdd325cbcc4cdae"),
        "fp16 back": ("cd2093af3dc1fd5f", "ec135e8454a52e27", "2ff59c138a9d89fe"),
    },
}
"""Digests of means and residuals on each rank, by the number of ranks: for torch 2.6.0, 2.13.0 and 2.15.0."""


def _values(rank, step):
    """Return values with blocks that are rotated and blocks that are not.

    They do not depend on torch's random numbers, which may change with its releases.
    """
    numbers = torch.arange(COUNT, dtype=torch.int64) + 7919 * rank + 104_729 * step
    mixed = (numbers * 2_654_435_761) % 4_294_967_291 % 1_000_003
    return (mixed.double() / 500_001 - 1).float() * (1 + numbers % 13).float().square()


def _sums(mean):
    """Return a few bytes that depend on every bit."""
    bits = mean.view({2: torch.int16, 4: torch.int32}[mean.element_size()]).to(torch.int64)
    return str((bits.sum().item(), (bits * torch.arange(1, len(bits) + 1)).sum().item())).encode()


def _averages(rank, **options):
    """Return the means of some steps, and their residuals, as one digest."""
    state = QuantizedAllreduceState(**{"min_bytes": 0, "error_feedback": "both", **options})
    digest = hashlib.sha256()
    for step in range(3):
        mean = _values(rank, step)
        all_reduce(mean, dist.ReduceOp.AVG, state, key="a")
        digest.update(bytes(mean.view(torch.uint8).tolist()))
    saved = state.state_dict()
    for kind in ("own", "shard"):
        nothing = torch.empty(0, dtype=torch.bfloat16)  # two ranks have no shards
        digest.update(_sums(flat_residuals(saved, kind).get("a", nothing)))
    state.close()
    return digest.hexdigest()[:16]


def _known(rank):
    found = {name: set() for name in OPTIONS}
    for backend in (*map(CpuKernels, SETS[:1]), torch_ops):
        with computed_by(backend):
            for name, options in OPTIONS.items():
                found[name].add(_averages(rank, **options))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_release_of_torch_gives_the_bits_that_are_written_here(world_size):
    """For wire version 3: changing them changes what ranks with other releases receive."""
    for rank, found in enumerate(run_ranks(_known, world_size)):
        assert found == {name: {digests[rank]} for name, digests in DIGESTS[world_size].items()}
