"""AutoState when something is wrong: an error on every rank."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from auto_runs import SECONDS, Training, exact, quantized

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import AutoState, CandidateError, QuantizedAllreduceState, auto_hook
from dist_utils.testing import grad_bucket, run_ranks
from dist_utils.torch_compat import default_store

TWO = {"a": (None, allreduce_hook), "b": (None, allreduce_hook)}
PASSES = 3 + 2 + 3 * 2 * 4 + 2
"""The passes of a trial of two candidates."""


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"candidates": {}}, ValueError, "candidates"),
        ({"candidates": {"a": allreduce_hook}}, TypeError, "'a'"),
        ({"candidates": {"a": (None, "hook")}}, TypeError, "'a'"),
        ({"max_error": "small"}, TypeError, "max_error"),
        ({"max_error": float("nan")}, ValueError, "max_error"),
    ],
)
def test_wrong_options_are_refused(options, error, named):
    with pytest.raises(error, match=named):
        AutoState(**options)


def test_a_pickled_state_has_only_its_options_and_warns():
    state = AutoState(candidates=TWO, max_error=0.5)
    with pytest.warns(UserWarning, match="options only"):
        loaded = pickle.loads(pickle.dumps(state))
    assert loaded.max_error == 0.5
    assert list(loaded.candidates) == ["a", "b"]


def test_a_copy_has_states_of_its_own():
    state = AutoState(candidates={"a": (None, allreduce_hook), "b": quantized()})
    with pytest.warns(UserWarning, match="options only"):
        copied = copy.deepcopy(state)
    assert copied.candidates["b"].state is not state.candidates["b"].state
    assert copied.candidates["b"].state.options == state.candidates["b"].state.options


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
    """Each time, the next model works."""
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    for second, kind, match in (
        ({"bc"[rank]: exact()}, RuntimeError, "candidates"),
        ({"b": quantized(bits=(8, 4)[rank])}, RuntimeError, "candidates"),
        ({"b": (QuantizedAllreduceState(alone), _raises)}, RuntimeError, "'b' averages over ranks"),
    ):
        state = AutoState(candidates={"a": exact(), **second})
        with pytest.raises(kind, match=match):
            Training(state, bind=False).step()
        state.close()


def test_ranks_that_differ_raise_before_the_first_bucket():
    run_ranks(_differences, 2, timeout=60)


def _ends_late_in_an_error(state, bucket):
    """In a group in which the ranks must not lose step, whenever one of them hears of the error."""
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda _: _raises(state, bucket))


def _unfit(_):
    for hook, error, text in (
        (_raises, CandidateError, "candidate 'unfit' of AutoState: not for this bucket"),
        (lambda _, bucket: bucket.buffer(), CandidateError, "returned a Tensor"),
        (_ends_in_an_error, RuntimeError, "not for this bucket"),  # DDP's: the future's text
        (_ends_late_in_an_error, RuntimeError, "not for this bucket"),
    ):
        state = AutoState(candidates={"good": exact(), "unfit": (None, hook)})
        with pytest.raises(error, match=text):
            Training(state).until_chosen()
        state.close()


def test_a_candidate_that_is_unfit_is_an_error_and_not_left_out():
    run_ranks(_unfit, 2, timeout=60)


def _bad_arguments(_):
    with pytest.raises(TypeError, match="needs an AutoState"):
        auto_hook(QuantizedAllreduceState(), grad_bucket([torch.zeros(4)]))
    with pytest.raises(TypeError, match="Python reducer"):
        auto_hook(AutoState(), (torch.zeros(4), torch.zeros(4)))


def test_other_states_and_pairs_are_refused():
    run_ranks(_bad_arguments, 1)


def _fail():
    raise ValueError("in the middle of a pass")


def _fresh_starts(rank):
    """Fail in the middle of a trial, and on rank 0 alone in the first pass after it; then start anew."""
    state = AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()})
    training = Training(state)
    for _ in range(6):
        training.step()
    training.ddp.module.between = _fail
    failed = _error_of(training)
    state.close()
    choice, step = Training(state).until_chosen()
    state.close()

    fails = []

    def hook(_, bucket):
        return _fail() if fails else allreduce_hook(None, bucket)

    state = AutoState(candidates={"a": (None, hook), "b": (None, hook)}, max_error=None)
    training = Training(state)
    for _ in range(PASSES):
        training.step()
    if rank == 0:
        fails.append(True)
        _error_of(training)
        fails.clear()
    had_chosen = state.choice is not None
    state.close()
    again = Training(state)
    chosen = []
    for _ in range(PASSES + 1):
        again.step()
        chosen.append(state.choice is not None)
    state.close()
    return str(failed), choice.candidate, step, had_chosen, chosen, again.weights()


def test_after_an_error_and_close_all_ranks_try_again():
    results = run_ranks(_fresh_starts, 2, timeout=60)
    assert [had_chosen for *_, had_chosen, _, _ in results] == [True, False]
    for failed, candidate, step, _, chosen, weights in results:
        assert "in the middle of a pass" in failed
        assert (candidate, step) == ("fast", results[0][2])
        assert chosen == [False] * PASSES + [True]
        assert torch.equal(weights, results[0][-1])


def _elsewhere(rank):
    """Train in a group of some ranks, then in WORLD, and then in a new WORLD."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        state = AutoState(max_error=None)
        assert state.trying  # before it knows the model's group
        training = Training(state, process_group=pair)
        assert _error_of(training, steps=6) is None
        state.close()
    state = AutoState()
    assert _error_of(Training(state, bind=False), steps=5) is None
    store = dist.PrefixStore("again", default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    assert _error_of(Training(state, bind=False), steps=5) is None
    state.close()


def test_a_state_uses_the_models_group_and_then_a_new_world():
    run_ranks(_elsewhere, 3, timeout=60)
