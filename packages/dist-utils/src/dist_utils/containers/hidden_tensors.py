"""The search for tensors inside objects that are not walked as containers."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from reprlib import repr as short_repr
from types import (
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from dist_utils.containers.attribute_objects import named_attributes, slot_places

__all__ = ["HiddenTensors"]

# Loggers lead to everything that any handler holds.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, logging.Logger)


class HiddenTensors:
    """A search that visits no object twice."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # holds the objects, so that no id is reused

    def path_in(self, obj: object) -> str | None:
        """Return the path from ``obj`` to a tensor that it holds, ``""`` if it is one, or ``None``.

        Follows attributes, slots and whatever else the garbage collector says an object refers to; for a
        function, its defaults and its closure, but not its globals.
        """
        waiting = [("", obj)]
        while waiting:
            path, holder = waiting.pop()
            if isinstance(holder, torch.Tensor):
                return path
            if isinstance(holder, _PLAIN) or id(holder) in self._seen:
                continue
            self._seen[id(holder)] = holder
            # The last is looked at first.
            waiting += [(path + name, value) for name, value in reversed(list(_held(holder)))]
        return None


def _held(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, FunctionType):
        yield ".__defaults__", obj.__defaults__
        yield ".__kwdefaults__", obj.__kwdefaults__
        yield ".__closure__", obj.__closure__
    elif isinstance(obj, (GeneratorType, CoroutineType)):
        frame = obj.gi_frame if isinstance(obj, GeneratorType) else obj.cr_frame
        yield " locals", frame and dict(frame.f_locals)  # not a dict from Python 3.13 on
    elif isinstance(obj, dict):
        yield from ((f"[{short_repr(key)}]", value) for key, value in dict.items(obj))
        yield from ((f" key {short_repr(key)}", key) for key in dict.keys(obj))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif _is_object_array(obj):
        yield from ((f".flat[{index}]", value) for index, value in enumerate(obj.flat))
    else:
        yield from ((f".{name}", value) for name, value in named_attributes(obj, slot_places(type(obj))))
        # Also what C code holds, for example in iterators and partial functions.
        yield from ((f" -> {type(value).__name__}", value) for value in gc.get_referents(obj))


def _is_object_array(obj: Any) -> bool:
    """Return whether ``obj`` is a NumPy array of objects, which hides them from the garbage collector."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray) and obj.dtype == object
