"""Naming a process group, and converting between group ranks and global ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dist_utils import global_rank, group_rank, resolve_group
from dist_utils.process_groups import group_of_model
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.short


def _groups(rank):
    """Ranks 0 and 3 are left out of a group; a mesh has two dimensions."""
    assert resolve_group(None) is dist.group.WORLD
    odd, found, model = dist.new_group([1, 2]), None, torch.nn.Linear(1, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    wrong = {
        r"ValueError: .* got 2 dimensions \('rep', 'dp'\)": lambda: resolve_group(mesh),
        "TypeError: .* got list": lambda: resolve_group([0, 1]),
        "TypeError: .* must be a DistributedDataParallel module, got L": lambda: group_of_model(model),
    }
    if rank in (1, 2):
        assert resolve_group(odd) is odd
        found = group_rank(odd, 2), global_rank(odd, 0)
        wrong[r"ValueError: rank 3 is not a member of .* with ranks \[1, 2\]"] = lambda: group_rank(odd, 3)
        wrong["ValueError: group rank 2"] = lambda: global_rank(odd, 2)
        wrong["ValueError: group rank -1"] = lambda: global_rank(odd, -1)
    else:
        wrong[f"ValueError: rank {rank} is not a member"] = lambda: resolve_group(odd)
    for expected, call in wrong.items():
        kind, _, message = expected.partition(": ")
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[kind], match=message):
            call()
    return found, dist.get_process_group_ranks(resolve_group(mesh["dp"]))


def test_groups_meshes_and_their_ranks_and_errors_that_name_them():
    outside, inside = (None, (1, 1))
    assert run_ranks(_groups, 4) == [(outside, [0, 1]), (inside, [0, 1]), (inside, [2, 3]), (outside, [2, 3])]


def test_without_a_default_group_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        resolve_group(None)


def _model_of_a_destroyed_group(rank):
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    before = group_of_model(ddp)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for model in (DistributedDataParallel(torch.nn.Linear(1, 1)), ddp):
        with pytest.raises(ValueError, match="was destroyed: make a new hook state"):
            group_of_model(model, before)


def test_a_group_that_was_destroyed_is_named():
    run_ranks(_model_of_a_destroyed_group, 1)
