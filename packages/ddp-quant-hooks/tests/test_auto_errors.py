"""AutoState when something is wrong: an error on every rank."""

import os
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from auto_runs import SECONDS, Training, exact, quantized

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import AutoState, CandidateError, QuantizedAllreduceState, auto_hook
from dist_utils.testing import grad_bucket, patience, run_ranks
from dist_utils.torch_compat import default_store

TWO = {"a": (None, allreduce_hook), "b": (None, allreduce_hook)}
PASSES = 3 + 2 + 3 * 2 * 4 + 2
"""The passes of a trial of two candidates."""


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"candidates": []}, TypeError, "candidates"),
        ({"candidates": {}}, ValueError, "candidates"),
        ({"candidates": {1: (None, allreduce_hook)}}, TypeError, "candidates"),
        ({"candidates": {"a": allreduce_hook}}, TypeError, "'a'"),
        ({"candidates": {"a": (None, "hook")}}, TypeError, "'a'"),
        ({"max_error": "small"}, TypeError, "max_error"),
        ({"max_error": -0.1}, ValueError, "max_error"),
        ({"max_error": float("nan")}, ValueError, "max_error"),
    ],
)
def test_wrong_options_are_refused(options, error, named):
    with pytest.raises(error, match=named):
        AutoState(**options)


def test_a_pickled_state_has_only_its_options_and_warns():
    state = AutoState(candidates=TWO, max_error=0.5)
    with pytest.warns(UserWarning, match="options only"):
        copy = pickle.loads(pickle.dumps(state))
    assert copy.max_error == 0.5
    assert list(copy.candidates) == ["a", "b"]


def _error_of(training, steps=1):
    try:
        for _ in range(steps):
            training.step()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return None


def _raises(state, bucket):
    raise TypeError("not for this bucket")


def _ends_in_an_error(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done.then(lambda _: _raises(state, bucket))


def _differences(rank):
    """Return the error on every rank; each time, the next model works."""
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    found = {}
    for name, state in {
        "names": AutoState(candidates={"a": exact(), "bc"[rank]: exact()}),
        "states": AutoState(candidates={"a": exact(), "b": quantized(bits=(8, 4)[rank])}),
        "max_error": AutoState(candidates=TWO, max_error=(None, 0.1)[rank]),
        "group": AutoState(candidates={"a": exact(), "b": (QuantizedAllreduceState(alone), _raises)}),
        "group of one rank's": AutoState(
            candidates={"a": exact(), "b": (alone if rank else None, allreduce_hook)}
        ),
    }.items():
        error = _error_of(Training(state, bind=False))
        found[name] = type(error).__name__, str(error)
        state.close()
    return found


def test_ranks_that_differ_raise_before_the_first_bucket():
    for rank, found in enumerate(run_ranks(_differences, 2, timeout=60)):
        for name in ("names", "states", "max_error"):
            kind, message = found[name]
            assert kind == "RuntimeError", message
            assert ("candidates" if name in {"names", "states"} else name) in message
        assert found["group"][0] == "ValueError"
        assert "candidate 'b' averages over ranks" in found["group"][1]
        assert found["group of one rank's"][0] == ("RuntimeError", "ValueError")[rank]
        assert "candidate 'b' averages over ranks" in found["group of one rank's"][1]


def _does_not_come(rank):
    """After a fresh start the ranks may have stopped at different passes."""
    state, store = AutoState(candidates=TWO), default_store()
    training = Training(state)
    for _ in range(3):  # DDP's own collectives before a pass are over
        training.step()
    state.close()
    if rank == 0:
        store.wait(["raised"], timedelta(seconds=120))
        return None
    began = time.monotonic()
    error = _error_of(training)
    seconds = time.monotonic() - began
    store.set("raised", "")
    return seconds, str(error)


def test_after_a_fresh_start_a_rank_that_does_not_come_is_an_error():
    timeout = patience(3.0)
    _, (seconds, text) = run_ranks(_does_not_come, 2, group_timeout=timeout)
    assert "ranks [0] did not" in text
    assert seconds < 2 * timeout


def _unfit(rank):
    found = {}
    for name, hook in {
        "raises": _raises,
        "returns no future": lambda _, bucket: bucket.buffer(),
        "ends in an error": _ends_in_an_error,
    }.items():
        state = AutoState(candidates={"good": exact(), "unfit": (None, hook)})
        error = _error_of(Training(state), steps=30)
        found[name] = isinstance(error, CandidateError), str(error), type(error.__cause__).__name__
        state.close()
    return found


def test_a_candidate_that_is_unfit_is_an_error_and_not_left_out():
    for found in run_ranks(_unfit, 2, timeout=60):
        assert found["raises"] == (
            True,
            "candidate 'unfit' of AutoState: not for this bucket",
            "TypeError",
        )
        assert found["returns no future"][0]
        assert "returned a Tensor" in found["returns no future"][1]
        assert not found["ends in an error"][0]  # DDP's: the future's text
        assert "not for this bucket" in found["ends in an error"][1]


def _bad_arguments(rank):
    found = []
    for state, bucket in (
        (QuantizedAllreduceState(), grad_bucket([torch.zeros(4)])),
        (AutoState(), (torch.zeros(4), torch.zeros(4))),
    ):
        try:
            auto_hook(state, bucket)
        except TypeError as error:
            found.append(str(error))
    return found


def test_other_states_and_pairs_are_refused():
    ((state, pair),) = run_ranks(_bad_arguments, 1)
    assert "needs an AutoState" in state
    assert "Python reducer" in pair


def _fresh_start(rank):
    state = AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()})
    training = Training(state)
    for _ in range(6):
        training.step()
    training.ddp.module.between = _fail
    failed = _error_of(training)
    state.close()
    again = Training(state)
    choice, step = again.until_chosen()
    state.close()
    return str(failed), choice.candidate, step


