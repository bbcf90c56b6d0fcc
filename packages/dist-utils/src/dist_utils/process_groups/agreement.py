"""Agreement: ranks compare, through the job's store, what must be alike before they communicate.

Collectives of ranks that are about to do different things hang, abort or mix up data. The store, by which the
ranks have found each other, works even then.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import error_text
from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group
from dist_utils.process_groups.store import Caller, ask_store


class AgreementError(RuntimeError):
    """Ranks that should communicate have different terms, or some of them did not make the call.

    Attributes:
        missing: The global ranks that did not come in time, or stopped waiting.
    """

    missing: tuple[int, ...] = ()


class Claim(NamedTuple):
    """What a rank says before it communicates.

    Attributes:
        title: What it is about to do; may be empty.
        terms: What must be equal on all ranks.
        note: What need not be equal, for the other ranks.
        problem: Why this rank cannot go on, if so.
    """

    title: str
    terms: dict[str, str]
    note: str = ""
    problem: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of messages."""
        return f"{self.title}: " if self.title else ""


class Verdict(NamedTuple):
    """How a comparison ended, the same on all ranks.

    Attributes:
        error: What differs, which ranks did not come, or what is wrong on one of them; else empty.
        missing: The global ranks that did not come in time, or stopped waiting. If there are none, all ranks
            will read this, and the last one may delete it.
        name: A string that is identical on all ranks and that no other comparison has.
        notes: The note of each rank, in rank order.
    """

    error: str = ""
    missing: tuple[int, ...] = ()
    name: str = ""
    notes: tuple[str, ...] = ()


def require_same_terms(
    process_group: GroupLike,
    title: str,
    terms: Mapping[str, object] | None = None,
    *,
    problem: BaseException | None = None,
    timeout: timedelta | None = None,
) -> str:
    """Return if every rank of a group calls with the same title and terms; otherwise raise on every rank.

    Collective, but it uses only the store that the ranks found each other with: it works where a collective
    would hang or abort because the ranks are about to do different things. As with any collective, all ranks
    of a group must make several calls in the same order. An attempt that fails ends on all ranks at once, and
    the next call is a new attempt.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: What the terms belong to, for messages, as in ``"fp16_compress_hook"``; compared too.
        terms: What must be equal, by name. Values are compared by their ``repr``, also inside lists, tuples,
            dictionaries and sets (of exactly these classes), whose order does not count.
        problem: Why this rank cannot go on. It is raised on this rank; the other ranks get its text.
        timeout: How long to wait for the others; the group's own timeout if not given.

    Returns:
        A string that is identical on all ranks and that no other call returns, to name what they make
        next.

    Raises:
        AgreementError: On every rank, with the same message: the terms that differ and which ranks have
            which values; or, after the timeout, which ranks came and which did not. Or on a rank that has
            lost its connection to the store.
        Exception: Whatever the ``repr`` of a term raises, on this rank; the others get an ``AgreementError``.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.
        TypeError, ValueError: ``timeout`` is no ``timedelta``, or is negative.

    Cost:
        About a millisecond with two ranks on one machine: about seven requests to the store per rank, of
        which nothing stays there if all come; the first rank reads what all have written. Nothing at world
        size 1, and nothing with the backend ``"fake"``. Ranks write a digest of their terms, and the terms
        only if digests differ. Torch's store takes at most 8 MiB of those from each rank.

    Example:
        >>> require_same_terms(None, "my hook", {"bits": 8})  # doctest: +SKIP
    """
    group = resolve_group(process_group)
    return compare(group, title, lambda: terms, problem=problem, timeout=timeout).name


