"""Stored errors show where they were raised, and keep nothing alive."""

import builtins
import sys
import traceback
import weakref

import pytest

from dist_utils.process_groups import drop_frames, same_error


class _Held:
    pass


def _raise(held):
    raise ValueError(type(held).__name__)


def _in_comprehension(held):
    return [_raise(held) for _ in range(1)]


def _in_generator(held):
    return list(_raise(held) for _ in range(1))  # noqa: C400 - that is the point


def _in_inner_function(held):
    def inner():
        _raise(held)

    inner()


def _looked_at(held):
    sys._getframe().f_locals  # noqa: B018 - a frame may keep what it has shown
    _raise(held)


def _keeps_its_error(held):
    try:
        _in_inner_function(held)
    except ValueError as error:
        kept = error
        raise kept  # noqa: B904 - it is the same error


def _from_another(held):
    try:
        _in_inner_function(held)
    except ValueError as error:
        raise RuntimeError("another one") from error


def _while_handling_another(held):
    try:
        _in_inner_function(held)
    except ValueError:
        raise RuntimeError("another one")  # noqa: B904 - that is the point


def _in_group(held):
    try:
        _in_inner_function(held)
    except ValueError as error:
        raise builtins.ExceptionGroup("several", [error]) from None


_WAYS = [
    _in_comprehension,
    _in_generator,
    _in_inner_function,
    _looked_at,
    _keeps_its_error,
    _from_another,
    _while_handling_another,
    *([_in_group] if hasattr(builtins, "ExceptionGroup") else []),
]


def _raised(way):
    held = [_Held()]
    watched = weakref.ref(held[0])
    try:
        way(held.pop())
    except Exception as error:  # noqa: BLE001 - of any kind
        return error, watched
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("way", _WAYS)
def test_an_error_without_frames_holds_nothing(way):
    error, watched = _raised(way)
    assert watched() is not None
    drop_frames(error)
    assert watched() is None, "at once, without the garbage collector"


class _OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def test_a_copied_error_holds_nothing_and_shows_where_it_was_raised():
    original, watched = _raised(_from_another)
    original.note = "kept"
    copied = same_error(original)
    assert (type(copied), str(copied), copied.note) == (RuntimeError, "another one", "kept")
    again = same_error(copied)
    assert (type(again.__cause__), str(again.__cause__)) == (ValueError, "_Held")
    drop_frames(original)
    assert watched() is None
    shown = "".join(traceback.format_exception(again))
    assert "raise ValueError" in shown
    assert "RuntimeError: another one" in shown
    assert str(same_error(_OddError(1, 2))) == "1 and 2"
    assert str(same_error(KeyboardInterrupt())) == "KeyboardInterrupt()"


class _SilentError(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class _ExitsError(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class _KeptError(Exception):
    """Has its own constructor, and can still be copied."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


def test_no_method_of_an_error_gets_in_the_way():
    assert str(same_error(_ExitsError("a text"))) == "a text"
    again = same_error(_KeptError(code=7))
    assert (type(again), str(again), again.code) == (_KeptError, "code 7", 7)
    assert str(same_error(_SilentError())) == "_SilentError"


def test_long_and_circular_chains_of_causes_are_copied_in_part():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    copied = same_error(first)
    assert (str(copied), str(copied.__cause__)) == ("first", "second")
    long = last = KeyError(0)
    for number in range(1, 5000):
        last.__cause__ = KeyError(number)
        last = last.__cause__
    assert str(same_error(long).__cause__) == "1"
