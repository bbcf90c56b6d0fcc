"""Several overlaps of one model in sequence: earlier ones, failed or not, leave nothing behind."""

import copy
import inspect
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Failing,
    PoisonedPages,
    adamw,
    assert_same,
    assert_stepped,
    backward,
    batches,
    begin_overlap,
    ends,
    failing_hook,
    make_ddp,
    on_ranks,
    snapshot,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    OverlapError,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


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


def check_nothing_piles_up():
    for call_step in (True, False):
        ddp = make_ddp()
        optimizer = adamw(ddp)
        plain, inside = _layers(optimizer), []
        for _ in range(5):
            with overlap_optimizer(ddp, optimizer):
                backward(ddp, batches(1)[0])
                inside.append((_hooks(ddp), _layers(optimizer)))
                if call_step:
                    optimizer.step()
                optimizer.zero_grad()
        assert_same(inside, [inside[0]] * 5)
        with ddp.no_sync():
            backward(ddp, batches(1)[0])
        optimizer.step()  # an ordinary one: the pending overlapped step is over
        assert_same((_hooks(ddp), _layers(optimizer)), ([(0, 0)] * 10, plain))
        assert inspect.unwrap(optimizer.step) == inspect.unwrap(type(optimizer).step.__get__(optimizer))


def _momentum(ddp, make=torch.optim.SGD):
    return make(ddp.parameters(), lr=0.1, momentum=0.9)


# What makes a pass or a step fail, and tells how to undo that.


def _pre_hook(ddp, optimizer, _, undo):
    undo.append(optimizer.register_step_pre_hook(lambda *_: None).remove)
    backward(ddp, batches(1)[0])


def _failing_step(ddp, optimizer, _, undo):
    optimizer.victim = ddp.module.layers[1].weight
    undo.append(lambda: setattr(optimizer, "victim", None))
    backward(ddp, batches(1)[0])


def _failing_hook(how, ddp, _, state, undo):
    state["fails"] = how
    undo.append(state.clear)
    backward(ddp, batches(1)[0])


def _late_change(ddp, optimizer, *_):
    backward(ddp, batches(1)[0])
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()


FAILURES = [
    ("pre-hook", _pre_hook),
    ("not today", _failing_step),
    ("not today", partial(_failing_hook, "hook")),
    ("not today", partial(_failing_hook, "average")),
    ("lr of parameter group 0", _late_change),
]


def check_an_error_stays_until_remove():
    """backward(), step() and wait() raise it; afterwards the ordinary loop and a new overlap are right."""
    for (text, spoil), again in itertools.product(FAILURES, (False, True)):
        ddp = make_ddp()
        optimizer, state, undo = _momentum(ddp, Failing), {}, []
        ways = {"comm_hook": failing_hook, "comm_state": state, "steps_per_parameter": True}
        handle = overlap_optimizer(ddp, optimizer, **ways)
        data = batches(6)
        train_on(ddp, optimizer, data[:2])
        with pytest.raises(RuntimeError, match=text):
            spoil(ddp, optimizer, state, undo)
        after = snapshot(ddp)
        for _ in range(2):
            optimizer.zero_grad()
            for call in (optimizer.step, handle.wait):
                with pytest.raises(OverlapError, match=text):
                    call()
            with pytest.raises(RuntimeError, match=text):
                backward(ddp, data[2])
        assert_same(snapshot(ddp), after)
        handle.remove()
        for one in undo:
            one()
        optimizer.zero_grad()
        ordinary = make_ddp()
        ordinary.module.load_state_dict(ddp.module.state_dict())
        theirs = _momentum(ordinary)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if again:
            handle = overlap_optimizer(ddp, optimizer, **ways)
        for x in data[2:]:
            assert_same(train_on(ddp, optimizer, [x]), train_on(ordinary, theirs, [x]), f"after {text}, it")
        if again:
            assert_same(assert_stepped(handle).number, 4)


check = on_ranks(__name__, timeout=60, group_timeout=20)


def test_one_after_another(check):
    check()


