"""The same calls on every supported torch."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.testing import run_ranks


def _collectives(rank):
    world = dist.group.WORLD
    mine = torch.tensor([rank, rank + 10])
    gathered = torch.empty(4, dtype=torch.int64)
    torch_compat.all_gather_single(gathered, mine)
    gathered_async = torch.empty_like(gathered)
    torch_compat.all_gather_single(gathered_async, mine, async_op=True).wait()
    part = torch.empty(1, dtype=torch.int64)
    torch_compat.reduce_scatter_single(part, mine)
    return {
        "all_gather": (gathered.tolist(), gathered_async.tolist()),
        "reduce_scatter": part.tolist(),
        "all_reduce": torch_compat.functional_all_reduce(mine, world).tolist(),
        "all_to_all": torch_compat.functional_all_to_all_single(mine, world).tolist(),
        "functional gather": torch_compat.functional_all_gather(mine, world).tolist(),
        "timeout": torch_compat.group_timeout(world, torch.device("cpu")),
        "no backend": torch_compat.group_timeout(world, torch.device("meta")),
    }


def test_collectives_under_one_name():
    ranks = run_ranks(_collectives, 2, group_timeout=33.0)
    for rank, seen in enumerate(ranks):
        assert seen["all_gather"] == ([0, 10, 1, 11], [0, 10, 1, 11])
        assert seen["reduce_scatter"] == [[1], [21]][rank]
        assert seen["all_reduce"] == [1, 21]
        assert seen["all_to_all"] == [[0, 1], [10, 11]][rank]
        assert seen["functional gather"] == [0, 10, 1, 11]
        assert seen["timeout"] == timedelta(seconds=33)
        assert seen["no backend"] is None
