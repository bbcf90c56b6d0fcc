"""Calls that work alike on every supported torch."""

from datetime import timedelta

import pytest
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
    traceable, name = torch_compat.traceable_collective, world.group_name
    return {
        "all_gather": (gathered.tolist(), gathered_async.tolist()),
        "reduce_scatter": part.tolist(),
        "all_reduce": traceable("all_reduce", mine, "sum", name).tolist(),
        "all_to_all": traceable("all_to_all_single", mine, [1, 1], [1, 1], name).tolist(),
        "traceable gather": traceable("all_gather_into_tensor", mine, 2, name).tolist(),
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
        assert seen["traceable gather"] == [0, 10, 1, 11]
        assert seen["timeout"] == timedelta(seconds=33)
        assert seen["no backend"] is None


def test_the_end_of_a_backward_pass():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert not torch_compat.inside_backward()

    def notice(_):
        assert torch_compat.inside_backward()
        torch_compat.after_backward(lambda: order.append("end"))

    x.register_hook(lambda _: order.append("first layer"))
    y.register_hook(notice)
    y.sum().backward()
    order.append("behind backward()")
    assert order == ["first layer", "end", "behind backward()"]


def test_nothing_is_called_after_a_backward_pass_that_failed():
    called = []

    def fail(_):
        torch_compat.after_backward(lambda: called.append(1))
        raise ValueError("a bad layer")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ValueError, match="a bad layer"):
        x.sum().backward()
    (x * 2).sum().detach()
    assert not called


def test_versions_count_writes_in_place():
    x = torch.ones(2)
    before = torch_compat.tensor_version(x)
    x.mul_(2)
    x.view(-1).add_(1)
    assert torch_compat.tensor_version(x) == before + 2
