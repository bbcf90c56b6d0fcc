"""Detect whether an optimizer's step communicates, or may do so."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError
from dist_utils.torch_compat import private

__all__ = ["CollectiveWatch", "operator_watch", "refusing_collectives"]

_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional::", "symm_mem::")
_WATCHED_STEPS = 3
_MARKS = ("distributed", "c10d", "symm_mem", "reduce", "gather", "broadcast", "all_to_all", "barrier")
"""Parts of names that occur in code that communicates."""
_MOST_VALUES = 3000
"""At most this many values are inspected; code that names more is assumed to communicate."""


class CollectiveWatch:
    """Looks for collectives in steps: in the first steps of every part or, if the code names any, in all.

    Args:
        stepper: An optimizer, or another object that steps.
    """

    def __init__(self, stepper: object) -> None:
        self._name = type(stepper).__name__
        self._always = may_communicate(stepper)
        self._steps: Counter[int] = Counter()

    def around(self, first: torch.Tensor) -> AbstractContextManager[object]:
        """Return a context for the step of the part that begins with this parameter.

        Raises:
            UnsupportedOptimizerError: In the step, before a collective runs.
        """
        self._steps[id(first)] += 1
        watched = self._always or self._steps[id(first)] <= _WATCHED_STEPS
        return refusing_collectives(self._name) if watched else contextlib.nullcontext()


def refusing_collectives(optimizer: str) -> AbstractContextManager[object]:
    """Return a context for the step of an optimizer that must not communicate.

    Args:
        optimizer: The name of its class.

    Raises:
        UnsupportedOptimizerError: In the step, before a collective runs.
    """
    return operator_watch(partial(_refuse_collective, optimizer))


def _refuse_collective(optimizer: str, operator: str) -> None:
    if operator.startswith(_COLLECTIVES):
        raise UnsupportedOptimizerError(
            f"the step of {optimizer} communicates ({operator}), which would meet DDP's own collectives when "
            "it is done by buckets. Use OverlapMode.AFTER_REDUCE, which steps when these are over"
        )


def operator_watch(notice: Callable[[str], None]) -> AbstractContextManager[object]:
    """Return a context that calls a function with the name of every operator before this thread runs it.

    The only way to see them all, C++ ones too, has no public name up to torch 2.15.

    Args:
        notice: Gets names such as ``"c10d::allreduce_"``; its errors are raised where the operator is used.
    """
    watch: AbstractContextManager[object] = _watch_class()(notice)
    return watch


@functools.cache
def _watch_class() -> Any:
    purpose = "noticing collectives in an optimizer's step"
    base: Any = private("torch.utils._python_dispatch", "TorchDispatchMode", purpose)

    class OperatorWatch(base):  # type: ignore[misc] # torch's class
        """The context."""

        def __init__(self, notice: Callable[[str], None]) -> None:
            super().__init__()
            self._notice = notice

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Called by torch instead of the operator."""
            del types
            self._notice(func.name())
            return func(*args, **(kwargs or {}))

    return OperatorWatch


def may_communicate(stepper: object) -> bool:
    """Whether the code of an object's class, or what that code uses, names ``torch.distributed``.

    Watching every operator of every step costs as much as a small step. Where nothing is named, only the
    first steps are watched for collectives.
    """
    found = [*type(stepper).__mro__, *getattr(stepper, "__dict__", {}).values()]
    for group in getattr(stepper, "param_groups", ()):
        found += group.values()
    seen: set[int] = set()
    while found and len(seen) < _MOST_VALUES:
        value = found.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_of(value, "torch.distributed"):
            return True
        for code, used in _used_by(value):
            if any(mark in name for name in code.co_names for mark in _MARKS):
                return True
            found += used
    return bool(found)


def _is_of(value: Any, module: str) -> bool:
    """Whether a value is, or comes from, the module of this name or one of its submodules."""
    name = value.__name__ if isinstance(value, ModuleType) else _home(value)
    return name == module or name.startswith(f"{module}.")


def _home(value: Any) -> str:
    home = getattr(value if isinstance(value, (type, FunctionType)) else type(value), "__module__", "")
    return home if isinstance(home, str) else ""


def _used_by(value: Any) -> Iterator[tuple[CodeType, list[Any]]]:
    """Yield the code of a function, or of a class's methods, and the values that it names."""
    if _is_of(value, "torch") or _is_of(value, "builtins"):
        return
    kind = value if isinstance(value, type) else type(value)
    functions: list[Any] = (
        [value] if isinstance(value, (FunctionType, MethodType)) else list(vars(kind).values())
    )
    for function in functions:
        inner: Callable[..., Any] = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(inner, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        names = getattr(inner, "__globals__", {})
        cells = getattr(inner, "__closure__", None) or ()
        for part in _codes(code):
            used = [names[name] for name in part.co_names if name in names]
            used += [cell.cell_contents for cell in cells]
            modules = [one for one in used if isinstance(one, ModuleType)]
            used += [getattr(module, name, None) for module in modules for name in part.co_names]
            yield part, used


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
