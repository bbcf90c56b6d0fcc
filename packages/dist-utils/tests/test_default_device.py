"""torch's default device changes nothing: tensors are exchanged on a device of the group's backend."""

import pytest
import torch
import torch.distributed as dist

from dist_utils import TensorMismatchError, sync_module_states
from dist_utils.process_groups import all_gather_plain
from dist_utils.testing import run_ranks


def _elsewhere(rank):
    same, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2 + rank)
    same.register_buffer("sparse", torch.eye(3).mul(rank + 1).to_sparse())
    same.register_buffer("flags", torch.tensor([rank == 0]))
    with torch.device("meta"):
        gathered = all_gather_plain(None, {"rank": rank})
        with pytest.raises(TensorMismatchError, match="rank 1 has weight"):
            sync_module_states(other, None, 1 << 20, 0, [])
        sync_module_states(same, None, 1 << 20, 0, [])
    return gathered, same.sparse.to_dense().diag().tolist(), same.flags.tolist(), dist.get_rank() == rank


def test_the_default_device_may_be_one_without_memory():
    """As in code that makes modules before they have memory: ``with torch.device("meta")``."""
    assert run_ranks(_elsewhere, 2) == [([{"rank": 0}, {"rank": 1}], [1.0] * 3, [True], True)] * 2