def _fail():
    raise ValueError("in the middle of a pass")


def test_after_an_error_and_close_the_trial_starts_over():
    first, second = run_ranks(_fresh_start, 2, timeout=60)
    assert first == second
    assert "in the middle of a pass" in first[0]
    assert first[1] == "fast"


def _some_have_chosen(rank):
    """Let rank 0 fail in the first pass after the trial, which the others do not reach."""
    fails = []

    def hook(_, bucket):
        return _fail() if fails else allreduce_hook(None, bucket)

    candidates = {"a": (None, hook), "b": (None, hook)}
    state = AutoState(candidates=candidates, max_error=None)
    training = Training(state)
    for _ in range(PASSES):
        training.step()
    if rank == 0:
        fails.append(True)
        _error_of(training)
        fails.clear()
    before = state.choice is not None
    state.close()
    again = Training(state)
    chosen = []
    for _ in range(PASSES + 1):
        again.step()
        chosen.append(state.choice is not None)
    weights = again.weights()
    state.close()
    return before, chosen, weights


def test_ranks_that_failed_before_and_after_the_choice_all_try_again():
    results = run_ranks(_some_have_chosen, 3, timeout=60)
    assert [before for before, _, _ in results] == [True, False, False]
    for _, chosen, weights in results:
        assert chosen == [False] * PASSES + [True]
        assert torch.equal(weights, results[0][2])


class _Own:
    """The state of a candidate from another project."""

    options = object()


def _elsewhere(rank):
    """Train in a group of some ranks, then in WORLD, and then in a new WORLD."""
    pair = dist.new_group([0, 1])
    outcomes = []
    if rank < 2:
        state = AutoState(max_error=None)
        assert state.trying  # before it knows the model's group
        training = Training(state, process_group=pair)
        outcomes.append(_error_of(training, steps=6))
        state.close()
    _Own.options = object()
    state = AutoState(
        candidates={"own": (_Own(), lambda _, bucket: allreduce_hook(None, bucket)), "b": quantized()}
    )
    outcomes.append(_error_of(Training(state, bind=False), steps=5))
    state.close()
    state = AutoState()
    outcomes.append(_error_of(Training(state, bind=False), steps=5))
    store = dist.PrefixStore("again", default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    outcomes.append(_error_of(Training(state, bind=False), steps=5))
    state.close()
    return outcomes


def test_a_state_uses_the_models_group_and_then_a_new_world():
    for outcomes in run_ranks(_elsewhere, 3, timeout=60):
        assert set(outcomes) == {None}, outcomes


def _peer_dies(rank, step):
    """Let rank 1 die in the middle of a step."""
    state = AutoState(candidates={"a": exact(), "b": quantized(bits=4), "c": quantized()})
    training = Training(state)
    training.ddp.module.between = lambda: training.steps == step and rank == 1 and os._exit(3)
    try:
        training.until_chosen()
    except RuntimeError as error:
        return training.steps, str(error)
    return training.steps, None


@pytest.mark.parametrize("step", [pytest.param(8, marks=pytest.mark.exhaustive), 10])
def test_a_peer_that_dies_in_a_trial_is_an_error_on_every_other_rank(step):
    results = run_ranks(_peer_dies, 3, step, timeout=90, group_timeout=patience(2.0), may_die={1})
    for rank in (0, 2):
        steps, error = results[rank]
        assert steps in (step, step + 1)
        assert error
