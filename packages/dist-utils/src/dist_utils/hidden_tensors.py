"""The search for tensors inside objects that are not walked as containers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import (
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from dist_utils.container_kinds import slots_of

__all__ = ["hidden_tensor"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)


def hidden_tensor(obj: object) -> str | None:
    """Return the path from ``obj`` to a tensor that it holds, or ``None``.

    Looks at attributes, slots and at whatever else the garbage collector says an object refers to; of a
    function at its defaults and what its closure captured, not at its globals.
    """
    if isinstance(obj, _PLAIN):
        return None
    seen = {id(obj)}
    alive = [obj]  # so that no id is used again
    waiting = [("", obj)]
    while waiting:
        path, holder = waiting.pop()
        for name, value in _held(holder):
            if isinstance(value, torch.Tensor):
                return path + name
            if not isinstance(value, _PLAIN) and id(value) not in seen:
                seen.add(id(value))
                alive.append(value)
                waiting.append((path + name, value))
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
        yield " locals", frame and frame.f_locals
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in dict.items(obj))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    else:
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())
        for name, member in slots_of(type(obj)).items():
            if hasattr(obj, name):
                yield f".{name}", member.__get__(obj)
        # Also what C code holds, as in iterators and partial functions.
        yield from ((f" -> {type(value).__name__}", value) for value in gc.get_referents(obj))
