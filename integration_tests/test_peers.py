"""A peer dies, hangs, raises or differs: every rank gets the documented error, and none steps wrongly.

All cases get into trouble in one launch, each on a process group and a thread of its own: a rank can die only
once, and a timeout passes for all at the same time.
"""

import copy
import functools
import itertools
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from peer_cases import CASES, COLLECTIVES, DIFFERENCES, GLOO_ERROR, RANKS, TRAINED, VICTIM
from soak.trouble import raise_here
from torch.nn.parallel import DistributedDataParallel
from trainings import Places, assert_same_bits

from ddp_compress_hooks import allreduce_hook, fp16_compress_wrapper
from ddp_optim_overlap import CommunicationError
from ddp_quant_hooks import AutoState, QuantizedAllreduceState, auto_hook, quantized_allreduce_hook
from dist_utils.testing import patience, run_ranks, stop_process

OTHERS = [rank for rank in range(RANKS) if rank != VICTIM]
WARM = 3
"""Steps until the ranks have compared everything and DDP has its final buckets."""
TIMEOUT_SECONDS, GRACE_SECONDS = 3.0, 5.0
"""The timeout of the groups, and how much later an error may come: docs/reliability.md."""


LATE = [name for name in TRAINED if TRAINED[name].text_at_first and "FSDP2" not in name]
"""The cases in which the victim comes to the step when the others have given up."""
FAULTS = {"exits": lambda: os._exit(3), "hangs": stop_process, "raises": raise_here}


class Seen(NamedTuple):
    """What a rank has seen of a step that should fail.

    Attributes:
        kind: The type of the error; of ``None`` if there was none.
        text: Its text.
        seconds: How long the step took.
        moved: The parameters that have values that no step gives them.
        later: The types of the errors of what comes after ``backward()`` with an overlap.
    """

    kind: type
    text: str
    seconds: float
    moved: list[int]
    later: list[type]


def _error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return None


def _copies(part):
    return [parameter.clone() for parameter in part.parameters()]


def _values_after(case, part, number):
    """Return the values that the parameters may have after a step that fails."""
    if number == 0 or not case.steps_parts:
        return [_copies(part)]
    before = copy.deepcopy(part.checkpoint())
    part.step(number)
    after = _copies(part)
    part.load(before)
    return [before["parameters"], after]


def _see(part, number, allowed):
    """Make a step that should fail."""
    began = time.monotonic()
    error = _error_of(part.step, number)
    seconds = time.monotonic() - began
    moved = [
        index
        for index, parameter in enumerate(part.parameters())
        if not any(torch.equal(parameter, values[index]) for values in allowed)
    ]
    after = [] if part.handle is None else [part.handle.wait, part.optimizer.step]
    return Seen(type(error), str(error), seconds, moved, [type(_error_of(call)) for call in after])


def _see_all(parts, number, allowed):
    """Make a step of every part at once."""
    with ThreadPoolExecutor(len(parts)) as pool:
        steps = {name: pool.submit(_see, part, number, allowed[name]) for name, part in parts.items()}
        return {name: step.result() for name, step in steps.items()}


def _two_steps(part):
    """Make two steps; return the parameters."""
    for number in range(2):
        part.step(number)
    parameters = _copies(part)
    part.close()
    return parameters


def _go_on(part, case, group):
    """Make steps again, if that is possible; return the parameters by what was kept of the failed step."""
    found = {}
    if case.starts_anew and hasattr(getattr(part, "net", None), "reset_iter_state"):
        part.state.close()
        part.optimizer.zero_grad()
        part.net.reset_iter_state()  # of fully_shard
        found["the model"] = _two_steps(part)
    else:
        part.close()
    if case.starts_anew:
        found["the group"] = _two_steps(case.begin(group, Places()))
        found["nothing"] = _two_steps(case.begin(dist.new_group(), Places()))
    return found


def _peers(_, fault, number, limit):
    """Let the victim get into trouble in all cases at once, in the step of this number."""
    cases = CASES if fault in FAULTS else DIFFERENCES
    groups = {name: dist.new_group(timeout=timedelta(seconds=limit)) for name in cases}
    places = {name: Places() for name in cases}
    parts = {name: case.begin(groups[name], places[name]) for name, case in cases.items()}
    for part in parts.values():
        for step in range(number):
            part.step(step)
    allowed = {name: _values_after(case, parts[name], number) for name, case in cases.items()}
    if dist.get_rank() == VICTIM and fault in FAULTS:
        # A process ends when every case has reached the middle of its step.
        trouble = threading.Barrier(len(cases), FAULTS[fault]).wait if number else FAULTS[fault]
        for name, one in places.items():
            one.arm("backward" if number else "forward" if name in TRAINED else "begin", number, trouble)
    dist.barrier()
    seen = _see_all(parts, number, allowed)
    if fault != "raises":
        return seen, {}
    dist.barrier()  # until then the victim has its connections, and the others hear nothing of its error
    if dist.get_rank() == VICTIM:
        late = _see_all({name: parts[name] for name in LATE}, 0, allowed)
        seen |= {f"{name}, late": one for name, one in late.items()}
    dist.barrier()
    return seen, {name: _go_on(part, cases[name], groups[name]) for name, part in parts.items()}


