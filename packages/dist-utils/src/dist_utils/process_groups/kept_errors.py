"""Errors that are kept: they tell where they were raised, and hold nothing that was in use there."""

from __future__ import annotations

import builtins
import copy
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any

__all__ = ["drop_frames", "same_error"]

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


def drop_frames(error: BaseException) -> None:
    """Let an error, and those that it came from, tell the same lines without the frames they come from.

    A frame holds what it refers to, such as a process group with its connections. To clear it is not enough:
    since Python 3.11 it also holds its function, and one that was made inside of another, as a generator
    expression is (in 3.11 a list comprehension, too), holds variables of that other one.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)  # they may be part of cycles
            BaseException.with_traceback(one, _of_empty_frames(one.__traceback__))
            errors += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, _GROUPS) else ())]


def same_error(error: BaseException) -> Exception:
    """Return an error of the same type and text, with the lines of the same traceback and causes.

    For whoever raises what something long-lived holds, such as a future or a thread: each raise notes frames
    in the error, and what they hold would live as long as that. An error that cannot be copied becomes a
    ``RuntimeError`` that shows it. Raises nothing, whatever the error's own methods do.
    """
    try:
        return _copied_chain(error)
    except BaseException:  # noqa: BLE001 - whoever waits for the error must get one
        return _shown(error)


def _copied_chain(error: BaseException) -> Exception:
    made: dict[int, Exception] = {}  # a chain may lead back
    copied: list[tuple[BaseException, Exception]] = []

    def same(one: BaseException) -> Exception:
        if id(one) not in made:
            other = _copied(one)
            made[id(one)] = _shown(one) if other is None else other
            copied.append((one, made[id(one)].with_traceback(one.__traceback__)))
        return made[id(one)]

    first = same(error)
    for one, other in copied:  # which grows meanwhile
        other.__cause__ = None if one.__cause__ is None else same(one.__cause__)
        other.__context__ = None if one.__context__ is None else same(one.__context__)
        other.__suppress_context__ = one.__suppress_context__
    return first


def _copied(error: BaseException) -> Exception | None:
    made = _made_by(copy.copy, error)
    return _made_by(_without_init, error) if made is None else made


def _made_by(copied: Callable[[BaseException], BaseException], error: BaseException) -> Exception | None:
    try:
        other = copied(error)
        alike = (type(other), str(other)) == (type(error), str(error))
    except BaseException:  # noqa: BLE001 - of a type that is made in a way of its own
        return None
    return other if alike and isinstance(other, Exception) else None


def _without_init(error: BaseException) -> BaseException:
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    return other


def _shown(error: BaseException) -> RuntimeError:
    try:
        return RuntimeError(repr(error))
    except BaseException:  # noqa: BLE001 - of a class whose text cannot be made
        return RuntimeError(type(error).__name__)


def _of_empty_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the same lines, in functions of the same names."""
    shown: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        code = _never_started.__code__.replace(
            co_filename=frame.f_code.co_filename, co_name=frame.f_code.co_name, co_firstlineno=line
        )
        # Of a generator, whose frame does not refer to its caller's.
        shown = TracebackType(shown, FunctionType(code, {})().gi_frame, 0, line)
    return shown


def _never_started() -> Iterator[None]:
    yield
