"""AutoState chooses the right candidate, identical on all ranks."""

import logging
import threading
from functools import partial

import pytest
import torch
from auto_runs import SECONDS, Training, exact, low_rank, quantized
from torch.distributed.algorithms.join import Join

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import AutoState
from ddp_quant_hooks.auto.trial import fastest, largest_of_ranks
from dist_utils.testing import run_ranks


def _trained(candidates, *, late=0.0, **options):
    """Train until the choice and some steps more; return the choice and its step."""
    training = Training(AutoState(candidates=candidates, **options), late=late)
    choice, step = training.until_chosen()
    for _ in range(3):
        training.step()
    training.state.close()
    return choice, step


def _uniform(rank):
    state = AutoState()
    # Exchanges make the steps of all ranks equally long, but the slowest clock counts.
    assert largest_of_ranks(state.worker, {"a": 1.0 + rank, "b": 2.0 - rank}) == [{"a": 2.0, "b": 2.0}]
    state.close()
    logs = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())
    logging.getLogger("ddp_quant_hooks").addHandler(handler)
    logging.getLogger("ddp_quant_hooks").setLevel(logging.INFO)
    found = {
        "first": _trained({"fast": exact(), "slow": quantized(SECONDS)}),
        "of three": _trained({"a": exact(SECONDS), "b": exact(), "c": quantized(SECONDS)}, max_error=None),
        "a rank comes late": _trained(
            {"slow": exact(SECONDS), "fast": quantized()}, late=SECONDS / 2 if rank == 1 else 0.0
        ),
        "only one is slow on only one rank": _trained(
            {"slow": exact(SECONDS if rank == 1 else 0.0), "fast": quantized()}
        ),
        "one": _trained({"alone": exact()}),
    }
    chosen = {name: (choice.candidate, step) for name, (choice, step) in found.items()}
    return chosen, found["first"][0].why, logs


def test_all_ranks_choose_the_fastest_in_the_same_step():
    (first, why, logs), (second, _, no_logs) = run_ranks(_uniform, 2, timeout=120)
    assert second == first
    assert {name: candidate for name, (candidate, _) in first.items()} == {
        "first": "fast",
        "of three": "b",
        "a rank comes late": "fast",
        "only one is slow on only one rank": "fast",
        "one": "alone",
    }
    assert len([line for line in logs if why in line]) == 1, "rank 0 has logged the reasons, once"
    assert no_logs == []


def _ways_to_train(rank):
    """Return the choices of models that DDP treats in special ways, their steps and the weights."""
    found = {}

    def chosen(name, training):
        found[name] = training.state.choice.candidate, training.steps, training.weights()
        training.state.close()

    def training(**options):
        return Training(AutoState(candidates={"slow": exact(SECONDS / 2), "fast": quantized()}), **options)

    for option in ("find_unused_parameters", "static_graph"):
        model = training(**{option: True})
        model.until_chosen()
        chosen(option, model)
    accumulating = training()
    while accumulating.state.choice is None and accumulating.steps < 200:
        with accumulating.ddp.no_sync():
            accumulating.step()
        accumulating.step(accumulated=True)
    chosen("no_sync", accumulating)
    uneven = training()
    with Join([uneven.ddp]):
        for _ in range(40 if rank == 0 else 30):
            uneven.step()
    uneven.steps = None  # each rank made its own
    chosen("join", uneven)
    return found


def test_modes_of_ddp_do_not_confuse_the_trial():
    first, second = run_ranks(_ways_to_train, 2, timeout=120)
    assert list(first) == ["find_unused_parameters", "static_graph", "no_sync", "join"]
    for name, (candidate, steps, weights) in first.items():
        assert (candidate, steps) == second[name][:2] == ("fast", steps), name
        assert torch.equal(weights, second[name][2]), name


CANDIDATES = {"4 bits": partial(quantized, bits=4), "low rank": partial(low_rank, warm_up_steps=3)}


