"""Write docs/compatibility.md from the result files: ``python -m releasing.compatibility [--check]``.

The tables come from benchmarks/results/compatibility/, the rest from compatibility.md.in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from releasing import recorded
from releasing.siblings import EXCLUDED, OK
from releasing.workspace import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected")
FRAME = Path(__file__).with_name("compatibility.md.in")

Row = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def runs(results: Sequence[Row]) -> str:
    """Return the table of sessions that were run, one row for each torch and Python."""
    if not results:
        return "No run was recorded."
    ordered = sorted(results, key=lambda row: (row["session"], Version(row["torch"]), Version(row["python"])))
    return table(
        ["session", "torch", "Python", "outcome", "tests", "selected", "when", "commit"],
        [
            [
                row["session"],
                row["torch"],
                row["python"],
                "green" if row["exit_status"] == 0 else "**red**",
                ", ".join(f"{row[key]} {key}" for key in COUNTED if key in row),
                row.get("selected", "default"),
                row["date"],
                row["commit"],
            ]
            for row in ordered
        ],
    )


def pairs(siblings: Row) -> str:
    """Return the table of pairs that work or should have: a line for each version of a package."""
    rows = []
    for row in siblings["pairs"]:
        if row["result"] != EXCLUDED:
            outcome = row["result"] if row["result"] == OK else f"**{row['result']}**: {_cell(row['reason'])}"
            rows.append(
                [_named(row), f"{row['sibling']} {row['sibling_version']}", f"`{row['range']}`", outcome]
            )
    return table(["package", "with", "its range", "short program on two ranks"], rows)


def excluded(siblings: Row) -> str:
    """Return the table of what ranges exclude: a line for each version of a package and sibling."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in siblings["pairs"]:
        if row["result"] == EXCLUDED:
            key = (_named(row), row["sibling"], row["range"])
            found.setdefault(key, []).append(row["sibling_version"])
    return table(
        ["package", "needs", "excludes"],
        [
            [name, f"{sibling}`{needed}`", ", ".join(versions)]
            for (name, sibling, needed), versions in found.items()
        ],
    )


def missing(siblings: Row) -> str:
    """Return the table of released versions that could not be built, so nothing of them was run."""
    if not siblings["missing"]:
        return "None: all could be built."
    return table(
        ["not built", "reason"],
        [[version, _cell(reason)] for version, reason in siblings["missing"].items()],
    )


def tests(ran: Row) -> str:
    """Return the table of tests that ran with different sibling versions than at their commit."""
    files = ran["test_files"]
    which = f"Only these files of them: {', '.join(files)}.\n\n" if files else ""
    return which + table(
        ["tests of", "with", "outcome"],
        [
            [_named(row), _versions(row["siblings"]), f"{row['result']}: {_cell(row['summary'])}"]
            for row in ran["tests"]
        ],
    )


def side_by_side(siblings: Row) -> str:
    """Return the table of minor series that can be installed together."""
    rows = []
    for row in siblings["side_by_side"]:
        (left, one), (right, other) = row["packages"].items()
        installed = row["installs"]
        rows.append([f"{left} {one}", f"{right} {other}", _versions(installed) if installed else "no"])
    return table(["package", "beside", "an installer takes"], rows)


def render(folder: Path = recorded.FOLDER, frame: Path = FRAME) -> str:
    """Return the page for the result files in ``folder``."""
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*-torch-*.json"))]
    page = frame.read_text().replace("{{runs}}", runs(results))
    parts: dict[str, dict[str, Callable[[Row], str]]] = {
        "siblings": {"pairs": pairs, "excluded": excluded, "missing": missing, "side_by_side": side_by_side},
        "sibling-tests": {"tests": tests},
    }
    for file, tables in parts.items():
        result = recorded.read(file, folder)
        about = (
            "{date}, commit {commit}, torch {torch}, {system}".format(**result) if result else "no run yet"
        )
        page = page.replace(f"{{{{{file} run}}}}", about)
        for name, part in tables.items():
            page = page.replace(f"{{{{{name}}}}}", part(result) if result else "No run was recorded.")
    return page


def _named(row: Row) -> str:
    return f"{row['package']} {row['version']}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; with --check, return 1 if page and results disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    options = parser.parse_args(arguments)
    page = render()
    if options.check:
        return int(page != PAGE.read_text())
    PAGE.write_text(page)
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
