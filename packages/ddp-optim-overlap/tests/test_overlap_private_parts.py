"""What torch keeps of optimizers, models and tensors under private names, as the overlap uses it."""

import operator
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.communication import operator_watch
from ddp_optim_overlap.optimizer_hooks import mark_stepped, step_pre_hooks, without_step_hooks
from ddp_optim_overlap.tensor_versions import keep_versions
from ddp_optim_overlap.wrappers import replicated_ddp
from dist_utils.testing import run_ranks


def test_step_hooks_of_an_optimizer():
    calls = []
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert len(step_pre_hooks(optimizer)) == 1
    bare = object.__new__(torch.optim.SGD)
    bare.__dict__ = without_step_hooks(optimizer.__dict__)
    bare.step()
    assert not calls
    optimizer.step()
    assert calls == ["pre", "post"]


def test_schedulers_take_a_marked_optimizer_for_stepped():
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def _watched(_):
    seen, x = [], torch.ones(2)
    with operator_watch(seen.append):
        torch._foreach_add_([x], 1.0)
        dist.all_reduce(x)
    x.mul_(2)

    def refuse(name):
        raise ValueError(name)

    with operator_watch(refuse), pytest.raises(ValueError, match="c10d::allreduce_"):
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
    with keep_versions([weight]):
        weight.data = torch.zeros(3)
        with torch.no_grad():
            weight.add_(1)
        weight.data = own
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def _averaged_models(_):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert replicated_ddp(ddp) is None
    assert replicated_ddp(ddp.module) is None

    for begun in (False, True):
        module = replicate(torch.nn.Linear(2, 2))
        if begun:
            module(torch.ones(1, 2)).sum().backward()
        found = replicated_ddp(module)
        assert all(map(operator.is_, found.parameters(), module.parameters()))
        module(torch.ones(1, 2)).sum().backward()
        assert replicated_ddp(module) is found


def test_what_averages_the_gradients_of_a_model():
    run_ranks(_averaged_models, 2)
