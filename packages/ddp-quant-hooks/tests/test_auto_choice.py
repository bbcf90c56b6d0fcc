"""AutoState chooses the right candidate, identical on all ranks."""

import gc
import logging
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from auto_runs import SECONDS, Training, exact, quantized
from torch.distributed.algorithms.join import Join

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import AutoState, QuantizedAllreduceState, auto_hook, quantized_allreduce_hook
from dist_utils.testing import grad_bucket, run_ranks


def _trained(rank, candidates, *, late=0.0, steps=4, options=None, **kwargs):
    """Train until the choice and some steps more; return the results."""
    state = AutoState(candidates=candidates, **kwargs)
    training = Training(state, late=late, **(options or {}))
    choice, step = training.until_chosen()
    for _ in range(steps):
        training.step()
    state.close()
    return choice.candidate, step, training.weights(), choice


def _uniform(rank):
    logs = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())
    logging.getLogger("ddp_quant_hooks").addHandler(handler)
    logging.getLogger("ddp_quant_hooks").setLevel(logging.INFO)
    found = {
        "second": _trained(rank, {"slow": exact(SECONDS), "fast": quantized()}),
        "first": _trained(rank, {"fast": exact(), "slow": quantized(SECONDS)}),
        "of three": _trained(
            rank, {"a": exact(SECONDS), "b": exact(), "c": quantized(SECONDS)}, max_error=None
        ),
        "a rank comes late": _trained(
            rank, {"slow": exact(SECONDS), "fast": quantized()}, late=SECONDS / 2 if rank == 1 else 0.0
        ),
        "only one is slow on only one rank": _trained(
            rank, {"slow": exact(SECONDS if rank == 1 else 0.0), "fast": quantized()}
        ),
        "too wrong": _trained(rank, {"exact": exact(SECONDS), "4 bits": quantized(bits=4)}, max_error=0.05),
        "not asked": _trained(rank, {"exact": exact(SECONDS), "4 bits": quantized(bits=4)}, max_error=None),
        "one": _trained(rank, {"alone": exact()}),
    }
    return {name: result[:2] for name, result in found.items()}, found["too wrong"][3], logs


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_all_ranks_choose_the_fastest_in_the_same_step(world_size):
    results = run_ranks(_uniform, world_size, timeout=120)
    (first, too_wrong, logs), *others = results
    assert all(found == first for found, _, _ in others)
    assert {name: candidate for name, (candidate, _) in first.items()} == {
        "second": "fast",
        "first": "fast",
        "of three": "b",
        "a rank comes late": "fast",
        "only one is slow on only one rank": "fast",
        "too wrong": "exact",
        "not asked": "4 bits",
        "one": "alone",
    }
    assert all(step <= 100 for _, step in first.values())
    # The choice and its reasons can be read, and rank 0 has logged them, once.
    assert 0.05 < too_wrong.errors["4 bits"] < 0.3
    assert too_wrong.errors["exact"] < 1e-6
    assert "max_error" in too_wrong.why
    assert len([line for line in logs if too_wrong.why in line]) == 1
    assert all(own == [] for _, _, own in others)


def _other_clock(rank):
    """Make the clock of rank 1 jump in every pass of the candidate that is fast by all other clocks."""
    real, jumps = time.perf_counter, [0.0]
    time.perf_counter = lambda: real() + jumps[0]

    def jump():
        jumps[0] += rank
        return 0.0

    found = _trained(rank, {"slow": exact(SECONDS), "fast": quantized(jump)})
    time.perf_counter = real
    return found[:3]


def test_the_slowest_ranks_times_count_on_all():
    first, second = run_ranks(_other_clock, 2, timeout=60)
    assert first[:2] == second[:2]
    assert first[0] == "slow"
    assert torch.equal(first[2], second[2])


def _ways_to_train(rank):
    """Return the choices of models that DDP treats in special ways."""

    def state():
        return AutoState(candidates={"slow": exact(SECONDS / 2), "fast": quantized()})

    found = {}
    for name, options in {
        "unused": {"find_unused_parameters": True},
        "static graph": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
    }.items():
        training = Training(state(), **options)
        found[name] = training.until_chosen()
        found[name] += (training.weights(),)
    accumulating = Training(state())
    while accumulating.state.choice is None and accumulating.steps < 200:
        with accumulating.ddp.no_sync():
            accumulating.step()
        accumulating.step(accumulated=True)
    found["no_sync"] = accumulating.state.choice, accumulating.steps, accumulating.weights()
    uneven = Training(state())
    with Join([uneven.ddp]):
        for _ in range(40 if rank == 0 else 30):
            uneven.step()
    found["join"] = uneven.state.choice, None, uneven.weights()
    for model in (accumulating, uneven):
        model.state.close()
    return {name: (choice.candidate, step, weights) for name, (choice, step, weights) in found.items()}


