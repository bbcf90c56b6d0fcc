"""Stored errors show where they were raised, and keep nothing alive."""

import dataclasses
import traceback
import weakref

import pytest

from dist_utils.process_groups import drop_frames, same_error


class _Held:
    pass


def _raise(held):
    raise ValueError(type(held).__name__)


def _in_generator(held):
    return list(_raise(held) for _ in range(1))  # noqa: C400 - that is the point


def _from_another(held):
    try:
        _raise(held)
    except ValueError as error:
        raise RuntimeError("another one") from error


def _raised(way):
    held = [_Held()]
    watched = weakref.ref(held[0])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        way(held.pop())
    error = caught.value
    del caught
    return error, watched


@pytest.mark.parametrize("way", [_in_generator, _from_another])
def test_an_error_without_frames_holds_nothing(way):
    error, watched = _raised(way)
    assert watched() is not None
    drop_frames(error)
    assert watched() is None, "at once, without the garbage collector"


def test_what_the_caller_was_handling_keeps_its_frames():
    (error, watched), (handled, kept) = _raised(_from_another), _raised(_in_generator)
    error.__context__ = handled
    drop_frames(error, handled)
    assert watched() is None
    assert kept() is not None


def test_a_copied_error_holds_nothing_and_shows_where_it_was_raised():
    original, watched = _raised(_from_another)
    original.note = "kept"
    copied = same_error(original)
    assert (type(copied), str(copied), copied.note) == (RuntimeError, "another one", "kept")
    again = same_error(copied)
    drop_frames(original)
    assert watched() is None
    shown = "".join(traceback.format_exception(again))
    assert "raise ValueError" in shown
    assert "raise RuntimeError" in shown


class _OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class _SilentError(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class _FrozenError(Exception):
    """Refuses every new attribute, its cause included."""

    where: str


@pytest.mark.parametrize("original", [MemoryError("full"), FileNotFoundError(2, "none", "file")], ids=repr)
def test_errors_that_their_arguments_do_not_make_are_copied_too(original):
    copied = same_error(original)
    assert (type(copied), str(copied)) == (type(original), str(original))


def test_an_error_that_takes_no_attribute_is_copied_too():
    copied = same_error(_FrozenError("here"))
    drop_frames(copied)
    assert copied == _FrozenError("here")
    assert "_FrozenError: here" in str(copied.__cause__)


def test_no_method_of_an_error_gets_in_the_way():
    assert str(same_error(_OddError(1, 2))) == "1 and 2"
    assert str(same_error(KeyboardInterrupt())) == "KeyboardInterrupt()"
    assert str(same_error(_SilentError())) == "_SilentError"
