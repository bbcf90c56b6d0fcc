"""Errors that something long-lived keeps, without the frames that would keep alive whatever they refer to.

A raised error gets frames, and these hold the caller's model, a process group with its connections, or a
future. So a kept error is a copy (:func:`same_error`), and so is each one that is raised from it.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable
from typing import Any

# Python's own attributes: a user's class may hide them behind its own, which raise.
_ARGS, _CAUSE, _CONTEXT, _TRACEBACK = (
    vars(BaseException)[name] for name in ("args", "__cause__", "__context__", "__traceback__")
)
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on


class OriginalTraceback(Exception):  # noqa: N818 - the cause of an error, not an error to catch
    """Where an error was raised first, and its causes, as text: the cause of a copy by :func:`same_error`."""

    def __str__(self) -> str:
        """Return the text in lines of its own."""
        return f"\n{self.args[0]}"


class FirstError:
    """The first error of a worker or of a comparison, which is raised again from then on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def keep(self, error: BaseException) -> Exception:
        """Keep a copy of an error, unless there is one already; return the first."""
        if self.error is None:
            self.error = same_error(error)
        return self.error


def same_error(error: BaseException) -> Exception:
    """Return an error of the same type and text, whose cause is the text of the traceback and of all causes.

    For errors that something long-lived holds, such as a future or a thread: each raise adds frames to an
    error, and what they hold would live as long as the holder. An error that cannot be copied becomes a
    ``RuntimeError`` that shows it. Raises nothing, whatever the error's own methods do.
    """
    copied, cause = _copy(error), _CAUSE.__get__(error)
    if not isinstance(cause, OriginalTraceback):
        cause = OriginalTraceback(_text_or_type(error, lambda: "".join(traceback.format_exception(error))))
    _CAUSE.__set__(copied, cause)
    return copied


def drop_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear and drop the frames of an error and of its causes, which may be part of cycles.

    Args:
        error: The error.
        handled: What the caller was handling when the error was raised, and with it is left as it is.
    """
    seen: set[int] = {id(handled)}
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(_TRACEBACK.__get__(one))
            _TRACEBACK.__set__(one, None)
            errors += [_CAUSE.__get__(one), _CONTEXT.__get__(one)]
            if _GROUP is not None and issubclass(type(one), _GROUP):  # isinstance reads an attribute, too
                errors += _GROUP.exceptions.__get__(one)


def undo_raise(error: BaseException) -> None:
    """Drop what raising an error has added to it: its frames, and the error that was handled there."""
    _TRACEBACK.__set__(error, None)
    _CONTEXT.__set__(error, None)


def error_text(error: BaseException) -> str:
    """Return an error's type and text for a message; the type alone if its own methods fail."""
    return _text_or_type(error, lambda: f"{type(error).__name__}: {error}")


def _copy(error: BaseException) -> Exception:
    try:
        # Its constructor may take other arguments. Those for pickle have the name of a file, too.
        copied = type(error).__new__(type(error), *error.__reduce__()[1])
        _ARGS.__set__(copied, error.args)  # MemoryError's __new__ does not
        copied.__dict__.update(error.__dict__)
        if isinstance(copied, Exception) and str(copied) == str(error):
            return copied
    except BaseException:  # noqa: BLE001, S110 - whoever waits for the error must get one
        pass
    return RuntimeError(_text_or_type(error, lambda: repr(error)))


def _text_or_type(error: BaseException, text: Callable[[], str]) -> str:
    try:
        return text()
    except BaseException:  # noqa: BLE001 - a user's class, whose methods may do anything
        return type(error).__name__
