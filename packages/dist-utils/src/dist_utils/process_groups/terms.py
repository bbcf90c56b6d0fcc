"""Check through the store, before anything else is sent, that all ranks call with the same terms."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.failed_waits import earlier_failed_wait, note_failed_wait
from dist_utils.process_groups.groups import GroupLike, resolve_group, timeout_seconds
from dist_utils.process_groups.store_requests import StoreRequests

__all__ = ["AgreementError", "require_same_terms"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 1.0
"""Seconds between two requests to the store while waiting: a twentieth of the time waited so far, within
these bounds."""

_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The first round of a group that this rank does not know to be over."""
_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()
"""Only one thread of a rank uses a group at a time."""
_one_lock_each = threading.Lock()


class AgreementError(RuntimeError):
    """Ranks that should communicate have different terms, or some of them did not make the call."""


def require_same_terms(
    process_group: GroupLike,
    title: str,
    terms: Mapping[str, object] | None = None,
    *,
    problem: Exception | None = None,
    timeout: timedelta | None = None,
) -> str:
    """Return if every rank of a group calls with the same title and terms; otherwise raise on every rank.

    Collective, but it uses only the store that the ranks found each other with: it works where a collective
    would hang or abort because the ranks are about to do different things. As with any collective, all ranks
    of a group must make several calls in the same order. An attempt that fails ends on all ranks at once, and
    the next call is a new attempt. Only a backward pass in which a rank did not come does not wait for it a
    second time, in any group that has it.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: What the terms belong to, for messages, as in ``"fp16_compress_hook"``; compared too.
        terms: What must be equal, by name. Values are compared by their ``repr``, sets by those of their
            elements.
        problem: Why this rank cannot go on. It is raised on this rank; the other ranks get its text.
        timeout: How long to wait for the others; the group's own timeout if not given.

    Returns:
        A string that is identical on all ranks and that no other call returns, to name what they make
        next.

    Raises:
        AgreementError: On every rank, with the same message: the terms that differ and which ranks have
            which values; or, after the timeout, which ranks came and which did not. A rank that the store
            does not answer within the timeout raises an error that says so.
        TypeError: An argument is of a wrong type, on this rank; the others get an ``AgreementError``.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A handful of requests to the store per rank; the first rank reads what all have written. Nothing at
        world size 1, and nothing with the backend ``"fake"``.

    Example:
        >>> require_same_terms(None, "my hook", {"bits": 8})  # doctest: +SKIP
    """
    group = resolve_group(process_group)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        if problem is not None:
            raise problem
        return uuid.uuid4().hex
    texts: dict[str, str] = {}
    try:
        texts = _texts(title, terms, timeout)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem, title, timeout = problem or error, str(type(title)), None
    claim = _Claim(title, texts, "" if problem is None else error_text(problem))
    with _lock_of(group):
        me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        if earlier := earlier_failed_wait(ranks):
            raise AgreementError(f"{claim.title}: {earlier}") from problem
        seconds = timeout.total_seconds() if timeout else timeout_seconds(group)
        try:
            with StoreRequests(torch_compat.default_store(), seconds) as requests:
                verdict = _Round.first_open(group, requests).settle(claim, seconds)
        except TimeoutError as error:
            note_failed_wait(range(dist.get_world_size()), f"{claim.title}: {error}")  # nobody can be reached
            raise AgreementError(f"{claim.title}: {error}") from problem
        if verdict.missing:  # for a rank that came too late, the others are gone
            note_failed_wait({*ranks} - {me} if me in verdict.missing else verdict.missing, verdict.error)
    if problem is not None:
        raise problem
    if verdict.error:
        raise AgreementError(verdict.error)
    return verdict.name


def _texts(title: str, terms: Mapping[str, object] | None, timeout: timedelta | None) -> dict[str, str]:
    """Return terms as they are compared; raises if the arguments are wrong."""
    if not isinstance(title, str):
        raise TypeError(f"title must be a string, got {type(title).__name__}")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, got {type(timeout).__name__}")
    return {str(name): _text(value) for name, value in (terms or {}).items()}


def _text(value: object) -> str:
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return f"{type(value).__name__} of {', '.join(sorted(map(repr, value))) or 'nothing'}"
    return repr(value)


