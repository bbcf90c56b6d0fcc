"""Note a full run of the tests in docs/compatibility.md: ``python -m releasing.compatibility REPORT COMMIT``.

Runs in the environment of the tests, whose versions of Python and torch name the row.
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from xml.etree import ElementTree as ET

from packaging.version import Version

from releasing.workspace import ROOT

PAGE = "docs/compatibility.md"
HEAD = "| Python | torch | tests passed | skipped | commit | date |"


def with_row(page: str, row: str) -> str:
    """Return the page with a row of its table: in the place of the one of the same versions, or added.

    Args:
        page: The text of the page.
        row: A line of the table.

    Raises:
        ValueError: The page has no such table.
    """
    before, head, rest = page.partition(f"\n{HEAD}\n")
    if not head:
        raise ValueError(f"{PAGE} has no table with the line {HEAD}")
    rule, *lines = rest.splitlines()
    count = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    table = {_versions(line): line for line in lines[:count]}
    table[_versions(row)] = row
    ordered = [table[versions] for versions in sorted(table)]
    return before + head + "\n".join([rule, *ordered, *lines[count:]]) + "\n"


def _versions(row: str) -> tuple[Version, Version]:
    """Return the versions of torch and Python."""
    python, torch = row.split("|")[1:3]
    return Version(torch), Version(python)


def main() -> None:
    """Write the figures of pytest's report, and the commit that was tested."""
    report, commit = sys.argv[1:]
    counts = ET.parse(report).getroot()[0].attrib  # noqa: S314 - pytest wrote it
    skipped = int(counts["skipped"])
    python = ".".join(platform.python_version_tuple()[:2])
    cells = [python, Version(version("torch")).base_version, int(counts["tests"]) - skipped, skipped]
    row = f"| {' | '.join(map(str, [*cells, commit, time.strftime('%Y-%m-%d')]))} |"
    file = ROOT / PAGE
    file.write_text(with_row(file.read_text(), row))
    print(f"{PAGE}: {row}")


if __name__ == "__main__":
    main()
