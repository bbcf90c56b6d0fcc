"""The outcome of a job: right, wrong or hung, and why."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from typing import Any

from dist_utils.testing import patience
from soak.faults import STEADY, STEPS, Job
from soak.jobs import Ended
from soak.trainings import TRAININGS

__all__ = ["Reference", "judge"]

GONE_SECONDS, GRACE_SECONDS = 1.0, 5.0
"""Seconds for a rank to raise once a connection is gone, or after the timeout if it cannot know.

A rank that raises between the two is late: if a wait starts just while its connection closes, Gloo does not
end it before the timeout. That happens in plain DDP, too.
"""
CLOSE_SECONDS = 12.0
"""Seconds for closing: a hanging worker is waited for 5 s, and a training may have two."""

COUNTED = ("sockets", "threads")
"""Resources that survivors must close; a rank that still waits for the store keeps a connection to it."""


class Reference:
    """Each rank's parameters at the beginning and after each step, without a fault."""

    def __init__(self, job: Job, ended: Ended) -> None:
        problems = list(_ended_well(job, ended))
        if problems:
            raise RuntimeError(f"{job.training} on {job.world_size} ranks fails without a fault: {problems}")
        self._states = [
            [event["parameters"] for event in events if event["event"] in {"ready", "stepped"}]
            for events in ended.records
        ]
        times = [event["time"] for event in ended.records[0] if event["event"] == "begins"]
        self.step_seconds = statistics.median(
            after - before for before, after in itertools.pairwise(times[STEADY:])
        )

    def after(self, rank: int, steps: int) -> list[str]:
        """Return the digests of a rank's parameters after a number of steps."""
        return self._states[rank][min(steps, len(self._states[rank]) - 1)]


def judge(job: Job, ended: Ended, reference: Reference) -> dict[str, Any]:
    """Return the outcome of a job, for a line of the results."""
    dies = _is_killed(job) or ("allocation" in job.fault and ended.exit_codes[job.victim] != 0)
    survivors = [rank for rank in range(job.world_size) if rank != job.victim or not dies]
    hung = [rank for rank in range(job.world_size) if rank in ended.stacks]
    problems = list(_wrong_bits(job, ended, reference)) + list(_remains(job, ended, survivors))
    stopped = any(_event(events, "raised") for events in ended.records) or any(ended.exit_codes)
    ends = stopped if job.kind.ends is None else job.kind.ends
    seconds: list[float] = []
    latest = job.timeout + patience(GRACE_SECONDS)
    soon = patience(GONE_SECONDS) if job.kind.gone and job.step >= STEADY else latest
    if ends:
        for rank in survivors:
            raised = _event(ended.records[rank], "raised")
            if raised is None:
                if rank not in hung:
                    problems.append(f"rank {rank} went on: {_last(ended, rank)}")
                continue
            if (began := _could_know(job, ended, rank)) is not None:
                seconds.append(round(raised["time"] - began, 3))
                if seconds[-1] > latest:
                    problems.append(f"rank {rank} raised after {seconds[-1]:.1f} s, allowed were {latest}")
    else:
        problems += _ended_well(job, ended)
    void = ended.injected is None and not hung and any(map(_timed_out, ended.records))
    if ended.injected is None:
        problems.append("the fault was not injected")
    texts = [event["text"] for rank in survivors if (event := _event(ended.records[rank], "raised"))]
    others = [rank for rank in survivors if rank != job.victim]
    named = [
        rank
        for rank in others
        if (event := _event(ended.records[rank], "raised")) and _names(event["text"], job.victim)
    ]
    outcome = {
        **{name: getattr(job, name) for name in ("number", "fault", "training", "world_size", "victim")},
        **{name: getattr(job, name) for name in ("step", "moment", "length", "store", "timeout")},
        "verdict": "hung" if hung else "void" if void else "wrong" if problems else "right",
        "seconds": seconds,
        "soon": soon if ends else None,
        "late": sum(took > soon for took in seconds),
        "raised": len(texts),
        "named": len(named),
        "told": len(others) if ends else 0,
        "errors": sorted({_without_lines(text)[:160] for text in texts}),
        "closing": max((_closing(events) for events in ended.records), default=0.0),
    }
    if ended.note:
        outcome["note"] = ended.note
    if problems or hung:
        outcome["problems"] = problems
        outcome["stacks"] = {str(rank): text for rank, text in ended.stacks.items()}
    return outcome