def _afterwards(_, kind):
    """Compare the steps from the choice on with those of the candidate; return what remains of the others."""
    state = AutoState(candidates={one: CANDIDATES[kind]() for one in ("one", "two")}, max_error=None)
    training, (own, hook) = Training(state), CANDIDATES[kind]()
    hooks = [(None, allreduce_hook)]
    reference = Training(None, lambda _, bucket: hooks[0][1](hooks[0][0], bucket))
    for _ in range(4):  # until DDP has rebuilt its buckets
        reference.step()
    while state.choice is None:
        before = training.weights()
        training.step()
    with torch.no_grad():  # the reference makes the step of the choice, and all later ones
        torch.nn.utils.vector_to_parameters(before, reference.ddp.parameters())
    hooks[0] = own, hook
    reference.steps = training.steps - 1
    reference.step()
    assert torch.equal(training.weights(), reference.weights())
    for number in range(5):  # with residuals, which began at zero
        training.step()
        reference.step()
        assert torch.equal(training.weights(), reference.weights()), number
    threads = [thread.name for thread in threading.enumerate()]
    kept = [name for name, one in state.candidates.items() if one.state.state_dict()["parameters"]]
    state.close()
    own.close()
    assert kept == [state.choice.candidate], "the residuals of others are freed"
    return threads.count("AutoState"), threads.count(type(own).__name__)


@pytest.mark.parametrize("kind", CANDIDATES)
def test_after_the_choice_a_state_works_like_the_candidate_alone(kind):
    # The threads of the candidate and of the reference are left.
    assert run_ranks(_afterwards, 3, kind, timeout=60) == [(0, 2)] * 3


def _tried(_):
    """Return the share of bytes that low rank sends in a trial, and in the steps with which it begins."""
    candidate = low_rank(warm_up_steps=100)
    training = Training(
        AutoState(candidates={"exact": exact(SECONDS), "low rank": candidate}, max_error=None)
    )
    while training.state.choice is None:
        tried = candidate[0].statistics
        training.step()
    ratios = tried.bytes_ratio, (candidate[0].statistics - tried).bytes_ratio
    training.state.close()
    return ratios


def test_candidates_are_tried_as_they_go_on_and_not_as_they_begin():
    for tried, beginning in run_ranks(_tried, 2, timeout=60):
        assert tried < 0.1 < beginning


def _closed_in_a_trial(_):
    """Return the share of bytes that low rank sends in a trial, and then alone, as it begins."""
    own, hook = low_rank(warm_up_steps=100)
    training = Training(
        AutoState(candidates={"exact": exact(SECONDS), "low rank": (own, hook)}, max_error=None)
    )
    while not own.statistics.quantized_buckets:
        training.step()
    tried = own.statistics
    training.state.close()
    alone = Training(own, hook)
    own.bind(alone.ddp)
    alone.step()
    ratios = tried.bytes_ratio, (own.statistics - tried).bytes_ratio
    own.close()
    return ratios


def test_a_candidate_whose_trial_was_closed_begins_as_usual():
    for tried, beginning in run_ranks(_closed_in_a_trial, 2, timeout=60):
        assert tried < 0.1 < beginning


def _alone(rank):
    state = AutoState()
    training = Training(state)
    for _ in range(3):
        training.step()
    return state.choice, training.weights()


def test_one_rank_has_nothing_to_choose():
    ((choice, weights),) = run_ranks(_alone, 1)
    assert choice is None
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([{"a": 1.0, "b": 1.0}] * 3, "a"),
        ([{"a": 1.0, "b": 0.99}] * 3, "a"),  # 1 % is noise
        ([{"a": 1.0, "b": 0.95}] * 3, "b"),
        ([{"a": 0.95, "b": 1.0}] * 3, "a"),
        ([{"a": scale, "b": 0.9 * scale} for scale in (1.0, 5.0, 0.3)], "b"),  # a slow round counts for both
        ([{"a": 1.0, "b": seconds} for seconds in (0.9, 9.0, 0.9)], "b"),  # a slow moment does not decide
        ([{"b": 2.0, "c": 1.0}] * 3, "c"),  # the first was not timed
        ([], "a"),
    ],
)
def test_fewer_bytes_need_a_real_gain(rounds, best):
    assert fastest(["a", "b", "c"], rounds) == best