def compare(
    group: dist.ProcessGroup,
    title: object,
    terms: Callable[[], Mapping[str, object] | None],
    note: Callable[[], str] = str,
    *,
    problem: BaseException | None = None,
    timeout: timedelta | None = None,
) -> Verdict:
    """Return if all ranks of a group claim the same; otherwise raise on every rank.

    Args:
        group: The ranks.
        title: What this rank is about to do; compared, too.
        terms: Returns what must be equal on all ranks. What it raises is this rank's problem.
        note: Returns a short text for the other ranks, which need not be equal. Likewise.
        problem: Why this rank cannot go on. It is raised here; the other ranks get its text.
        timeout: How long to wait for the others; the group's own timeout if not given.

    Raises:
        AgreementError: As :func:`require_same_terms`.
    """
    claim, seconds = Claim(f"{title}", {}), None
    try:
        claim = Claim(claim.title, _term_texts(terms()), note())
        seconds = None if timeout is None else _seconds(timeout)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error if problem is None else problem
    if group.size() == 1 or dist.get_backend(group) == "fake":
        if problem is not None:
            raise problem
        return Verdict(name=uuid.uuid4().hex, notes=(claim.note,) * group.size())
    if problem is not None:
        claim = claim._replace(problem=error_text(problem)[:_LONGEST_TEXT])
    if seconds is None:
        seconds = torch_compat.group_timeout(group, collective_device(group)).total_seconds()
    try:
        verdict = _Meeting(group, claim, seconds).verdict()
    except dist.DistError as error:
        raise AgreementError(f"{claim.prefix}{error}") from problem
    if problem is not None:
        raise problem
    if verdict.error:
        refusal = AgreementError(f"{claim.prefix if verdict.missing else ''}{verdict.error}")
        refusal.missing = tuple(verdict.missing)
        raise refusal
    return verdict


_LONGEST_TEXT = 100_000
"""Characters of a difference or problem that ranks are told: torch's store takes no value above 8 MiB."""

_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The numbers of the next meetings of each group."""


def _next_prefixes(group: dist.ProcessGroup) -> Iterator[str]:
    """Return the beginnings of the keys of a group's next meetings: of use is the first that is not over.

    A job that torchrun restarts finds the store of its last attempt, if that is the agent's. (Agents of
    several machines may count attempts differently: their ranks do not meet, and the job must be started
    anew.) A new group in one process may find that of an earlier group with its name; and torch may give
    disjoint groups the same name.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent_keeps_store() else "0"
    first = dist.get_process_group_ranks(group)[0]
    numbers = _meetings.setdefault(group, itertools.count())
    beginning = f"dist_utils/{attempt}/{group.group_name}:{first}"
    return (f"{beginning}/{number}" for number in numbers)


def _agent_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_ROUNDS = "digests", "terms"
"""What ranks say in the two rounds of a meeting."""


class _Round:
    """The keys of one round of a meeting."""

    def __init__(self, beginning: str, size: int) -> None:
        self.verdict, self.readers = f"{beginning}/verdict", f"{beginning}/readers"
        self.said = [f"{beginning}/{index}" for index in range(size)]


