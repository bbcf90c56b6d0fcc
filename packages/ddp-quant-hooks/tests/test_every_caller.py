"""What DDP's buckets, plain tensors and FSDP2 have in common: one text of promises for all of them."""

import os
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from averaging_callers import CALLERS, EACH, FEW_BITS, spoiled_kernel
from fsdp_models import EXACT
from quant_buckets import differences, flat_residuals, through_file

from ddp_quant_hooks.feedback.residuals import Residual
from dist_utils.testing import patience, run_ranks, same_on_all_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


def _many_steps(make):
    """Return the error of the mean of 16 steps with the same values, relative to that of the last one."""
    exact = make(min_bytes=EXACT, error_feedback="none").mean(0)
    ratios = {}
    for feedback in ("none", "both"):
        caller = make(bits=4, error_feedback=feedback)
        means = [caller.mean(0) for _ in range(16)]
        once, often = ((mean - exact).abs().mean() for mean in (means[-1], torch.stack(means).mean(0)))
        ratios[feedback] = (often / once).item()
        assert caller.shards or same_on_all_ranks(means)
        assert caller.state.statistics.plain_buckets == 0
    return ratios, caller.state.statistics.bytes_ratio


def _is_discarded(caller):
    caller.mean(7)
    caller.state.discard_step()
    caller.state.state_dict()  # reading changes nothing
    caller.state.discard_step()


def _is_not_finite(caller):
    mean = caller.mean(7, poison=True)
    assert caller.shards or mean.isnan().any()


def _raises_the_users_error(caller):
    with pytest.raises(ZeroDivisionError):
        caller.fail(7)


def _has_a_kernel_that_fails(caller):
    """A kernel fails on rank 1: there the error says so, the others get an error, and all start anew."""

    def fail_on_rank_1():
        if dist.get_rank() == 1:
            time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
            raise MemoryError("no room for a kernel")
        if dist.get_rank() == 0:
            time.sleep(1.5)  # it starts to send when rank 1 is gone, and rank 2 waits for this rank first

    text = "no room for a kernel" if dist.get_rank() == 1 else None
    with spoiled_kernel(fail_on_rank_1), pytest.raises((RuntimeError, MemoryError), match=text):
        caller.mean(7)
    caller.start()
    # The first error is kept, with its class, until all ranks close the state.
    with pytest.raises((RuntimeError, MemoryError), match=text):
        caller.mean(7)
    caller.state.close()
    dist.barrier()


def _counts(caller):
    caller.mean(7)


DO_NOT_COUNT = [_is_discarded, _is_not_finite, _raises_the_users_error]
if GROUPS_END_WITHOUT_GIL:  # torch 2.6 cannot end a group before its process
    DO_NOT_COUNT.append(_has_a_kernel_that_fails)


def _disturbed(make):
    """Return by how much the mean after a disturbed step differs from that without the step."""

    def after(disturb):
        caller = make(bits=4)
        caller.mean(0)
        caller.mean(1)
        disturb(caller)
        caller.start()
        return caller.mean(2)

    undisturbed = after(lambda _: None)
    return {
        disturb.__name__: (after(disturb) - undisturbed).abs().max().item()
        for disturb in (_counts, *DO_NOT_COUNT)
    }


def _resumed(make):
    """Return where runs that went on from residuals differ from the run that saved them."""

    caller = make(bits=4)
    assert flat_residuals(caller.state.state_dict()) == {}, "nothing was averaged yet"
    caller.mean(0)
    caller.mean(1)
    saved = through_file(caller.state.state_dict())
    gathered = through_file(caller.state.gather_state_dict())
    went_on = [caller.mean(number) for number in (2, 3)]
    found = {}
    for how, load in {
        "load_state_dict": lambda state: state.load_state_dict(saved),
        "scatter_state_dict": lambda state: state.scatter_state_dict(gathered),
        "without residuals": lambda _: None,
    }.items():
        again = make(bits=4)
        again.warm_up()
        load(again.state)
        found[how] = differences([again.mean(number) for number in (2, 3)], went_on)
    return found


def _with_other_options(make):
    """Return the errors of steps on ranks with different options, and what was sent."""
    caller, texts = make(bits=4, min_bytes=1 if dist.get_rank() else 2), []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            caller.mean(0)
        texts.append(str(caught.value))
        caller.start()
    caller.state.close()
    return texts, caller.state.statistics.bytes_sent


