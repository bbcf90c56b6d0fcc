"""Several overlaps of one model in sequence: earlier ones, failed or not, leave nothing behind."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    adamw,
    backward,
    batches,
    make_ddp,
    named,
    require_held,
    run_parts,
    same,
    snapshot,
)

from ddp_optim_overlap import (
    OverlapError,
    OverlapMode,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks


def _hooks(ddp):
    return [
        (len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ()))
        for parameter in ddp.parameters()
    ]


def _layers(optimizer):
    """Count how often ``step`` is wrapped."""
    step, count = optimizer.step, 0
    while hasattr(step, "__wrapped__"):
        step, count = step.__wrapped__, count + 1
    return count


def _nothing_piles_up(seen):
    for mode in OverlapMode:
        for call_step in (True, False):
            ddp = make_ddp()
            optimizer = adamw(ddp)
            plain = _layers(optimizer)
            inside = []
            for _ in range(5):
                with overlap_optimizer(ddp, optimizer, mode=mode):
                    backward(ddp, batches(1)[0])
                    inside.append((_hooks(ddp), _layers(optimizer)))
                    if call_step:
                        optimizer.step()
                    optimizer.zero_grad()
            seen[mode.name, call_step] = inside == [([(1, 1)] * 10, plain + 1)] * 5
            with ddp.no_sync():
                backward(ddp, batches(1)[0])
            optimizer.step()  # an ordinary one: the pending overlapped step is over
            seen[mode.name, call_step, "left"] = _hooks(ddp) == [(0, 0)] * 10
            seen[mode.name, call_step, "step"] = "step" not in optimizer.__dict__ or (
                inspect.unwrap(optimizer.step) is inspect.unwrap(type(optimizer).step)
                and _layers(optimizer) == plain
            )


def _a_refused_optimizer_in_backward(seen):
    for make, options in ((torch.optim.LBFGS, {}), (torch.optim.SGD, {"lrr": 1})):
        net = torch.nn.Linear(4, 4)
        with pytest.raises((OverlapError, TypeError)):
            apply_optimizer_in_backward(make, net.parameters(), options)
        net(torch.ones(1, 4)).sum().backward()
        gradients = [parameter.grad is not None for parameter in net.parameters()]
        seen[make.__name__] = gradients == [True, True] and not get_in_backward_optimizers(net)


class FailsOnCommand(torch.optim.AdamW):
    victim = None

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter is self.victim for parameter in group["params"]):
                raise ValueError("not today")
        return super().step(closure)


def _hook(state, bucket):
    """Average; or fail, at once or in the future."""
    fails = bucket.index() == 1 and state["fails"]
    if fails == "hook":
        raise ValueError("not today")

    def average(done):
        if fails == "average":
            raise ValueError("not today")
        return done.value()[0] / 2

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(average)


def _trains_on_after_a_failure(seen):
    """Parameters that were not stepped stay as they were; a new overlap then matches the ordinary loop."""
    for mode in OverlapMode:
        for fails in ("step", "hook", "average"):
            ddp = make_ddp()
            optimizer = FailsOnCommand(ddp.parameters(), lr=0.01)
            state = {"fails": None}
            ways = {"comm_hook": _hook, "comm_state": state, "mode": mode}
            handle = overlap_optimizer(ddp, optimizer, **ways)
            data = batches(6)
            for x in data[:2]:
                backward(ddp, x)
                optimizer.step()
                optimizer.zero_grad()
            state["fails"] = fails
            if fails == "step":
                optimizer.victim = ddp.module.layers[1].weight
            with pytest.raises(RuntimeError, match="not today"):
                backward(ddp, data[2])
            with pytest.raises(OverlapError, match="not today"):
                handle.wait()
            handle.remove()
            state["fails"] = optimizer.victim = None
            optimizer.zero_grad()
            ordinary = make_ddp()
            ordinary.module.load_state_dict(ddp.module.state_dict())
            theirs = FailsOnCommand(ordinary.parameters(), lr=0.01)
            theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            handle = overlap_optimizer(ddp, optimizer, **ways)
            for x in data[3:]:
                for model, one in ((ddp, optimizer), (ordinary, theirs)):
                    backward(model, x)
                    one.step()
                    one.zero_grad()
            report = handle.wait()
            seen[mode.name, fails] = report.number == 3 and same(
                [snapshot(ddp), optimizer.state_dict()], [snapshot(ordinary), theirs.state_dict()]
            )


PARTS = named(_nothing_piles_up, _a_refused_optimizer_in_backward, _trains_on_after_a_failure)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=60, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_one_after_another(ranks, name):
    require_held(ranks, name)