class _Meeting:
    """One meeting of all ranks in the store, in one or two rounds.

    In a round each rank says something, and one verdict ends it for all. The verdict is written once, by
    whoever is first: the group's first rank when it has read what all have said, or any rank that stops
    waiting. All ranks see the same one, and the last to read it deletes it. Only a meeting to which a rank
    has not come, or which it has left, leaves its keys: they send that rank, if it comes too late, to a new
    meeting, where it waits until its own timeout.

    Values travel in the second round, if digests differ in the first. Both are of one meeting, so a rank that
    drops out between them does not take the others' second round for the first one of its next call.
    """

    def __init__(self, group: dist.ProcessGroup, claim: Claim, seconds: float) -> None:
        self._claim, self._seconds = claim, seconds
        self._prefixes = _next_prefixes(group)  # not the group, which a thread would keep that waits for TCP
        self._ranks = dist.get_process_group_ranks(group)
        self._me = group.rank()
        self._may_keep_store = dist.get_rank() == 0 and not _agent_keeps_store()
        self._caller = Caller()

    def verdict(self) -> Verdict:
        """Say what this rank claims, wait for the other ranks, and return the verdict.

        Raises:
            torch.distributed.DistError: As :func:`dist_utils.process_groups.store.ask_store`.
        """
        verdict = ask_store(self._hold_rounds, self._seconds + _LAST_SECONDS, caller=self._caller)
        if self._may_keep_store and not verdict.missing:
            with contextlib.suppress(dist.DistError):
                ask_store(self._await_readers, _LAST_SECONDS, caller=self._caller)
        return verdict

    def _hold_rounds(self, store: Any) -> Verdict:
        self._store = store
        size = len(self._ranks)
        rounds = ([_Round(f"{prefix}/{name}", size) for name in _ROUNDS] for prefix in self._prefixes)
        first, second = next(pair for pair in rounds if not store.check([pair[0].verdict]))
        digest = hashlib.sha256(json.dumps(self._claim.terms).encode()).hexdigest()
        verdict = self._hold(first, self._claim._replace(terms={"terms": digest}))
        if verdict.error and not verdict.missing:  # all ranks will read it; only now values travel
            self._caller.wait_for(self._seconds + _LAST_SECONDS)
            verdict = self._hold(second, self._claim)
            if verdict.missing:
                store.set(first.verdict, json.dumps(verdict))  # this meeting is over for who comes to it late
        return verdict

    def _hold(self, now: _Round, claim: Claim) -> Verdict:
        self._now, store = now, self._store
        mine = now.said[self._me]
        if not self._caller.gave_up:
            store.set(mine, json.dumps(claim))
        found = self._wait()
        if found and found is not now.said:
            verdict = Verdict(*json.loads(store.get(now.verdict)))
        else:
            claims = [Claim(*json.loads(said)) for said in store.multi_get(found)] if found else []
            stops = self._caller.gave_up or not claims
            verdict = self._decide(now, self._why_over(now) if stops else self._judge(claims))
        if not verdict.missing:  # else the first rank may be about to read what this one said
            store.delete_key(mine)
            if store.add(now.readers, 1) == len(self._ranks):
                store.delete_key(now.verdict)
                store.delete_key(now.readers)
        return verdict

    def _wait(self) -> list[str]:
        """Look until something is found, for as long as ranks may wait, or until the caller gives up."""
        start = time.monotonic()
        while not self._caller.gave_up:
            if found := self._look():
                return found
            waited = time.monotonic() - start
            if waited > self._seconds:
                break
            # No store.wait(): on torch 2.6 it blocks all other threads.
            self._caller.sleep(min(_pause(waited), self._seconds - waited + _SHORTEST_PAUSE))
        return []

    def _await_readers(self, store: Any) -> None:
        """Wait until all have read the verdict: the store may end with this process, and that any moment."""
        start = time.monotonic()
        while not self._caller.gave_up and store.check([self._now.readers]):
            self._caller.sleep(_pause(time.monotonic() - start))

    def _look(self) -> list[str]:
        """Return the keys to read next, if they are there: what all have said, or the verdict."""
        if self._me == 0 and self._store.check(self._now.said):
            return self._now.said
        return [self._now.verdict] if self._store.check([self._now.verdict]) else []

    def _decide(self, now: _Round, verdict: Verdict) -> Verdict:
        """Write a verdict, and return the one that counts."""
        return Verdict(*json.loads(self._store.compare_set(now.verdict, "", json.dumps(verdict))))

    def _judge(self, claims: list[Claim]) -> Verdict:
        notes = tuple(claim.note for claim in claims)
        difference = _first_difference(claims, self._ranks)
        if len(difference) > _LONGEST_TEXT:
            difference = f"{difference[:_LONGEST_TEXT]} ..."
        return Verdict(difference, (), uuid.uuid4().hex, notes)

    def _why_over(self, now: _Round) -> Verdict:
        """Say why this rank waits no longer."""
        if self._caller.gave_up:
            me = self._ranks[self._me]
            return Verdict(f"rank {me} stopped waiting: {self._caller.gave_up}", (me,))
        said = zip(self._ranks, now.said, strict=True)
        # If all have come, the first rank was too slow to read it.
        missing = [rank for rank, key in said if not self._store.check([key])] or self._ranks[:1]
        came = [rank for rank in self._ranks if rank not in missing]
        error = (
            f"ranks {came} came within {self._seconds:g} s, ranks {missing} did not; every rank of the "
            "process group must use it"
        )
        return Verdict(error, tuple(missing))


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 1.0
"""Seconds between two requests to the store while waiting."""