def test_modes_of_ddp_do_not_confuse_the_trial():
    first, second = run_ranks(_ways_to_train, 2, timeout=120)
    assert {name: candidate for name, (candidate, _, _) in first.items()} == dict.fromkeys(first, "fast")
    assert first.keys() == second.keys()
    for name, (candidate, step, weights) in first.items():
        assert (candidate, step) == second[name][:2], name
        assert torch.equal(weights, second[name][2]), name


def _afterwards(rank):
    """Return what remains some steps after the choice, and whether the bits are those of the candidate."""
    four = QuantizedAllreduceState(min_bytes=0, bits=4)
    state = AutoState(
        candidates={
            "4 bits": (four, quantized_allreduce_hook),
            "other": quantized(SECONDS, bits=4),
            "exact": exact(SECONDS),
        },
        max_error=None,
    )
    training = Training(state)
    hooks = [(None, allreduce_hook)]
    own = QuantizedAllreduceState(min_bytes=0, bits=4)
    reference = Training(None, lambda _, bucket: hooks[0][1](hooks[0][0], bucket))
    for _ in range(4):  # until DDP has rebuilt its buckets
        reference.step()
    while state.choice is None and training.steps < 100:
        before = training.weights()
        training.step()
    with torch.no_grad():  # the reference makes the step of the choice, and all later ones
        torch.nn.utils.vector_to_parameters(before, reference.ddp.parameters())
    hooks[0] = own, quantized_allreduce_hook
    reference.steps = training.steps - 1
    reference.step()
    equal = [torch.equal(training.weights(), reference.weights())]
    for _ in range(5):
        training.step()
        reference.step()
        equal.append(torch.equal(training.weights(), reference.weights()))
    names = [thread.name for thread in threading.enumerate()]
    left = state.choice.candidate, names.count("AutoState"), names.count("QuantizedAllreduceState")
    kept = {name: bool(state.candidates[name].state.state_dict()["own"]) for name in ("4 bits", "other")}
    state.close()
    own.close()
    return left, equal, kept


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_after_the_choice_a_state_works_like_the_candidate_alone(world_size):
    for left, equal, kept in run_ranks(_afterwards, world_size, timeout=60):
        assert left == ("4 bits", 0, 2)  # the thread of the candidate, and of the reference
        assert equal == [True] * 6  # with residuals, which began at zero
        assert kept == {"4 bits": True, "other": False}  # the residuals of others are freed


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


def _default(rank):
    state = AutoState(max_error=None)
    training = Training(state)
    choice, step = training.until_chosen()
    return choice.candidate, step, list(state.candidates), dict(choice.errors)


def test_the_default_candidates_are_this_projects_hooks():
    first, second = run_ranks(_default, 2, timeout=60)
    candidate, step, names, errors = first
    assert first == second
    assert names == ["fp32", "bf16", "8 bits", "4 bits"]
    assert candidate in names
    assert step <= 100
    assert errors == {}


def _garbage(rank):
    """Drop a state in the middle of its trial, without the garbage collector."""
    gc.disable()
    state = AutoState(candidates={"a": exact(), "b": quantized(bits=4)}, max_error=0.1)
    bucket = grad_bucket([torch.zeros(100)])
    for _ in range(11):  # outside of backward() each call with the first bucket is a pass
        bucket.set_buffer(torch.ones(100))
        auto_hook(state, bucket).wait()
    threads = [one for one in threading.enumerate() if one.name in {"AutoState", "QuantizedAllreduceState"}]
    alive, trying = weakref.ref(state), state.trying
    dist.barrier()
    del state
    gone = alive() is None
    for thread in threads:
        thread.join(20)
    return trying, len(threads), gone, [thread.is_alive() for thread in threads]


def test_a_state_in_its_trial_is_garbage_at_once():
    for trying, threads, gone, alive in run_ranks(_garbage, 2, timeout=60):
        assert (trying, threads, gone, alive) == (True, 2, True, [False, False])
