"""Naming a process group, and converting between group ranks and global ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dist_utils import global_rank, group_rank, resolve_group
from dist_utils.process_groups import group_of_model
from dist_utils.testing import run_ranks


def _message(kind, fn, *args):
    with pytest.raises(kind) as caught:
        fn(*args)
    return str(caught.value)


def _groups(rank):
    seen = {"world": resolve_group(None) is dist.group.WORLD}
    odd = dist.new_group([1, 2])  # ranks 0 and 3 are left out
    if rank in (1, 2):
        seen["odd"] = (resolve_group(odd) is odd, group_rank(odd, 2), global_rank(odd, 0))
        seen["odd errors"] = (
            _message(ValueError, group_rank, odd, 3),
            _message(ValueError, global_rank, odd, 2),
            _message(ValueError, global_rank, odd, -1),
        )
    else:
        seen["left out"] = _message(ValueError, resolve_group, odd)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    seen["mesh"] = dist.get_process_group_ranks(resolve_group(mesh["dp"]))
    seen["2-D"] = _message(ValueError, resolve_group, mesh)
    seen["type"] = _message(TypeError, resolve_group, [0, 1])
    return seen


@pytest.fixture(scope="module")
def seen():
    return run_ranks(_groups, 4)


def test_none_is_world(seen):
    assert [rank["world"] for rank in seen] == [True] * 4


def test_ranks_inside_and_outside_a_subgroup(seen):
    assert seen[1]["odd"] == seen[2]["odd"] == (True, 1, 1)


def test_a_non_member_gets_an_error_that_names_it(seen):
    assert "rank 0 is not a member" in seen[0]["left out"]
    assert "rank 3 is not a member" in seen[3]["left out"]


def test_ranks_out_of_range_name_the_rank_and_the_group(seen):
    not_member, too_large, negative = seen[1]["odd errors"]
    assert "rank 3" in not_member
    assert "[1, 2]" in not_member
    assert "group rank 2" in too_large
    assert "group rank -1" in negative


def test_a_one_dimensional_mesh_is_a_group(seen):
    assert [rank["mesh"] for rank in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_other_things_are_refused(seen):
    assert "2 dimensions ('rep', 'dp')" in seen[0]["2-D"]
    assert "got list" in seen[0]["type"]


def test_without_a_default_group_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        resolve_group(None)


def _model_of_a_destroyed_group(rank):
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    before = group_of_model(ddp)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    again = DistributedDataParallel(torch.nn.Linear(1, 1))
    return [
        _message(ValueError, group_of_model, again, before),
        _message(ValueError, group_of_model, ddp, before),
    ]


def test_a_group_that_was_destroyed_is_named():
    for message in run_ranks(_model_of_a_destroyed_group, 1)[0]:
        assert "was destroyed: make a new hook state" in message