def _pause(waited: float) -> float:
    """Return how long to wait before the next request: a twentieth of the time waited so far."""
    return min(max(waited / 20, _SHORTEST_PAUSE), _LONGEST_PAUSE)


_LAST_SECONDS = 2.0
"""How long the requests after a wait may take, one for each rank: a millisecond for each of 2,000."""


def _first_difference(claims: list[Claim], ranks: list[int]) -> str:
    for rank, claim in zip(ranks, claims, strict=True):
        if claim.problem:
            return f"{claim.prefix}rank {rank} cannot go on: {claim.problem}"
    titles = [claim.title for claim in claims]
    if len(set(titles)) > 1:
        return f"ranks are about to do different things: {_by_value(titles, ranks)}"
    different = []
    for name in dict.fromkeys(name for claim in claims for name in claim.terms):
        values = [claim.terms.get(name, "not there") for claim in claims]
        if len(set(values)) > 1:
            different.append(f"{name} is {_by_value(values, ranks)}")
    return f"{titles[0]} differs between ranks: {'; '.join(different)}" if different else ""


def _by_value(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Say which ranks have which values, as in ``8 on rank 0, 4 on ranks 1, 2``."""
    found: dict[str, list[str]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on rank{'s' if len(having) > 1 else ''} {', '.join(having)}"
        for value, having in found.items()
    )


def _seconds(timeout: object) -> float:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if timeout < timedelta(0):
        raise ValueError(f"timeout must not be negative, got {timeout!r}")
    return timeout.total_seconds()


def _term_texts(terms: Mapping[str, object] | None) -> dict[str, str]:
    """Return terms as they are compared, in the order of their names."""
    return {f"{name}": _term_text(value) for name, value in sorted((terms or {}).items())}


def _term_text(value: object) -> str:
    """Return a term as it is compared; sets and dictionaries have no order."""
    kind = type(value)
    if isinstance(value, (set, frozenset)):
        return f"{kind.__name__} of {', '.join(sorted(map(_term_text, value))) or 'nothing'}"
    if kind is dict:
        items = sorted(f"{_term_text(key)}: {_term_text(one)}" for key, one in value.items())  # type: ignore[attr-defined]
        return f"{{{', '.join(items)}}}"
    if kind in (list, tuple):
        opened, closed = "[]" if kind is list else "()"
        return f"{opened}{', '.join(map(_term_text, value))}{closed}"  # type: ignore[call-overload]
    return repr(value)


_MOST = 1 << 16
"""After so many comparisons all that is known is forgotten, and compared anew."""


class KnownTerms:
    """The terms on which ranks have agreed."""

    def __init__(self) -> None:
        self._known: dict[object, weakref.ref[object] | None] = {}  # with what it is about
        self._compared = 0

    def require(
        self, group: dist.ProcessGroup, title: str, terms: Mapping[str, object], about: object | None
    ) -> None:
        """Return if all ranks have agreed on this title and these terms; compare them if they are new.

        Args:
            group: The ranks.
            title: As for :func:`dist_utils.require_same_terms`.
            terms: Likewise.
            about: An object: what is known about it is forgotten with it, and nothing is known about another.
        """
        try:
            text = f"{title!r} {_term_texts(terms)}"
            key = id(about), hashlib.sha256(text.encode()).digest()
        except Exception:  # noqa: BLE001 - raised below, when the other ranks have heard of it
            key = None
        if key in self._known and _is(self._known[key], about):
            return
        if self._compared >= _MOST:  # on all ranks at once, as all have compared as often
            self._known.clear()
            self._compared = 0
        require_same_terms(group, title, terms)
        self._compared += 1
        self._known[key] = None if about is None else weakref.ref(about)


def _is(kept: weakref.ref[object] | None, about: object | None) -> bool:
    """Return whether what is kept is about this object, and not about an earlier one in its place."""
    return (None if kept is None else kept()) is about
