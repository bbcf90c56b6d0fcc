"""A full run of the tests is noted on the page of compatibility, whether it has a row for it or not."""

import pytest

from releasing.compatibility import HEAD, with_row

FIRST, LAST = "| 3.10 | 2.6.0 | not run as a whole | | | |", "| 3.13 | 2.15.0 | 7 | 1 | abc | 2026-01-01 |"
ABOVE = [
    "# Page",
    "",
    "| other | table |",
    "|---|---|",
    "| 3.10 | 2.6.0 |",
    "",
    HEAD,
    "|---|---|---|---|---|---|",
]
BELOW = ["", "The end.", ""]


@pytest.mark.parametrize(
    ("versions", "place", "replaces"),
    [
        ("3.10 | 2.6.0", 0, True),
        ("3.12 | 2.9.1", 1, False),
        ("3.9 | 2.15.0", 1, False),
        ("3.14 | 2.15.0", 2, False),
    ],
)
def test_a_row_replaces_the_one_of_its_versions_or_is_added_in_their_order(versions, place, replaces):
    rows, new = [FIRST, LAST], f"| {versions} | 8 | 2 | def | 2026-02-02 |"
    written = with_row("\n".join([*ABOVE, *rows, *BELOW]), new)
    rows[place : place + replaces] = [new]
    assert written.splitlines() == "\n".join([*ABOVE, *rows, *BELOW]).splitlines()


def test_a_page_without_the_table_is_an_error():
    with pytest.raises(ValueError, match="no table with the line"):
        with_row("# Page\n", FIRST)
