"""Whether an optimizer's step communicates, or may."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError

__all__ = ["may_communicate", "refuse_collective"]

_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional::", "symm_mem::")
_MARKS = ("distributed", "c10d", "symm_mem", "reduce", "gather", "broadcast", "all_to_all", "barrier")
"""Parts of names that code has which communicates."""
_MOST_VALUES = 3000
"""To look at; who names more may communicate."""


def refuse_collective(optimizer: str, operator: str) -> None:
    """Raise if an operator of an optimizer's step is a collective.

    Args:
        optimizer: The name of its class.
        operator: As ``OperatorWatch`` has it.

    Raises:
        UnsupportedOptimizerError: It is, before it communicates.
    """
    if operator.startswith(_COLLECTIVES):
        raise UnsupportedOptimizerError(
            f"the step of {optimizer} communicates ({operator}), which would meet DDP's own collectives when "
            "it is done by buckets. Use OverlapMode.AFTER_REDUCE, which steps when these are over"
        )


def may_communicate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the code of an optimizer's class, or what that code uses, names ``torch.distributed``.

    To watch every operator of every step costs as much as a small step. Where nothing is named, a collective
    is looked for in the first steps only.
    """
    found = [*type(optimizer).__mro__, *optimizer.__dict__.values()]
    for group in optimizer.param_groups:
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
    """Whether a module is, or another value comes from, one of this name or below it."""
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
