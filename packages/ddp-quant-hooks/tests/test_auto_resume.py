"""A choice in checkpoints: a resumed run has the bits of one that continued."""

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
}
"""The delays of candidates, by the choice that they lead to."""


def _maker(seconds):
    made = {
        "4 bits": lambda slow: quantized(slow, bits=4),
        "exact": exact,
    }
    return lambda: AutoState(
        candidates={name: made[name](slow or 0.0) for name, slow in seconds.items()}, max_error=None
    )


def _choice_of_resumed(make_state):
    """Compare a resumed run with one that continues; return the choice."""
    options = {"hook": auto_hook, "bucket_cap_mb": 0.012}
    run, before = Run(make_state, **options), 0
    while run.state.choice is None:
        run.step(before)
        before += 1
    run.step(before)
    again = resumed(run.save(), make_state, **options)
    assert (again.state.choice, again.state.trying) == (run.state.choice, False)
    for number in range(before + 1, before + 5):
        run.step(number)
        again.step(number)
        assert torch.equal(run.weights(), again.weights()), number
    assert same_bits(run.state.state_dict(), again.state.state_dict())
    run.state.close()
    again.state.close()
    return run.state.choice.candidate


def _resumes(_):
    return [_choice_of_resumed(_maker(seconds)) for seconds in CHOSEN.values()]


def test_a_resumed_choice_is_the_uninterrupted_run():
    for chosen in run_ranks(_resumes, 2, timeout=240):
        assert chosen == list(CHOSEN)


def _in_the_middle(_):

    def started():
        return Training(AutoState(candidates={"slow": exact(SECONDS), "fast": quantized()}))

    run, again = started(), started()
    for _ in range(9):
        run.step()
    saved = run.state.state_dict()
    choice, step = again.until_chosen()
    # A run with a choice that loads one without starts over.
    again.state.load_state_dict(saved)
    before, again.steps = (again.state.choice, again.state.trying), 0
    once_more, same_step = again.until_chosen()
    for one in (run, again):
        one.state.close()
    return saved["choice"], before, [choice.candidate, once_more.candidate], [step, same_step]


def test_a_resume_in_the_middle_of_a_trial_tries_again():
    for saved, before, candidates, (step, same_step) in run_ranks(_in_the_middle, 2, timeout=60):
        assert (saved, before, candidates) == (None, (None, True), ["fast"] * 2)
        assert step == same_step


def _refusals(rank):
    """Load what does not fit; then load what does on one rank only, which every rank must notice."""

    def started(**candidates):
        return Training(AutoState(candidates=candidates, max_error=None))

    training = started(slow=exact(SECONDS), fast=quantized(bits=4))
    training.until_chosen()
    training.step()
    saved = training.state.state_dict()
    fresh = started(slow=exact(), fast=quantized(bits=4))
    residuals = saved["residuals"]
    attempts = {
        "no dict": (fresh, None),
        "other candidates": (started(slow=exact(), other=quantized(bits=4)), saved),
        "other options of a candidate": (started(slow=exact(), fast=quantized()), saved),
        "other rank": (fresh, {**saved, "residuals": {**residuals, "rank": 1 - rank}}),
        "other number of ranks": (fresh, {**saved, "residuals": {**residuals, "world_size": 3}}),
        "other version": (fresh, {**saved, "version": 0}),
        "no mapping": (fresh, {**saved, "choice": torch.zeros(2)}),
        "no candidate": (fresh, {**saved, "choice": {**saved["choice"], "candidate": "faster"}}),
    }
    for model, state in attempts.values():
        with pytest.raises((TypeError, ValueError)):
            model.state.load_state_dict(state)
        assert (model.state.choice, model.state.trying) == (None, True)
    if rank == 0:
        fresh.state.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="choice is"):
        fresh.step()
    dist.barrier()
    training.state.close()


def test_what_does_not_fit_is_refused_and_changes_nothing():
    run_ranks(_refusals, 2, timeout=60)
