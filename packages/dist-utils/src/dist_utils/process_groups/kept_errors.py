"""Errors that are stored: they keep the lines of their tracebacks, but not the objects in use there."""

from __future__ import annotations

import builtins
import copy
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any

__all__ = ["drop_frames", "same_error"]

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


def drop_frames(error: BaseException, *, clear: bool = True) -> None:
    """Drop the frames of an error and of its causes, but keep the lines of their tracebacks.

    Args:
        error: The error.
        clear: Clear the frames, too, as they may be part of cycles. Not where another error is raised with
            them: debuggers show its variables.

    A frame holds what it refers to, such as a process group with its connections. Clearing it is not enough:
    since Python 3.11 it also holds its function, and a function made inside another, such as a generator
    expression (in 3.11 also a list comprehension), holds variables of the outer one.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            if clear:
                traceback.clear_frames(one.__traceback__)
            BaseException.with_traceback(one, _with_empty_frames(one.__traceback__))
            errors += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, _GROUPS) else ())]


def same_error(error: BaseException) -> Exception:
    """Return an error of the same type and text, with the lines of the same traceback and causes.

    For raising an error that something long-lived holds, such as a future or a thread: each raise adds frames
    to the error, and what they hold would live as long as the holder. An error that cannot be copied becomes
    a ``RuntimeError`` that shows it. Raises nothing, whatever the error's own methods do.
    """
    try:
        return _copied_chain(error)
    except BaseException:  # noqa: BLE001 - whoever waits for the error must get one
        return _as_runtime_error(error)


def _copied_chain(error: BaseException) -> Exception:
    made: dict[int, Exception] = {}  # a chain may be a cycle
    copied: list[tuple[BaseException, Exception]] = []

    def same(one: BaseException) -> Exception:
        if id(one) not in made:
            other = _copied(one)
            made[id(one)] = _as_runtime_error(one) if other is None else other
            copied.append((one, made[id(one)].with_traceback(one.__traceback__)))
        return made[id(one)]

    first = same(error)
    for one, other in copied:  # the list grows meanwhile
        other.__cause__ = None if one.__cause__ is None else same(one.__cause__)
        other.__context__ = None if one.__context__ is None else same(one.__context__)
        other.__suppress_context__ = one.__suppress_context__
    return first


def _copied(error: BaseException) -> Exception | None:
    made = _checked_copy(copy.copy, error)
    return _checked_copy(_without_init, error) if made is None else made


def _checked_copy(copied: Callable[[BaseException], BaseException], error: BaseException) -> Exception | None:
    try:
        other = copied(error)
        alike = (type(other), str(other)) == (type(error), str(error))
    except BaseException:  # noqa: BLE001 - its type may have another constructor
        return None
    return other if alike and isinstance(other, Exception) else None


def _without_init(error: BaseException) -> BaseException:
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    return other


def _as_runtime_error(error: BaseException) -> RuntimeError:
    try:
        return RuntimeError(repr(error))
    except BaseException:  # noqa: BLE001 - its repr() may fail
        return RuntimeError(type(error).__name__)


def _with_empty_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the same lines, in functions of the same names."""
    shown: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        code = _never_started.__code__.replace(
            co_filename=frame.f_code.co_filename, co_name=frame.f_code.co_name, co_firstlineno=line
        )
        # A generator's frame does not refer to its caller's.
        shown = TracebackType(shown, FunctionType(code, {})().gi_frame, 0, line)
    return shown


def _never_started() -> Iterator[None]:
    yield