def _timed_out(events: list[dict[str, Any]]) -> bool:
    raised = _event(events, "raised")
    return raised is not None and re.search("(?i)timed? ?out|within", raised["text"]) is not None


def _is_killed(job: Job) -> bool:
    return job.fault in {"kill -9", "no more memory: killed by the system"}


def _could_know(job: Job, ended: Ended, rank: int) -> float | None:
    """Return when a rank could see the fault, or ``None`` for the rank that raises itself."""
    if job.victim == rank:
        if job.fault.startswith("stopped"):  # when it continued
            return None if ended.injected is None else ended.injected + job.length
        return ended.injected if job.kind.where == "link" else None
    if job.kind.gone and not _is_killed(job):
        return ended.ended[job.victim]  # its connections end with it at the latest
    return (
        ended.injected
        if job.fault == "kill -9"
        else ended.ended[job.victim]
        if _is_killed(job)
        else ended.injected
    )


def _wrong_bits(job: Job, ended: Ended, reference: Reference) -> Iterator[str]:
    for rank, events in enumerate(ended.records):
        done = 0
        for event in events:
            if event["event"] == "stepped":
                done = event["step"] + 1
                if event["parameters"] != reference.after(rank, done):
                    yield f"rank {rank}: other bits after step {event['step']}"
                    break
        kept = _event(events, "kept")
        if kept is None:
            continue
        before, after = reference.after(rank, done), reference.after(rank, done + 1)
        parts = zip(kept["parameters"], before, after, strict=True)
        if kept["parameters"] in (before, after):
            continue
        if "allocation" in job.fault and rank == job.victim:
            continue  # the optimizer raised, anywhere in its step
        if not TRAININGS[job.training].steps_parts or not all(now in (old, new) for now, old, new in parts):
            yield f"rank {rank}: parameters that no step gives, after {done} steps"


def _store_did_not_answer(job: Job) -> bool:
    frozen = job.fault == "stopped for longer than the timeout" and job.store == "rank 0" and job.victim == 0
    return frozen or job.fault == "link cut"


def _remains(job: Job, ended: Ended, survivors: list[int]) -> Iterator[str]:
    if ended.left:
        yield f"processes left behind: {len(ended.left)}"
    yield from (f"checkpoint: {text}" for text in ended.broken)
    for rank in survivors:
        code = ended.exit_codes[rank]
        if code not in {0, None}:
            yield f"rank {rank} ended with exit code {code} after {_last(ended, rank)}"
        if (closed := _event(ended.records[rank], "closed")) and closed["problem"]:
            yield f"rank {rank}: closing raised {closed['problem']}"
        left = _event(ended.records[rank], "left")
        if left is None or TRAININGS[job.training].torch_keeps_groups:
            continue
        for what in COUNTED:
            more = left["after"][what] - left["before"][what]
            more -= _store_did_not_answer(job)
            if more > 0:
                yield f"rank {rank}: {more} {what} left open: {left['open']}"
        if (closing := _closing(ended.records[rank])) > patience(CLOSE_SECONDS):
            yield f"rank {rank}: closing took {closing:.1f} s"


def _ended_well(job: Job, ended: Ended) -> Iterator[str]:
    for rank, events in enumerate(ended.records):
        raised = _event(events, "raised")
        if raised is not None:
            yield f"rank {rank} raised {raised['type']}: {raised['text']}"
        elif _event(events, "finished") is None or ended.exit_codes[rank] != 0:
            yield f"rank {rank} did not finish: {_last(ended, rank)}, exit code {ended.exit_codes[rank]}"
        elif sum(event["event"] == "stepped" for event in events) != (job.steps or STEPS):
            yield f"rank {rank} did not make all steps"


def _event(events: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((event for event in events if event["event"] == name), None)


def _last(ended: Ended, rank: int) -> str:
    events = [event for event in ended.records[rank] if event["event"] != "left"]
    return f"{events[-1]['event']} {events[-1].get('step', '')}".strip() if events else "nothing"


def _closing(events: list[dict[str, Any]]) -> float:
    closed = _event(events, "closed")
    return 0.0 if closed is None else round(closed["seconds"], 2)


def _names(text: str, rank: int) -> bool:
    """Return whether an error names a rank."""
    return re.search(rf"ranks? \[?(\d+, )*{rank}\b", text) is not None


def _without_lines(text: str) -> str:
    """Return an error's text without the lines of code that torch adds, with paths of this machine."""
    return text.partition(" At: ")[0].rstrip()
