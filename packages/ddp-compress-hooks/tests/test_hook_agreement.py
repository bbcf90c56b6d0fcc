"""A state that is bound to a model; ranks with other hooks or options: integration_tests/test_peers.py."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, fp16_compress_hook
from dist_utils.testing import run_ranks


def _bound(rank):
    """A model over some ranks: the state takes its group, and a state with other ranks is refused."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=pairs[rank == 2])
    ddp.register_comm_hook(CompressState().bind(ddp), fp16_compress_hook)
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    with pytest.raises(ValueError, match=r"averages over ranks \[0, 1, 2\], but the model over ranks \["):
        CompressState(dist.group.WORLD).bind(ddp)
    assert CompressState(pairs[rank == 2]).bind(ddp).process_group is pairs[rank == 2]
    return ddp.module.weight.grad[0, 0].item()


def test_a_state_that_is_bound_averages_over_its_models_ranks():
    assert run_ranks(_bound, 3) == [0.5, 0.5, 2.0]