def error_text(problem: object) -> str:
    """Return an error as text for other ranks."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:  # noqa: BLE001 - its str() may fail in any way
        return type(problem).__name__


class _Claim(NamedTuple):
    """What a rank submits to a round."""

    title: str
    terms: dict[str, str]
    problem: str


class _Verdict(NamedTuple):
    """The result of a round: an error, perhaps that ranks did not come, or a name that no other round has."""

    error: str
    name: str
    missing: Sequence[int] = ()


class _Round:
    """One attempt to agree, as keys in the store: a claim of each rank, and one verdict.

    The verdict is written once, by whoever is first: the group's first rank when it has read all claims, or
    any rank that stops waiting. Whatever happens, all ranks see the same one, and then the round is over.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, requests: StoreRequests) -> None:
        self._group, self._number, self._ask = group, number, requests.ask
        self._ranks = dist.get_process_group_ranks(group)
        # A restarted job may find the store of the last attempt. And torch may give disjoint groups the same
        # name.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"dist_utils/terms/{attempt}/{group.group_name}:{self._ranks[0]}/{number}"

    @classmethod
    def first_open(cls, group: dist.ProcessGroup, requests: StoreRequests) -> _Round:
        """Return the first round that is not over. Others failed, or belong to an earlier group."""
        number = _rounds.get(group, 0)
        while (found := cls(group, number, requests)).is_over():
            number += 1
        _rounds[group] = number
        return found

    def is_over(self) -> bool:
        """Return whether there is a verdict."""
        return self._has([self._verdict_key])

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda store: store.check(keys)))

    @property
    def _verdict_key(self) -> str:
        return f"{self._prefix}/verdict"

    def _claim_key(self, index: int) -> str:
        return f"{self._prefix}/{index}"

    def settle(self, claim: _Claim, seconds: float) -> _Verdict:
        """Submit a claim, wait until the round is over, and return the verdict."""
        me, everyone = self._claim_key(self._group.rank()), [*map(self._claim_key, range(len(self._ranks)))]
        judges = me == everyone[0]
        self._ask(lambda store: store.set(me, json.dumps(claim)))
        try:
            if not _wait_until(lambda: self.is_over() or (judges and self._has(everyone)), seconds):
                self._decide(*self._who_came(claim.title, everyone, seconds))
            elif judges and not self.is_over():
                claims = [_claim_from(text) for text in self._ask(lambda store: store.multi_get(everyone))]
                self._decide(_first_difference(claims, self._ranks))
        except (dist.DistError, TimeoutError):  # the store is gone: nobody can be told
            raise
        except BaseException as error:
            self._decide(f"{claim.title}: rank {dist.get_rank()} stopped waiting: {error!r}")
            raise
        _rounds[self._group] = self._number + 1
        return _verdict_from(self._ask(lambda store: store.get(self._verdict_key)))

    def _decide(self, error: str, missing: Sequence[int] = ()) -> None:
        verdict = json.dumps(_Verdict(error, uuid.uuid4().hex, missing))
        self._ask(lambda store: store.compare_set(self._verdict_key, "", verdict))

    def _who_came(self, title: str, everyone: list[str], seconds: float) -> tuple[str, list[int]]:
        came = [rank for rank, key in zip(self._ranks, everyone, strict=True) if self._has([key])]
        missing = [rank for rank in self._ranks if rank not in came]
        error = (
            f"{title}: ranks {came} came within {seconds:g} s, ranks {missing} did not; every rank of the "
            "process group must use it"
        )
        return error, missing


def _claim_from(text: bytes) -> _Claim:
    """Return a claim read from the store, to which any process of the job may write."""
    try:
        title, terms, problem = json.loads(text)
        return _Claim(str(title), {name: str(value) for name, value in terms.items()}, str(problem))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _Claim("agreement", {}, f"its claim in the store is invalid: {text[:100]!r}")


def _verdict_from(text: bytes) -> _Verdict:
    try:
        error, name, missing = json.loads(text)
        if not (isinstance(error, str) and isinstance(name, str) and isinstance(missing, list)):
            raise TypeError("a verdict is two strings and a list")  # noqa: TRY301 - as any other defect
    except (ValueError, TypeError, RecursionError):
        return _Verdict(f"the verdict in the store is invalid: {text[:100]!r}", "")
    return _Verdict(error, name, [rank for rank in missing if isinstance(rank, int)])


def _lock_of(group: dist.ProcessGroup) -> threading.RLock:
    with _one_lock_each:
        return _locks.setdefault(group, threading.RLock())


def _wait_until(done: Callable[[], bool], seconds: float) -> bool:
    start = time.monotonic()
    never = threading.Event()
    while not done():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        # No store.wait(): it blocks the store for every other thread, and logs when it times out.
        never.wait(min(max(waited / 20, _SHORTEST_PAUSE), _LONGEST_PAUSE, seconds - waited + _SHORTEST_PAUSE))
    return True


def _first_difference(claims: list[_Claim], ranks: list[int]) -> str:
    for rank, claim in zip(ranks, claims, strict=True):
        if claim.problem:
            return f"{claim.title}: rank {rank} cannot go on: {claim.problem}"
    titles = _by_value([claim.title for claim in claims], ranks)
    if len(titles) > 1:
        return f"ranks are about to do different things: {_listed(titles)}"
    differences = []
    for name in dict.fromkeys(name for claim in claims for name in claim.terms):
        values = _by_value([claim.terms.get(name, "not there") for claim in claims], ranks)
        if len(values) > 1:
            differences.append(f"{name} is {_listed(values)}")
    return f"{claims[0].title} differs between ranks: {'; '.join(differences)}" if differences else ""


def _by_value(values: list[str], ranks: list[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _listed(found: Mapping[str, list[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in found.items()
    )
