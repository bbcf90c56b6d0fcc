"""A failed assertion is in the log with its stack, and raises."""

import logging

import pytest

from dist_utils import p_assert


def test_a_failed_assertion_is_logged_with_its_stack_and_raises_if_wanted(caplog, capsys):
    p_assert(True, "never")
    p_assert(False, "100 % wrong", raise_assertion_error=False)
    with pytest.raises(AssertionError, match=r"^the reason$"):
        p_assert([], "the reason")
    assert [record.getMessage() for record in caplog.records] == ["100 % wrong", "the reason"]
    record = caplog.records[1]
    assert (record.name, record.levelno) == ("dist_utils.checks", logging.ERROR)
    assert "test_checks.py" in record.stack_info
    assert "test_checks.py" in record.pathname
    assert capsys.readouterr() == ("", "")
