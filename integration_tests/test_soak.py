"""A few of the soak run's faults: real training with one fault each, compared with an undisturbed run."""

import json
import math
from dataclasses import replace

import pytest
from soak import verdicts
from soak.command import too_many_late
from soak.faults import FAULTS, Job
from soak.injected import run, why_skipped
from soak.jobs import Ended, Runner
from soak.long_runs import judged
from soak.network import network
from soak.regression import fitted
from soak.trainings import TRAININGS
from soak.verdicts import Reference, judge

from dist_utils.testing import patience

JOBS = [
    ("kill -9", "8 bits, feedback, overlap", 3, 1, 20),
    ("kill -9", "8 bits", 2, 1, 20),  # once, a failed job kept its group forever
    ("raises in hook", "bf16, fp32 sums", 2, 1, 10),
    ("raises in optimizer", "8 bits", 2, 0, 10),
    ("stopped for less than the timeout", "4 bits, feedback", 2, 0, 10),
    ("disk full in a checkpoint", "plain tensors, 4 bits, feedback", 2, 1, 12),
    ("link cut", "8 bits", 2, 0, 5),
]

ATTEMPTS = 3
"""On a busy machine Gloo misses a closed connection in 2 jobs of 100, with plain DDP, too."""


@pytest.fixture(scope="module")
def hosts():
    with network(2) as found:
        yield found


@pytest.fixture(scope="module")
def runner(hosts):
    return Runner(hosts)


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.mark.parametrize(("fault", "training", "size", "victim", "step"), JOBS)
def test_a_fault_is_an_error_on_every_rank_or_changes_no_bit(
    fault, training, size, victim, step, hosts, runner, references
):
    if reason := why_skipped(fault, hosts):
        pytest.skip(reason)
    link = FAULTS[fault].where == "link"
    timeout = patience(2.0)
    job = Job(0, training, size, fault, victim, step, 0.5, 0.4, timeout=timeout, hosts=link)
    _is_right_and_in_time(job, runner, references)


def _is_right_and_in_time(job, runner, references):
    for _ in range(ATTEMPTS):
        outcome = run(runner, job, references)
        assert outcome["verdict"] == "right", json.dumps(outcome, indent=1)
        if not outcome["late"]:
            return
    pytest.fail(f"late {ATTEMPTS} times: {json.dumps(outcome, indent=1)}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", TRAININGS)
def test_a_killed_rank_is_an_error_on_every_other_under_every_hook(training, runner, references):
    size = max(TRAININGS[training].world_sizes)
    _is_right_and_in_time(Job(0, training, size, "kill -9", 1, 15, 0.5), runner, references)


def _record(*steps, raised=None):
    events = [{"time": 0.0, "event": "ready", "parameters": ["begin"]}]
    for step, digest in enumerate(steps):
        events += [
            {"time": step + 1.0, "event": "begins", "step": step},
            {"time": step + 1.5, "event": "stepped", "step": step, "parameters": [digest]},
        ]
    if raised is None:
        return [*events, {"time": 99.0, "event": "finished"}]
    return [*events, {"time": raised, "event": "raised", "type": "RuntimeError", "text": "gone"}]


def _ended(*records, codes=(0, -9), injected=5.0):
    return Ended(list(records), list(codes), injected, [6.0, 5.0], {}, [], [], "")


def test_wrong_outcomes_are_judged_wrong(monkeypatch):
    """A verdict that can never be "wrong" would prove nothing."""
    monkeypatch.setattr(verdicts, "patience", lambda seconds: seconds)
    steps = ["a", "b", "c", "d", "e", "f", "g", "h"]
    plain = Job(0, "8 bits", 2, steps=len(steps))
    reference = Reference(plain, _ended(_record(*steps), _record(*steps), codes=(0, 0)))
    job = Job(0, "8 bits", 2, "kill -9", victim=1, step=4, steps=len(steps))
    victim = _record(*steps[:4], raised=math.inf)
    right = _ended(_record(*steps[:4], raised=5.1), victim)
    assert judge(job, right, reference)["verdict"] == "right"
    missed = _ended(_record(*steps[:4], raised=10.1), victim)  # by Gloo, until the timeout
    outcome = judge(job, missed, reference)
    assert (outcome["verdict"], outcome["late"]) == ("right", 1)
    assert judge(job, right, reference)["late"] == 0
    assert not too_many_late([outcome, *[{"late": 0}] * 19])
    assert too_many_late([outcome, *[{"late": 0}] * 18])
    late = _ended(_record(*steps[:4], raised=15.1), victim)
    stepped = _ended(_record(*steps[:3], "not averaged", raised=5.1), victim)
    went_on = _ended(_record(*steps), victim)
    aborted = right._replace(exit_codes=[-6, -9])
    left = right._replace(left=[12345])
    never = right._replace(injected=None)
    for ended in (late, stepped, went_on, aborted, left, never):
        assert judge(job, ended, reference)["verdict"] == "wrong"
    assert judge(job, right._replace(stacks={0: "in wait"}), reference)["verdict"] == "hung"


def test_a_connection_to_a_store_that_does_not_answer_is_no_leak():
    """Of a rank that was cut off, or whose store is in the frozen process; but only that one connection."""
    plain = Job(0, "8 bits", 2, steps=8)
    reference = Reference(plain, _ended(_record(*"abcdefgh"), _record(*"abcdefgh"), codes=(0, 0)))
    frozen = replace(plain, fault="stopped for longer than the timeout", victim=0, step=4, length=6.0)
    seen = {}
    for store in ("rank 0", "apart"):
        for sockets in (1, 2):
            waiting = _record(*"abcd", raised=5.1)
            after = {"sockets": sockets, "threads": 2}
            waiting.append(
                {"event": "left", "before": {"sockets": 0, "threads": 1}, "after": after, "open": []}
            )
            ended = _ended(_record(*"abcd", raised=11.1), waiting, codes=(0, 0))
            seen[store, sockets] = judge(replace(frozen, store=store), ended, reference)["verdict"]
    assert seen == {
        ("rank 0", 1): "right",
        ("rank 0", 2): "wrong",
        ("apart", 1): "wrong",
        ("apart", 2): "wrong",
    }


def test_a_leak_is_seen_in_a_line_and_noise_is_not():
    noise = [100.0 + (7 * index * index) % 5 for index in range(200)]
    assert fitted(noise).is_flat()
    leak = [value + index / 20 for index, value in enumerate(noise)]
    assert not fitted(leak).is_flat()
    held = {"kibibytes": 0.0, "threads": 3, "kernel_threads": 9, "descriptors": 20, "seconds": 0.01}
    grows = [{**held, "descriptors": 20 + index // 50} for index in range(200)]
    assert judged([[held] * 200])["verdict"] == "right"
    assert judged([[held] * 200, grows])["verdict"] == "wrong"
    leaks = [{**held, "heap": 300.0 + index / 2} for index in range(200)]
    fragmented = [{**held, "heap": 300.0, "kibibytes": 400.0 * (index > 100)} for index in range(200)]
    assert judged([leaks])["verdict"] == "wrong"
    assert judged([fragmented])["verdict"] == "right"
