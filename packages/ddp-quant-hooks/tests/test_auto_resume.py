"""A choice in checkpoints: a resumed run has the bits of one that continued."""

import copy

import pytest
import torch
import torch.distributed as dist
from auto_runs import SECONDS, Training, exact, quantized
from resumed_runs import Run, resumed

from ddp_quant_hooks import AutoState, auto_hook
from dist_utils.testing import run_ranks, same_bits

CHOSEN = {
    "4 bits": {"4 bits": {}, "exact": SECONDS},
    "exact": {"4 bits": SECONDS, "exact": {}},
    "8 bits": {"8 bits": {}, "exact": SECONDS},
}
"""The delays of candidates, by the choice that they lead to."""


def _maker(seconds):
    made = {
        "4 bits": lambda slow: quantized(slow, bits=4),
        "8 bits": lambda slow: quantized(slow, error_feedback="shard"),
        "exact": exact,
    }
    return lambda: AutoState(
        candidates={name: made[name](slow or 0.0) for name, slow in seconds.items()}, max_error=None
    )


def _difference(make_state, **options):
    """Return the choice, and the step after which a resumed run first differs from one that continues."""
    options = {"hook": auto_hook, "bucket_cap_mb": 0.012, **options}
    run = Run(make_state, **options)
    before = 0
    while run.state.choice is None:
        run.step(before)
        before += 1
    run.step(before)
    checkpoint = run.save()
    again = resumed(checkpoint, make_state, **options)
    loaded = again.state.choice == run.state.choice and not again.state.trying
    after = range(before + 1, before + 5)
    different = None if loaded else "not loaded"
    for number in after:
        run.step(number)
        again.step(number)
        if not torch.equal(run.weights(), again.weights()):
            different = different or number - after.start
    if not same_bits(run.state.state_dict(), again.state.state_dict()):
        different = different or "saved"
    choice = run.state.choice
    run.state.close()
    again.state.close()
    return choice, different


def _resumes(rank, models):
    return {
        (name, kind): _difference(_maker(seconds), **options)
        for name, seconds in CHOSEN.items()
        for kind, options in models.items()
        if name == "4 bits" or kind == "plain"
    }


@pytest.mark.parametrize(
    ("world_size", "models"),
    [
        pytest.param(2, {"plain": {}, "static graph": {"static_graph": True}}, marks=pytest.mark.exhaustive),
        pytest.param(
            3,
            {"plain": {}, "unused": {"find_unused_parameters": True, "use": False}},
            marks=pytest.mark.exhaustive,
        ),
        (2, {"plain": {}}),
    ],
)
def test_a_resumed_choice_is_the_uninterrupted_run(world_size, models):
    for found in run_ranks(_resumes, world_size, models, timeout=240):
        assert {case: different for case, (_, different) in found.items() if different is not None} == {}
        for (name, _), (choice, _) in found.items():
            assert name == choice.candidate, choice.why


def _in_the_middle(rank):
    def make():
        return AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()})

    run = Training(make())
    for _ in range(9):
        run.step()
    saved = run.state.state_dict()
    again = Training(make())
    again.state.load_state_dict(saved)
    choice, step = again.until_chosen()
    fresh = Training(make())
    _, fresh_step = fresh.until_chosen()
    # And a run with a choice that loads one without starts over, too.
    fresh.state.load_state_dict(saved)
    before = fresh.state.choice, fresh.state.trying
    fresh.steps = 0
    _, once_more = fresh.until_chosen()
    for one in (run, again, fresh):
        one.state.close()
    return saved["choice"], choice.candidate, step, fresh_step, before, once_more


def test_a_resume_in_the_middle_of_a_trial_tries_again():
    for saved, candidate, step, fresh_step, before, once_more in run_ranks(_in_the_middle, 2, timeout=60):
        assert saved is None
        assert candidate == "fast"
        assert step == fresh_step == once_more
        assert before == (None, True)


def _refusals(rank):
    candidates = {"slow": exact(SECONDS), "fast": quantized(bits=4)}
    training = Training(AutoState(candidates=candidates, max_error=None))
    training.until_chosen()
    training.step()
    saved = training.state.state_dict()
    fresh = Training(AutoState(candidates={"slow": exact(), "fast": quantized(bits=4)}))
    other_options = Training(AutoState(candidates={"slow": exact(), "fast": quantized()}))
    other_names = Training(AutoState(candidates={"slow": exact(), "other": quantized(bits=4)}))

    def changed(**values):
        return {**copy.deepcopy(saved), **values}

    attempts = {
        "no dict": (fresh, None),
        "other candidates": (other_names, saved),
        "other options of a candidate": (other_options, saved),
        "other rank": (fresh, changed(residuals={**saved["residuals"], "rank": 1 - rank})),
        "other number of ranks": (fresh, changed(residuals={**saved["residuals"], "world_size": 3})),
        "other version": (fresh, changed(version=0)),
        "not whole": (fresh, changed(choice={"candidate": "fast"})),
        "no residuals": (fresh, changed(residuals=None)),
    }
    found = {}
    for name, (model, state) in attempts.items():
        try:
            model.state.load_state_dict(state)
        except (TypeError, ValueError) as error:
            found[name] = type(error).__name__, model.state.choice, model.state.trying
    training.state.close()
    return found


def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    for found in run_ranks(_refusals, 2, timeout=60):
        assert found.pop("no dict") == ("TypeError", None, True)
        assert len(found) == 7
        assert set(found.values()) == {("ValueError", None, True)}


def _one_rank_has_loaded(rank):
    training = Training(AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()}))
    training.until_chosen()
    training.step()
    saved = training.state.state_dict()
    again = Training(AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()}))
    if rank == 0:
        again.state.load_state_dict(saved)
    try:
        again.step()
    except RuntimeError as error:
        told = str(error)
    dist.barrier()
    training.state.close()
    return told


def test_ranks_of_which_some_have_loaded_a_choice_raise():
    for told in run_ranks(_one_rank_has_loaded, 2, timeout=60):
        assert "choice is" in told