def _recovers(rank, released, seconds):
    """One rank's step fails, perhaps late; both go on until each has seen an error, and begin anew.

    Without an agreement on the fate of a pass, one rank has then started an average that its peer has not,
    and all later ones are those of different passes.
    """
    ddp, plain = make_ddp(), make_ddp()
    plain.register_comm_hook(None, allreduce_hook)
    optimizer, other = _momentum(ddp, Failing), _momentum(plain)
    memory = PoisonedPages if released else None
    options = {"memory": memory, "comm_hook": allreduce_hook, "steps_per_parameter": True}
    handle = begin_overlap(ddp, optimizer, **options)
    data = iter(batches(9))
    train_on(ddp, optimizer, [next(data), next(data)])
    saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
    if rank == 0:
        optimizer.victim, optimizer.seconds = ddp.module.layers[1].weight, seconds
    failed_in = []
    for number in range(2):
        try:
            optimizer.zero_grad()
            backward(ddp, next(data))
            optimizer.step()
        except RuntimeError:
            failed_in.append(number)
    assert failed_in in ([0, 1], [1]), failed_in
    handle.remove()
    optimizer.victim = None
    told = torch.tensor([rank + 7])
    dist.broadcast(told, 0)
    assert_same(told.item(), 7)
    for model, one in ((ddp, optimizer), (plain, other)):
        model.module.load_state_dict(saved[0])
        one.load_state_dict(copy.deepcopy(saved[1]))
        one.zero_grad()
    begin_overlap(ddp, optimizer, **options)
    for x in data:
        assert_same(train_on(ddp, optimizer, [x]), train_on(plain, other, [x]))
    for tensor in snapshot(ddp):
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert_same(tensor, first)
    return ends(ddp)


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
@pytest.mark.parametrize(("released", "seconds"), [(False, 1.0), (True, 0.0)])
def test_after_a_step_that_failed_on_one_rank_a_new_overlap_averages_the_same_passes(released, seconds):
    one, other = run_ranks(_recovers, 2, released, seconds, timeout=60, group_timeout=20)
    assert_same(one, other)


def _recovers_at_another_time(rank, again):
    """Each rank begins anew in the iteration in which it raised, and these are not the same."""
    ddp = make_ddp()
    optimizer = _momentum(ddp, Failing)
    options = {"comm_hook": allreduce_hook, "steps_per_parameter": True}
    handle = overlap_optimizer(ddp, optimizer, **options)
    if rank == 0:
        optimizer.victim = ddp.module.layers[1].weight
    errors = []
    for x in batches(5):
        try:
            optimizer.zero_grad()
            backward(ddp, x)
        except RuntimeError as error:
            errors.append(str(error))
            handle.remove()
            optimizer.victim = None
            if again:
                handle = overlap_optimizer(ddp, optimizer, **options)
    return errors


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
@pytest.mark.parametrize("again", [False, True])
def test_ranks_that_go_on_in_different_iterations_are_told(again):
    one, other = run_ranks(_recovers_at_another_time, 2, again, timeout=90, group_timeout=15)
    assert "not today" in one[0], one
    assert "another rank failed" in other[0], other
    for errors in (one, other):
        assert any("backward passes of the model is" in error for error in errors[1:]), errors


class WithBuffers(torch.nn.Module):
    """DDP broadcasts its buffers in every forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        )

    def forward(self, x):
        return self.layers(x)


def _recovers_before_forward(rank, failing=2):
    """The rank that has failed communicates at once; its peer must not be in DDP's forward pass then."""
    ddp = DistributedDataParallel(WithBuffers())
    optimizer = Failing(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True)
    for number in range(failing + 2):
        if number == failing and rank == 0:
            optimizer.victim = next(ddp.parameters())
        try:
            optimizer.zero_grad()
            ddp(torch.ones(4, 8) * (rank + number)).square().mean().backward()
        except RuntimeError:
            break
    handle.remove()
    told = torch.full((16,), rank + 7.0)
    dist.broadcast(told, 0)
    return told.tolist()


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_peers_hear_of_a_failed_step_before_their_next_forward_pass_communicates():
    ranks = run_ranks(_recovers_before_forward, 2, timeout=60, group_timeout=20)
    assert ranks == [[7.0] * 16] * 2
