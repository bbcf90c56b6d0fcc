"""Copies of everything that an optimizer may change in its step."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Copies"]


class Copies:
    """Copies values of any kind; the same value always gives the same copy.

    Args:
        memo: Copies that exist already, by the ``id()`` of the original, as for ``copy.deepcopy``.
        of_tensor: Copies a tensor that is not in ``memo``.
    """

    def __init__(self, memo: dict[int, Any], of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._memo = memo
        self._of_tensor = of_tensor
        self._alive: list[Any] = []  # otherwise an id could be reused

    def of(self, value: Any) -> Any:
        """Return a copy; modules, and what cannot be copied (a lock, a process group), stay themselves."""
        if id(value) not in self._memo:
            self._alive.append(value)
            self._memo[id(value)] = self._new(value)
        return self._memo[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        if isinstance(value, torch.nn.Module):  # may be the whole model
            return value
        if type(value) in (dict, defaultdict, list, deque, tuple, set, frozenset):
            return self._container(value)
        try:
            return self._object(value) if _is_plain(value) else copy.deepcopy(value, self._memo)
        except Exception:  # noqa: BLE001 - each type that cannot be copied raises its own error
            return value

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.of(one) for one in value)
        new = self._memo[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            new.update({key: self.of(one) for key, one in value.items()})
        elif isinstance(value, (list, deque)):
            for index, one in enumerate(value):
                new[index] = self.of(one)
        return new  # also for a set: its members are hashable and stay themselves

    def _object(self, value: Any) -> Any:
        new = copy.copy(value)
        if new is not value:  # a function, for example, is its own copy
            self._memo[id(value)] = new
            vars(new).update({key: self.of(one) for key, one in vars(value).items()})
        return new


def _is_plain(value: Any) -> bool:
    """Whether an object's attributes are its whole state."""
    own = {name for kind in type(value).__mro__ if kind is not object for name in vars(kind)}
    return hasattr(value, "__dict__") and own.isdisjoint({"__reduce__", "__reduce_ex__", "__deepcopy__"})
