"""Stored errors show where they were raised, and keep nothing alive."""

import builtins
import sys
import traceback
import weakref

import pytest

from dist_utils.process_groups.kept_errors import drop_frames, same_error


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


def _printed(error):
    """Return the printed form of an error, without the marks below its lines."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return [line for line in lines if not set(line.strip(" |")) <= set("^~")]


@pytest.mark.parametrize("way", _WAYS)
def test_an_error_without_frames_tells_the_same_lines_and_holds_nothing(way):
    error, watched = _raised(way)
    assert watched() is not None
    before = _printed(error)
    drop_frames(error)
    assert watched() is None, "at once, without the garbage collector"
    assert _printed(error) == before
    assert any("raise ValueError" in line for line in before)


def test_it_can_be_raised_again():
    error, _ = _raised(_in_inner_function)
    drop_frames(error)
    with pytest.raises(ValueError, match="_Held") as caught:
        raise error
    assert [frame.name for frame in caught.traceback][-2:] == ["inner", "_raise"]


class _OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def test_a_copied_error_shares_no_frames_and_keeps_its_text():
    def fail():
        held.append(None)
        raise KeyError("missing")

    held = []
    try:
        fail()
    except KeyError as error:
        original = error
    original.note = "kept"
    other = same_error(original)
    assert other is not original
    assert (type(other), str(other), other.note) == (KeyError, "'missing'", "kept")
    lines = traceback.format_tb(original.__traceback__)
    assert traceback.format_tb(other.__traceback__) == lines
    with pytest.raises(KeyError):
        raise other
    assert traceback.format_tb(original.__traceback__) == lines
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


def test_copies_of_long_and_circular_chains():
    assert str(same_error(_SilentError())) == "_SilentError"
    first = last = ValueError(0)
    for number in range(1, 5000):
        last.__cause__ = ValueError(number)
        last = last.__cause__
    last.__context__ = first
    other = same_error(first)
    for _ in range(4999):
        other = other.__cause__
    assert (str(other), str(other.__context__)) == ("4999", "0")
