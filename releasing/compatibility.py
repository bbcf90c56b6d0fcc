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
DEFAULT = "default"
FRAME = Path(__file__).with_name("compatibility.md.in")

Row = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def runs(results: Sequence[Row]) -> str:
    """Return the table of sessions that were run, and a list of those of which only a part was run."""
    if not results:
        return "No run was recorded."
    ordered = sorted(results, key=lambda row: (row["session"], Version(row["torch"]), Version(row["python"])))
    shown = table(
        ["session", "torch, Python", "outcome", "when, commit"],
        [
            [
                row["session"],
                f"{row['torch']}, {row['python']}",
                f"{'green' if row['exit_status'] == 0 else '**red**'}: "
                + ", ".join(f"{row[key]} {key}" for key in COUNTED if key in row),
                f"{row['date']}, {row['commit'][:7]}",
            ]
            for row in ordered
        ],
    )
    chosen = [
        f"- Only a part of {row['session']}, torch {row['torch']}, Python {row['python']}: "
        f"{_files(row['selected'])}."
        for row in ordered
        if row.get("selected", DEFAULT) != DEFAULT
    ]
    return "\n".join([shown, *(["", *chosen] if chosen else [])])


def pairs(siblings: Row) -> str:
    """Return a table for each package: a line for each of its versions and each sibling in a range of it."""
    packages: dict[str, dict[tuple[str, str], dict[bool, list[str]]]] = {}
    for row in _allowed(siblings):
        lines = packages.setdefault(row["package"], {})
        found = lines.setdefault((row["version"], f"{row['sibling']} `{row['range']}`"), {})
        found.setdefault(row["result"] == OK, []).append(row["sibling_version"])
    return "\n\n".join(
        table(
            [package, "needs", "works with", "fails with"],
            [
                [*line, *(", ".join(found.get(works, ["-"])) for works in (True, False))]
                for line, found in lines.items()
            ],
        )
        for package, lines in packages.items()
    )


def failures(siblings: Row) -> str:
    """Return a list of the pairs that should work and do not, with the reasons."""
    lines = [
        f"- {_named(row)} with {row['sibling']} {row['sibling_version']}: **{row['result']}**. "
        # An installer goes on to derive that the two are incompatible, in more words.
        f"{_cell(row['reason'].partition(', we can conclude')[0])}"
        for row in _allowed(siblings)
        if row["result"] != OK
    ]
    return "\n".join(lines) or "None fails."


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
    """Return a table for each two packages: which of their minor series can be installed together."""
    packages: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in siblings["side_by_side"]:
        (left, one), (right, other) = row["packages"].items()
        packages.setdefault((left, right), {})[one, other] = "yes" if row["installs"] else "no"
    shown = []
    for (left, right), found in packages.items():
        ones, others = ({series[side]: None for series in found} for side in (0, 1))
        rows = [[one, *(found[one, other] for other in others)] for one in ones]
        shown.append(table([f"{left} beside {right}", *others], rows))
    return "\n\n".join(shown)


def render(folder: Path = recorded.FOLDER, frame: Path = FRAME) -> str:
    """Return the page for the result files in ``folder``."""
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*-torch-*.json"))]
    page = frame.read_text().replace("{{runs}}", runs(results))
    parts: dict[str, dict[str, Callable[[Row], str]]] = {
        "siblings": {"pairs": pairs, "failures": failures, "missing": missing, "side_by_side": side_by_side},
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


def _allowed(siblings: Row) -> list[Row]:
    return [row for row in siblings["pairs"] if row["result"] != EXCLUDED]


def _files(selected: str) -> str:
    return ", ".join(f"`{word}`" for word in selected.split())


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
