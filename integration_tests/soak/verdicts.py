"""The outcome of a job: right, wrong or hung, and why."""

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from trainings import TRAININGS

from dist_utils.testing import patience
from soak.faults import STEADY, Job
from soak.jobs import JobEnd
from soak.records import first

GONE_SECONDS, GRACE_SECONDS = 1.0, 5.0
"""Seconds for a rank to raise once a connection is gone, or after the timeout if it cannot know.

A rank that raises between the two is late: if a wait starts just while its connection closes, Gloo does not
end it before the timeout. That happens in plain DDP, too.
"""
CLOSE_SECONDS = 12.0
"""Seconds for closing: a hanging worker is waited for 5 s, and a training may have two."""


class Reference:
    """Each rank's parameters at the beginning and after each step, without a fault."""

    def __init__(self, job: Job, ended: JobEnd) -> None:
        problems = list(_did_not_finish(job, ended))
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


def judge(job: Job, ended: JobEnd, reference: Reference) -> dict[str, Any]:
    """Return the outcome of a job, for a line of the results."""
    dies = job.kind.dies or (job.kind.dies is None and ended.exit_codes[job.victim] != 0)
    survivors = [rank for rank in range(job.world_size) if rank != job.victim or not dies]
    raised = {rank: first(ended.records[rank], "raised") for rank in survivors}
    ends = job.kind.ends
    if ends is None:
        ends = any(raised.values()) or any(ended.exit_codes)
    latest = job.timeout + patience(GRACE_SECONDS)
    soon = patience(GONE_SECONDS) if job.kind.gone and job.step >= STEADY else latest
    problems = [*_wrong_bits(job, ended, reference), *_remains(job, ended, survivors)]
    problems += [] if ends else _did_not_finish(job, ended)
    seconds = []
    for rank in survivors if ends else []:
        if raised[rank] is None and rank not in ended.stacks:
            problems.append(f"rank {rank} went on: {_last(ended, rank)}")
        if raised[rank] is not None and (began := _could_know(job, ended, rank)) is not None:
            seconds.append(round(raised[rank]["time"] - began, 3))
    problems += [f"an error after {took:.1f} s, allowed were {latest}" for took in seconds if took > latest]
    timed_out = [one for one in raised.values() if one and re.search("(?i)timed? ?out|within", one["text"])]
    void = ended.injected is None and not ended.stacks and bool(timed_out)
    if ended.injected is None:
        problems.append("the fault was not injected")
    outcome = {
        **asdict(job),
        "verdict": "hung" if ended.stacks else "void" if void else "wrong" if problems else "right",
        "seconds": seconds,
        "late": sum(took > soon for took in seconds),
        "errors": sorted({one["text"].partition(" At: ")[0][:160] for one in raised.values() if one}),
        "note": ended.note,
    }
    if problems or ended.stacks:
        outcome |= {"problems": problems, "stacks": {str(rank): text for rank, text in ended.stacks.items()}}
    return outcome


def _could_know(job: Job, ended: JobEnd, rank: int) -> float | None:
    """Return when a rank could see the fault, or ``None`` for the rank that raises itself."""
    if rank == job.victim:
        if ended.injected is None or job.kind.place:
            return None
        return ended.injected + job.length  # when it continued
    if job.kind.gone:
        return ended.ended[job.victim]  # its connections end with it at the latest
    return ended.injected


def _wrong_bits(job: Job, ended: JobEnd, reference: Reference) -> Iterator[str]:
    for rank, events in enumerate(ended.records):
        stepped = [event for event in events if event["event"] == "stepped"]
        for event in stepped:
            if event["parameters"] != reference.after(rank, event["step"] + 1):
                yield f"rank {rank}: other bits after step {event['step']}"
                break
        kept = first(events, "kept")
        if kept is None or (job.kind.dies is None and rank == job.victim):
            continue  # in the second case the optimizer may have raised, anywhere in its step
        done = stepped[-1]["step"] + 1 if stepped else 0
        before, after = reference.after(rank, done), reference.after(rank, done + 1)
        parts = zip(kept["parameters"], before, after, strict=True)
        in_part = TRAININGS[job.training].steps_parts and all(now in (old, new) for now, old, new in parts)
        if kept["parameters"] not in (before, after) and not in_part:
            yield f"rank {rank}: parameters that no step gives, after {done} steps"


def _remains(job: Job, ended: JobEnd, survivors: list[int]) -> Iterator[str]:
    if ended.left:
        yield f"processes left behind: {len(ended.left)}"
    yield from (f"checkpoint: {text}" for text in ended.broken)
    # A rank that still waits for a store that does not answer keeps a connection to it.
    loses_store = job.kind.on_hosts or (job.store, job.victim) == ("rank 0", 0)
    allowed = int(loses_store and bool(job.kind.ends) and not job.kind.gone)
    for rank in survivors:
        if (code := ended.exit_codes[rank]) not in {0, None}:
            yield f"rank {rank} ended with exit code {code} after {_last(ended, rank)}"
        if closed := first(ended.records[rank], "closed"):
            if closed["problem"]:
                yield f"rank {rank}: closing raised {closed['problem']}"
            if closed["seconds"] > patience(CLOSE_SECONDS):
                yield f"rank {rank}: closing took {closed['seconds']:.1f} s"
        left = first(ended.records[rank], "left")
        if left and not TRAININGS[job.training].torch_keeps_groups:
            for what in ("sockets", "threads"):
                if (more := left["after"][what] - left["before"][what]) > allowed:
                    yield f"rank {rank}: {more} {what} left open"


def _did_not_finish(job: Job, ended: JobEnd) -> Iterator[str]:
    for rank, events in enumerate(ended.records):
        if raised := first(events, "raised"):
            yield f"rank {rank} raised {raised['type']}: {raised['text']}"
        elif first(events, "finished") is None or ended.exit_codes[rank] != 0:
            yield f"rank {rank} did not finish: {_last(ended, rank)}, exit code {ended.exit_codes[rank]}"
        elif sum(event["event"] == "stepped" for event in events) != job.steps:
            yield f"rank {rank} did not make all steps"


def _last(ended: JobEnd, rank: int) -> str:
    events = [event for event in ended.records[rank] if event["event"] != "left"]
    return f"{events[-1]['event']} {events[-1].get('step', '')}".strip() if events else "nothing"