class Outcome(NamedTuple):
    """The fault of a launch, the timeout of its groups, and what each rank has seen of each case."""

    fault: str
    limit: float
    seen: dict[int, dict[str, Seen]]
    anew: dict[int, dict[str, dict[str, list[torch.Tensor]]]]


@functools.cache
def _launch(fault):
    """Run all cases with a fault; return the outcome, or the error, so that it is not run again."""
    limit, dies = patience(TIMEOUT_SECONDS), {VICTIM} if fault in {"exits", "hangs"} else set()
    options = {"may_die": dies, "timeout": 60 + 5 * limit}
    try:
        found = run_ranks(_peers, RANKS, fault, WARM if dies else 0, limit, **options)
    except Exception as error:  # noqa: BLE001 - every test raises it
        return error
    ranks = {rank: each for rank, each in enumerate(found) if each is not None}
    seen = {rank: seen for rank, (seen, _) in ranks.items()}
    return Outcome(fault, limit, seen, {rank: anew for rank, (_, anew) in ranks.items()})


@pytest.fixture
def outcome(request):
    found = _launch(request.param)
    if isinstance(found, Exception):
        raise found
    return found


def _each(*faults, cases):
    pairs = [(fault, name) for fault in faults for name in cases]
    return pytest.mark.parametrize(("outcome", "name"), pairs, indirect=["outcome"])


def _assert_error(outcome, rank, name, case, text):
    seen = outcome.seen[rank][name]
    assert issubclass(seen.kind, case.error), seen
    assert re.search(text.replace("{limit:g}", f"{outcome.limit:g}"), seen.text), seen
    assert seen.seconds < outcome.limit + patience(GRACE_SECONDS), seen


@_each(*FAULTS, cases=CASES)
def test_every_other_rank_gets_the_documented_error_in_time(outcome, name):
    case = CASES[name]
    for rank in case.waiting:
        _assert_error(
            outcome, rank, name, case, case.text_at_first if outcome.fault == "raises" else case.text
        )
    for rank in OTHERS:
        later = outcome.seen[rank][name].later
        assert later in ([], [CommunicationError] * 2), later


@_each(*FAULTS, cases=TRAINED)
def test_no_parameter_has_a_value_that_no_step_gives_it(outcome, name):
    assert [seen[name].moved for seen in outcome.seen.values()] == [[]] * len(outcome.seen)


@_each("raises", cases=CASES)
def test_a_rank_that_raises_gets_its_own_error(outcome, name):
    assert "user code failed" in outcome.seen[VICTIM][name].text


@_each("raises", cases=LATE)
def test_a_rank_that_comes_too_late_waits_once_and_gets_an_error(outcome, name):
    text = r"ranks \[1\] came within {limit:g} s, ranks \[0, 2\] did not"
    _assert_error(outcome, VICTIM, f"{name}, late", TRAINED[name], text)


@_each("raises", cases=[name for name, case in CASES.items() if case.starts_anew])
def test_ranks_that_have_closed_what_failed_have_the_bits_of_a_fresh_start(outcome, name):
    for anew in outcome.anew.values():
        *others, fresh = anew[name].values()
        assert fresh, "there is something to compare"
        assert_same_bits(others, [fresh] * len(others))


@pytest.mark.parametrize("outcome", ["exits"], indirect=True)
def test_closed_connections_tell_most_ranks_before_the_timeout(outcome):
    seconds = {
        (rank, name): outcome.seen[rank][name].seconds
        for rank in OTHERS
        for name in CASES
        if name in TRAINED or name in COLLECTIVES
    }
    late = {place: took for place, took in seconds.items() if took >= outcome.limit}
    # A trial of AutoState may compare just then; and Gloo misses a connection that closes as a wait starts.
    assert len(late) < len(seconds) / 5, late


@_each("differs", cases=DIFFERENCES)
def test_ranks_that_differ_all_get_an_error_that_says_in_what_and_step_nothing(outcome, name):
    case = DIFFERENCES[name]
    for rank in range(RANKS):
        _assert_error(outcome, rank, name, case, case.text if rank in case.witnesses else GLOO_ERROR)
        assert outcome.seen[rank][name].moved == []


def _dies_within(_, around):
    """The victim dies in a new bucket, after one state has compared it, and before the next one does."""
    calls = itertools.count()

    def hook(state, bucket):
        if dist.get_rank() == VICTIM and next(calls) == 1:
            os._exit(3)
        return quantized_allreduce_hook(state, bucket)

    state = QuantizedAllreduceState()
    if around == "auto":
        state, hook = (
            AutoState(candidates={"dies": (state, hook), "other": (None, allreduce_hook)}),
            auto_hook,
        )
    else:
        hook = fp16_compress_wrapper(hook)
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01
    )
    ddp.register_comm_hook(state, hook)
    ddp(torch.ones(2, 64)).sum().backward()  # in one bucket; then DDP makes several
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] came within"):
        ddp(torch.ones(2, 64)).sum().backward()
    return time.monotonic() - began


@pytest.mark.parametrize("around", ["auto", "wrapper"])
def test_a_rank_that_dies_between_the_comparisons_of_two_states_is_waited_for_once(around):
    limit = patience(TIMEOUT_SECONDS)
    for seconds in run_ranks(_dies_within, RANKS, around, group_timeout=limit, may_die={VICTIM}):
        assert seconds is None or seconds < 1.7 * limit
