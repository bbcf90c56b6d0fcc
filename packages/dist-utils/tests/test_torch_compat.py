"""Calls that work alike on every supported torch."""

import operator
import warnings
from datetime import timedelta

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

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


def test_step_hooks_of_an_optimizer():
    calls = []
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert len(torch_compat.step_pre_hooks(optimizer)) == 1
    bare = object.__new__(torch.optim.SGD)
    bare.__dict__ = torch_compat.without_step_hooks(optimizer.__dict__)
    bare.step()
    assert not calls
    optimizer.step()
    assert calls == ["pre", "post"]


def test_schedulers_take_a_marked_optimizer_for_stepped():
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_compat.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def _watched(_):
    seen, x = [], torch.ones(2)
    with torch_compat.OperatorWatch(seen.append):
        torch._foreach_add_([x], 1.0)
        dist.all_reduce(x)
    x.mul_(2)

    def refuse(name):
        raise ValueError(name)

    with torch_compat.OperatorWatch(refuse), pytest.raises(ValueError, match="c10d::allreduce_"):
        dist.all_reduce(x)
    return seen, x.tolist()


def test_operators_are_seen_before_they_run():
    for names, values in run_ranks(_watched, 2):
        assert [name.split(".")[0] for name in names] == ["aten::_foreach_add_", "c10d::allreduce_"]
        assert values == [8.0, 8.0]


def test_versions_are_kept_where_a_tensor_gets_its_memory_back():
    weight = torch.ones(2, requires_grad=True)
    product = weight * weight  # autograd has saved the weight
    own = weight.data
    with torch_compat.keep_versions([weight]):
        weight.data = torch.zeros(3)
        with torch.no_grad():
            weight.add_(1)
        weight.data = own
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def test_flushing_of_subnormal_numbers_is_seen():
    seen = []
    try:
        for flush in (True, False):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor cannot")
            seen.append(torch_compat.flushes_denormals())
    finally:
        torch.set_flush_denormal(False)
    assert seen == [True, False]


def _averaged_models(_):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert torch_compat.hands_over_buckets(ddp)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert not torch_compat.hands_over_buckets(DistributedDataParallel(torch.nn.Linear(2, 2)))
    assert torch_compat.replicated_ddp(ddp) is None
    assert torch_compat.replicated_ddp(ddp.module) is None

    for begun in (False, True):
        module = replicate(torch.nn.Linear(2, 2))
        if begun:
            module(torch.ones(1, 2)).sum().backward()
        found = torch_compat.replicated_ddp(module)
        assert all(map(operator.is_, found.parameters(), module.parameters()))
        module(torch.ones(1, 2)).sum().backward()
        assert torch_compat.replicated_ddp(module) is found


def test_what_averages_the_gradients_of_a_model():
    run_ranks(_averaged_models, 2)
