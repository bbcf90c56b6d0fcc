"""Options of a state that chooses: checked, and compared with those of other ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_quant_hooks.auto_trial import least_passes
from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.wire_format import is_integer
from dist_utils import resolve_group

__all__ = ["AutoOptions", "checked_candidates", "described_candidates"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""An address in an object's ``repr``, which differs between ranks."""

_DEFAULT_COUNT = 4
"""The number of candidates, if none are given."""


@dataclass(frozen=True)
class AutoOptions:
    """Options of :class:`AutoState`; see there for their meaning."""

    max_error: float | None
    look_again_every: int
    most_passes: int

    def require_fit(self, candidates: Mapping[str, Candidate] | None) -> None:
        """Raise ``TypeError`` or ``ValueError`` if an option has the wrong type or is out of range."""
        if self.max_error is not None:
            given: object = self.max_error
            if not isinstance(given, (int, float)) or isinstance(given, bool):
                raise TypeError(f"max_error must be a number or None, got {given!r}")
            if not 0 <= given < math.inf:
                raise ValueError(f"max_error must be at least 0 and finite, or None, got {given!r}")
        count = _DEFAULT_COUNT if candidates is None else len(candidates)
        for name, number, least in (
            ("look_again_every", self.look_again_every, 0),
            (f"most_passes with {count} candidates", self.most_passes, least_passes(count)),
        ):
            if not is_integer(number):
                raise TypeError(f"{name} must be an integer, got {number!r}")
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")


def checked_candidates(candidates: object) -> dict[str, Candidate]:
    """Return a user's candidates after checking them.

    Raises:
        TypeError: It is not a mapping of names to pairs of a state and a hook.
        ValueError: It is empty.
    """
    if not isinstance(candidates, Mapping):
        raise TypeError(f"candidates must be a mapping of names, got {type(candidates).__name__}")
    if not candidates:
        raise ValueError("candidates must have at least one hook")
    checked = {}
    for name, pair in candidates.items():
        if not isinstance(name, str):
            raise TypeError(f"candidates must have strings as names, got {name!r}")
        if not isinstance(pair, tuple) or len(pair) != len(Candidate._fields) or not callable(pair[1]):
            raise TypeError(f"candidate {name!r} must be a pair of a state and a hook, got {pair!r}")
        checked[name] = Candidate(*cast("tuple[Any, Callable[..., Any]]", pair))
    return checked


def described_candidates(
    candidates: Mapping[str, Candidate], group: dist.ProcessGroup
) -> list[tuple[str, str]]:
    """Describe candidates for the comparison of ranks: names, hooks, kinds of states and their options.

    Raises:
        ValueError: One averages over other ranks than those of ``group``.
    """
    ranks = dist.get_process_group_ranks(group)
    for name, candidate in candidates.items():
        own = _ranks_of(candidate.state)
        if own is not None and own != ranks:
            raise ValueError(f"candidate {name!r} averages over ranks {own}, not over {ranks}")
    return [(name, _described(candidate)) for name, candidate in candidates.items()]


def _ranks_of(state: object) -> list[int] | None:
    """Return the ranks over which a candidate averages, if its state shows them."""
    group = getattr(state, "process_group", state)
    if group is None or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        ranks: list[int] = dist.get_process_group_ranks(resolve_group(group))
        return ranks
    return None


def _described(candidate: Candidate) -> str:
    state, hook = candidate
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    if state is None or isinstance(state, (dist.ProcessGroup, DeviceMesh)):  # its ranks were checked
        return f"{name}()"
    options = _ADDRESS.sub("", str(getattr(state, "options", "")))
    return f"{name}({type(state).__name__} {options})"
