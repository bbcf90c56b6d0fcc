"""What ranks have agreed on, remembered: each new thing is compared once."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping

import torch.distributed as dist

from dist_utils.process_groups.agreement import require_same_terms, term_texts

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
            text = f"{title!r} {term_texts(terms)}"
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
