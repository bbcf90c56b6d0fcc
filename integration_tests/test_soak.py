"""A few of the soak run's faults: real training with one fault each, compared with an undisturbed run."""

import json
import math
import sys
from functools import partial

import pytest
from soak import page, verdicts
from soak.command import RESULTS, too_many_late
from soak.faults import Job
from soak.growth import MEMORY, go_on, judge_growth, remake, sample_loop
from soak.injection import run, why_skipped
from soak.jobs import JobEnd, Runner
from soak.network import network
from soak.restarts import kill_and_restart
from soak.verdicts import Reference, judge

from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

# test_peers.py has a rank that ends, stops or raises.
JOBS = [
    ("stopped for less than the timeout", "4 bits, feedback", 2, 0, 10),
    ("disk full in a checkpoint", "plain tensors, 4 bits, feedback", 2, 1, 12),
    ("link cut", "8 bits", 2, 0, 5),
]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds and measures processes in /proc")
ATTEMPTS = 3
"""On a busy machine Gloo misses a closed connection in 2 jobs of 100, with plain DDP, too."""


@pytest.mark.parametrize(("fault", "training", "size", "victim", "step"), JOBS)
def test_a_fault_is_an_error_on_every_rank_or_changes_no_bit(fault, training, size, victim, step):
    with network(2) as hosts:
        if reason := why_skipped(fault, hosts):
            pytest.skip(reason)
        job = Job(0, training, size, fault, victim, step, 0.5, 0.4, timeout=patience(2.0))
        runner, references = Runner(hosts), {}
        for _ in range(ATTEMPTS):
            outcome = run(runner, job, references)
            assert outcome["verdict"] == "right", json.dumps(outcome, indent=1)
            if not outcome["late"]:
                return
    pytest.fail(f"late {ATTEMPTS} times: {json.dumps(outcome, indent=1)}")


@pytest.mark.exhaustive
def test_a_restarted_job_ends_with_the_bits_of_an_uninterrupted_one():
    outcome = kill_and_restart(ranks=3, step=7)
    assert outcome["verdict"] == "right", outcome["problems"]


STEPS = "abcdefgh"


def _record(steps, raised=None, left=0):
    events = [{"time": 0.0, "event": "ready", "parameters": ["begin"]}]
    for step, digest in enumerate(steps):
        events += [
            {"time": step + 1.0, "event": "begins", "step": step},
            {"time": step + 1.5, "event": "stepped", "step": step, "parameters": [digest]},
        ]
    if raised is None:
        events.append({"time": 99.0, "event": "finished"})
    else:
        events.append({"time": raised, "event": "raised", "type": "RuntimeError", "text": "gone"})
    before, after = ({"sockets": sockets, "threads": 1} for sockets in (0, left))
    return [*events, {"event": "left", "before": before, "after": after}]


def _end(*records, codes=(0, -9), left=(), stacks=None, injected=5.0):
    return JobEnd(list(records), list(codes), injected, [6.0, 5.0], stacks or {}, list(left), [], "")


VICTIM = _record(STEPS[:4], raised=math.inf)
OTHER = _record(STEPS[:4], raised=5.1)


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        (_end(OTHER, VICTIM), ("right", 0)),
        (_end(_record(STEPS[:4], raised=10.1), VICTIM), ("right", 1)),  # missed by Gloo, until the timeout
        (_end(_record(STEPS[:4], raised=15.1), VICTIM), ("wrong", 1)),
        (_end(_record([*STEPS[:3], "not averaged"], raised=5.1), VICTIM), ("wrong", 0)),
        (_end(_record(STEPS), VICTIM), ("wrong", 0)),
        (_end(OTHER, VICTIM, codes=(-6, -9), left=[12345]), ("wrong", 0)),
        (_end(OTHER, VICTIM, injected=None), ("wrong", 0)),
        (_end(_record(STEPS[:4], raised=5.1, left=1), VICTIM), ("wrong", 0)),
        (_end(OTHER, VICTIM, stacks={0: "in wait"}), ("hung", 0)),
    ],
)
def test_outcomes_are_judged(ended, verdict, monkeypatch):
    monkeypatch.setattr(verdicts, "patience", lambda seconds: seconds)
    job = Job(0, "8 bits", 2, "kill -9", victim=1, step=4, steps=len(STEPS))
    reference = Reference(job, _end(_record(STEPS), _record(STEPS), codes=(0, 0)))
    outcome = judge(job, ended, reference)
    assert (outcome["verdict"], outcome["late"]) == verdict


@pytest.mark.parametrize(("late", "many"), [(1, False), (2, True)])
def test_more_than_one_of_twenty_is_too_often_late(late, many):
    assert too_many_late([{"late": 1}] * late + [{"late": 0}] * (20 - late)) is many


HELD = {"heap": 300.0, "kernel_threads": 9, "descriptors": 20, "seconds": 0.01}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda index: {}, "right"),
        (lambda index: {"descriptors": 20 + index // 50}, "wrong"),
        (lambda index: {"heap": 300.0 + (7 * index * index) % 5}, "right"),
        (lambda index: {"heap": 300.0 + (7 * index * index) % 5 + index / 2}, "wrong"),
    ],
)
def test_growth_is_seen_in_noise(change, verdict):
    grows = [{**HELD, **change(index)} for index in range(200)]
    assert judge_growth([grows, grows])["verdict"] == verdict


ENDS_GROUPS = pytest.mark.skipif(
    not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 keeps groups until all are destroyed"
)


@pytest.mark.parametrize(
    ("make", "count", "allowed"), [(go_on, 116, 5), pytest.param(remake, 32, 40, marks=ENDS_GROUPS)]
)
def test_steps_and_states_that_were_closed_hold_nothing(make, count, allowed):
    """The memory that is allowed is twice what plain DDP leaves, and the soak run's constant for noise.

    Plain DDP leaves 2 KiB of a step and 19 of a model. What must not be left is more: residuals are 60 KiB, a
    model is 180. The constant is for jumps: resident memory grows when the C library gives a thread an arena.
    A larger jump, as of a table that doubles, is in one half of the steps only; what is held is in both.
    At any one moment a thread or a connection may still be ending, so the least of several samples counts.
    """
    for samples in run_ranks(sample_loop, 2, partial(make, "8 bits, feedback, overlap"), count, timeout=120):
        parts = samples[8:16], samples[count // 2 :][:8], samples[-8:]
        held = {
            what: [min(one[what] for one in part) for part in parts]
            for what in samples[0].keys() - {"seconds"}
        }
        growth = {what: min(middle - first, last - middle) for what, (first, middle, last) in held.items()}
        limits = {what: allowed * (count - 16) / 2 + noise for what, noise in MEMORY.items()}
        assert {what: grew for what, grew in growth.items() if grew > limits.get(what, 0)} == {}, samples


def test_the_page_has_the_figures_of_the_results():
    text = page.PAGE.read_text()
    assert page.with_figures(text, json.loads(RESULTS.read_text())) == text