def _without_residuals(make):
    """Return the errors of steps for whose residuals rank 1 has no memory, or anything else goes wrong there.

    And whether all start anew.
    """
    caller = make(bits=4)
    first, errors, same = caller.mean(0), [], []
    caller.mean(1)  # later DDP makes no new buckets, for which its ranks would wait for each other
    for error in (MemoryError("no room for residuals"), LookupError("a mistake of ours")):

        def fail(*_, error=error):
            time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
            raise error

        caller.state.feedback.forget()
        failing = mock.patch.object(Residual, "of_slot", fail) if dist.get_rank() == 1 else nullcontext()
        with failing, pytest.raises((RuntimeError, MemoryError, LookupError)) as caught:
            caller.mean(1)
        errors.append(str(caught.value))
        dist.barrier()
        caller.state.close()
        caller.start()
        same.append(torch.equal(caller.mean(0), first))
        caller.mean(1)
    return errors, all(same)


CHECKS = [_disturbed, _resumed, _with_other_options]
if GROUPS_END_WITHOUT_GIL:  # torch 2.6 cannot end a group before its process
    CHECKS.append(_without_residuals)


def _all_checks(_, name):
    checks = CHECKS if "low rank" in name else [_many_steps, *CHECKS]
    return {check.__name__: check(CALLERS[name]) for check in checks}


@pytest.fixture(scope="module", params=EACH)
def seen(request):
    """What three ranks have seen with each caller."""
    return run_ranks(_all_checks, 3, request.param, timeout=150, group_timeout=60.0)


@pytest.mark.parametrize("seen", FEW_BITS, indirect=True)
def test_what_a_step_loses_is_added_to_the_next(seen):
    """The same for low rank is in test_lowrank_hosts.py."""
    for rank in seen:
        ratios, share = rank["_many_steps"]
        # The total loss is at most that of the last step, a sixteenth of it in the mean, and that of the step
        # before DDP makes new buckets. Without feedback all other steps are wrong by the same.
        assert ratios["both"] < 1 / 4
        assert ratios["none"] > 3 / 4
        assert 0.14 < share < 0.17, "4 bits of 32, and 4 bytes for a block of 32 values"


def test_steps_that_do_not_count_leave_the_residuals(seen):
    for rank in seen:
        found = rank["_disturbed"]
        assert found["_counts"] > 0
        assert found == {"_counts": found["_counts"], **{one.__name__: 0.0 for one in DO_NOT_COUNT}}


def test_a_resumed_run_has_the_bits_of_one_that_went_on(seen):
    for rank in seen:
        loaded, scattered, without_residuals = rank["_resumed"].values()
        assert (loaded, scattered) == ({}, {})
        assert without_residuals


def test_other_options_are_an_error_on_every_rank_before_anything_is_sent(seen):
    for rank in seen:
        texts, sent = rank["_with_other_options"]
        for text in texts:
            assert "min_bytes is 2 on rank 0, 1 on ranks 1, 2" in text
        assert sent == 0


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="this torch cannot end a group before its process")
def test_any_error_before_an_average_is_one_on_every_rank_and_close_a_fresh_start(seen):
    texts, equal = zip(*(rank["_without_residuals"] for rank in seen), strict=True)
    for text, said in zip(texts[1], ("no room for residuals", "a mistake of ours"), strict=True):
        assert said in text
    assert equal == (True, True, True)


def _alone(_, name):
    caller = CALLERS[name](bits=4)
    return differences([caller.values(0).flatten()], [caller.mean(0)]), caller.state.statistics.bytes_sent


@pytest.mark.parametrize("name", EACH)
def test_one_rank_alone_keeps_its_values(name):
    assert run_ranks(_alone, 1, name) == [({}, 0)]


def _peer_dies(rank, name):
    """Average twice, lose rank 1, and return how many steps count after an average that failed."""
    caller = CALLERS[name](bits=4)
    caller.mean(0)
    caller.mean(1)
    if rank == 1:
        os._exit(3)
    before = caller.state.statistics
    with pytest.raises(RuntimeError):
        caller.mean(2)
    assert caller.state.statistics == before, "what was not averaged is not counted"
    return caller.state.state_dict()["steps"]


@pytest.mark.parametrize("name", ["DDP", "low rank, DDP"])
def test_a_peer_that_dies_is_an_error_on_the_others_and_the_step_does_not_count(name):
    """The same for tensors is in integration_tests/test_peers.py."""
    assert run_ranks(_peer_dies, 3, name, may_die={1}, group_timeout=patience(5.0)) == [2, None, 2]
