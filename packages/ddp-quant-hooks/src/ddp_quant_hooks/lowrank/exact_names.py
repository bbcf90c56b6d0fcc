"""What a user wants to be averaged without compression: parameters and keys, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ddp_quant_hooks.feedback.names import ModelNames
from ddp_quant_hooks.feedback.residuals import Key, Owner


class ExactNames:
    """Patterns of names, as for files: ``*`` stands for any characters.

    Args:
        patterns: Of names of parameters, without the prefixes of wrappers, and of keys.
        names: The parameters of the model.

    Raises:
        TypeError: ``patterns`` is not a sequence of strings.
    """

    def __init__(self, patterns: Any, names: ModelNames) -> None:
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not (is_sequence and all(isinstance(each, str) for each in patterns)):
            raise TypeError(f"exact must be a sequence of patterns of names, got {patterns!r}")
        self.patterns: tuple[str, ...] = tuple(patterns)
        """As given."""
        self._names = names

    def require_matches(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` if a pattern fits none of a model's names: it may be misspelled."""
        known = [*names]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(
                    f"exact has {pattern!r}, and no parameter of the model has such a name; there are "
                    f"{', '.join(known)[:200]!r}"
                )

    def includes(self, owner: Owner) -> bool:
        """Return whether an owner's values are averaged without compression.

        Raises:
            ValueError: It is a parameter without a name: the state is not bound to its model.
        """
        if not self.patterns:
            return False
        name = owner.name if isinstance(owner, Key) else self._names.find(owner)
        if name is None:
            raise ValueError(
                f"exact={list(self.patterns)} needs the names of parameters: bind the state to its model by "
                "bind(ddp) first"
            )
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)
