"""A failed assertion is in the log with its stack, and raises."""

import logging

import pytest

from dist_utils import p_assert


def test_a_failed_assertion_is_logged_with_its_stack_and_raises(caplog, capsys):
    with pytest.raises(AssertionError, match=r"^the reason$"):
        p_assert([], "the reason")
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (
        "dist_utils.checks",
        logging.ERROR,
        "the reason",
    )
    assert record.funcName == "test_a_failed_assertion_is_logged_with_its_stack_and_raises"
    assert "test_checks.py" in record.stack_info
    assert capsys.readouterr() == ("", "")


def test_it_need_not_raise(caplog):
    p_assert(False, "100 % wrong", raise_assertion_error=False)
    assert caplog.records[0].getMessage() == "100 % wrong"


def test_what_is_true_is_not_logged(caplog):
    p_assert(True, "never")
    assert not caplog.records
