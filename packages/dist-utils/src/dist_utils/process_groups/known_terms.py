"""What ranks have agreed on, remembered: each new thing is compared once, and a refusal stays."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist

from dist_utils.process_groups.agreement import require_same_terms, term_texts
from dist_utils.process_groups.errors import FirstError

_MOST = 1 << 16
"""After so many comparisons all that is known is forgotten, and compared anew."""

_PLAIN = {str, int, bool, type(None), torch.dtype}
"""Types of terms that are told apart by their values as well as by what is compared, and faster."""


class KnownTerms:
    """The terms on which ranks have agreed.

    After a refusal ranks no longer know which of them has come how far: another comparison could take a late
    rank for one that is ahead. So the refusal is raised again, until all ranks make a new object.

    Args:
        failure: Gets the refusal. Once it has an error, nothing is compared any more.
    """

    def __init__(self, failure: FirstError) -> None:
        self._failure = failure
        self._known: dict[object, weakref.ref[object] | None] = {}  # with what it is about
        self._compared = 0

    def require(
        self, group: dist.ProcessGroup, title: str, terms: Mapping[str, object], about: object | None = None
    ) -> None:
        """Return if all ranks have agreed on this title and these terms; compare them if they are new.

        Args:
            group: The ranks.
            title: As for :func:`dist_utils.require_same_terms`.
            terms: Likewise.
            about: An object: what is known about it is forgotten with it, and nothing is known about another.
        """
        if group.size() == 1:
            return
        self._failure.raise_again()
        try:
            key = id(about), _key(title, terms)
        except Exception:  # noqa: BLE001 - raised below, when the other ranks have heard of it
            key = None
        if key in self._known and _is(self._known[key], about):
            return
        if self._compared >= _MOST:  # on all ranks at once, as all have compared as often
            self._known.clear()
            self._compared = 0
        try:
            require_same_terms(group, title, terms)
        except BaseException as error:  # an interrupt, too: the other ranks are told of it
            self._failure.keep(error)
            raise
        self._compared += 1
        self._known[key] = None if about is None else weakref.ref(about)


def _is(kept: weakref.ref[object] | None, about: object | None) -> bool:
    """Return whether what is kept is about this object, and not about an earlier one in its place."""
    return (None if kept is None else kept()) is about


def _key(title: str, terms: Mapping[str, object]) -> object:
    """Return what stands for a title and terms here, whatever their order: it may be another on each rank."""
    kinds = [*map(type, terms.values())]
    if _PLAIN.issuperset(kinds):
        return title, frozenset(zip(terms, kinds, terms.values(), strict=True))
    return hashlib.sha256(f"{title!r} {term_texts(terms)}".encode()).digest()
