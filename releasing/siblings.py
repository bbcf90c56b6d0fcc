"""Try packages with older and newer siblings: ``python -m releasing.siblings --wheels FOLDER``.

Without ``--full`` the checkout is installed from wheels beside the oldest and the newest released version, in
range, of each sibling that it needs and of each package that needs it, and runs a short program on two ranks:
the number of pairs does not grow with releases. ``--full`` runs every pair, including those of the past, the
checkout's tests with the oldest and the newest version of each sibling in range, and the old tests of every
released dependent in range with the checkout's siblings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from releasing import recorded
from releasing.known import CHECKOUT, Known, collect, every_version
from releasing.pairs import Catalog, Pair, admits, all_pairs, beside, solve
from releasing.released import is_shallow
from releasing.trials import Environment
from releasing.workspace import ROOT, Package

OK, BROKEN, EXCLUDED = "ok", "broken", "excluded by range"
NOT_TOGETHER = "not installable together"
"""The pair's own range admits it, but not their other requirements: an installer takes another version."""


def check_pair(environment: Environment, catalog: Catalog, pair: Pair) -> dict[str, Any]:
    """Install one pair and run the dependent's short program; return a row of the table."""
    row = _row(pair)
    if not pair.admitted:
        return {**row, "result": EXCLUDED}
    if solve(catalog, pair.pins, [pair.dependent, pair.sibling]) is None:
        outcome = environment.install(pair.pins)
        if outcome.ok:
            raise RuntimeError(f"{pair} was installed though no versions fit: the metadata were misread")
        return {**row, "result": NOT_TOGETHER, "reason": outcome.text}
    outcome = environment.install(pair.pins)
    row["installed"] = environment.installed() if outcome.ok else {}
    outcome = environment.program(pair.dependent) if outcome.ok else outcome
    return {**row, "result": OK} if outcome.ok else {**row, "result": BROKEN, "reason": outcome.text}


def test_sets(known: Known) -> list[tuple[str, Version, dict[str, Version]]]:
    """Return the test runs of the full form: a package, its version, and all installed versions."""
    found: list[tuple[str, Version, dict[str, Version]]] = []

    def add(name: str, pins: Mapping[str, Version]) -> None:
        chosen = solve(known.catalog_for_tests(name, pins[name]), pins, [name])
        if chosen is not None and (row := (name, pins[name], chosen)) not in found:
            found.append(row)

    for name, tree in known.tree.items():
        for sibling, needed in known.catalog_for_tests(name, tree)[name][tree].items():
            in_range = [other for other in known.catalog[sibling] if admits(needed, other)]
            for other in sorted({min(in_range), max(in_range)}) if in_range else []:
                add(name, {name: tree, sibling: other})
    for pair in all_pairs(known.catalog):
        if pair.admitted and pair.sibling_version == known.tree[pair.sibling]:
            add(pair.dependent, pair.pins)
    return found


def run_tests(
    root: Path, environment: Environment, known: Known, files: Sequence[str]
) -> list[dict[str, Any]]:
    """Run the tests of the full form; return one row per run."""
    rows = []
    for name, version, chosen in test_sets(known):
        outcome = environment.install(chosen)
        if outcome.ok:
            # If the checkout's package equals its release, its own tests are the same.
            commit = None if version == known.tree[name] else known.commits[name, version]
            outcome = environment.tests(root, Package(name), commit, files)
        others = {other: str(number) for other, number in chosen.items() if other != name}
        rows.append(
            {
                "package": name,
                "version": str(version),
                "siblings": others,
                "commits": known.sources(chosen),
                "result": OK if outcome.ok else BROKEN,
                "summary": outcome.text,
            }
        )
        _say(rows[-1])
    return rows


def pairs_to_run(known: Known, *, full: bool) -> list[Pair]:
    """Return all pairs, or those of the checkout with the oldest and newest version in range."""
    every = all_pairs(known.catalog)
    if full:
        return every
    tree, ends = known.tree, dict[Pair, None]()
    for dependent, sibling in dict.fromkeys((pair.dependent, pair.sibling) for pair in every):
        in_range = [
            pair for pair in every if (pair.dependent, pair.sibling) == (dependent, sibling) and pair.admitted
        ]
        older_siblings = [pair for pair in in_range if pair.dependent_version == tree[dependent]]
        older_dependents = [pair for pair in in_range if pair.sibling_version == tree[sibling]]
        for some, name in ((older_siblings, sibling), (older_dependents, dependent)):
            released = [pair for pair in some if (name, pair.pins[name]) in known.commits]
            ours = [pair for pair in some if pair.pins[name] == tree[name]]
            ends |= dict.fromkeys([*released[:1], *released[-1:], *ours])
    return list(ends)


def installed_for(known: Known, pair: Pair) -> Mapping[str, Version]:
    """Return the versions that an installer takes for a pair; only the pair itself if none are compatible."""
    return solve(known.catalog, pair.pins, [pair.dependent, pair.sibling]) or pair.pins


def wanted_for_pairs(known: Known) -> set[tuple[str, Version]]:
    """Return the versions that the short form installs."""
    pairs = pairs_to_run(known, full=False)
    return {item for pair in pairs for item in installed_for(known, pair).items()}


def run_pairs(
    environment: Environment, known: Known, *, full: bool, recorded_rows: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Run the programs of all pairs, or of some with the checkout; return one row per pair.

    The recorded result of a pair of the past is reused if all wheels come from the same commits.
    """
    past = {_identity(row): row for row in recorded_rows}
    rows = []
    for pair in pairs_to_run(known, full=full):
        sources = known.sources(installed_for(known, pair))
        with_tree = any(known.tree[name] == version for name, version in pair.pins.items())
        row = None
        if not with_tree and CHECKOUT not in sources.values():
            row = past.get(_identity({**_row(pair), "commits": sources}))
        if row is None:
            row = {**check_pair(environment, known.catalog, pair), "commits": sources}
        rows.append(row)
        _say(row)
    return rows


def side_by_side(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the versions that an installer would choose, for all minor series of two packages.

    Only for packages that do not need each other; the others are among the pairs.
    """
    names = sorted(catalog)
    needed = {(name, sibling) for name in names for needs in catalog[name].values() for sibling in needs}
    return [
        {
            "packages": {left: f"{one}.*", right: f"{other}.*"},
            "installs": chosen and {name: str(version) for name, version in sorted(chosen.items())},
        }
        for number, left in enumerate(names)
        for right in names[number + 1 :]
        if not needed & {(left, right), (right, left)}
        for one, other, chosen in beside(catalog, left, right)
    ]


def broken_now(rows: Sequence[Mapping[str, Any]], known: Known) -> list[str]:
    """Return the errors: broken pairs in range with the checkout on one side.

    Also pairs with the checkout on both sides, if no installer takes them.
    """
    found = []
    for row in rows:
        siblings = row.get("siblings") or {row["sibling"]: row["sibling_version"]}
        versions = {row["package"]: row["version"], **siblings}
        ours = [str(known.tree[name]) == text for name, text in versions.items()]
        if (row["result"] == BROKEN and any(ours)) or (row["result"] == NOT_TOGETHER and all(ours)):
            found.append(f"{versions}: {row.get('reason') or row.get('summary')}")
    return found


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "package": pair.dependent,
        "version": str(pair.dependent_version),
        "sibling": pair.sibling,
        "sibling_version": str(pair.sibling_version),
        "range": str(pair.range),
    }


def _identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = (row[key] for key in ("package", "version", "sibling", "sibling_version", "range"))
    return (*names, *(f"{name} {commit}" for name, commit in sorted(row.get("commits", {}).items())))


def _say(row: Mapping[str, Any]) -> None:
    siblings = row.get("siblings") or {row["sibling"]: row["sibling_version"]}
    beside_it = ", ".join(f"{name} {version}" for name, version in siblings.items())
    more = row.get("reason") or row.get("summary", "")
    print(f"{row['package']} {row['version']} with {beside_it}: {row['result']} {more}".rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a pair with the checkout is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="of the venv in which siblings are replaced"
    )
    parser.add_argument("--wheels", type=Path, required=True, help="folder for wheels")
    parser.add_argument("--torch", default="", help="the torch version in that venv, for the record")
    parser.add_argument("--full", action="store_true", help="run tests, too, and all pairs")
    parser.add_argument("--record", action="store_true", help="write the result files; needs --full")
    parser.add_argument("--files", nargs="*", default=[], help="test files to run instead of all")
    parser.add_argument("--anew", action="store_true", help="also run recorded pairs of the past again")
    parser.add_argument("--no-tests", action="store_true", help="with --full: run only the pairs' programs")
    options = parser.parse_args(arguments)
    if options.record and not options.full:
        parser.error("--record needs --full: the file has the pairs of the past, too")
    if is_shallow(ROOT):
        print(
            "This clone is shallow: only versions that its tags and its part of the history show are known."
        )
    begin = time.monotonic()
    known = collect(ROOT, options.wheels.absolute(), every_version if options.full else wanted_for_pairs)
    for version, reason in known.missing.items():
        print(f"{version} could not be built, nothing is said about it: {reason}")
    environment = Environment(options.python.absolute(), options.wheels.absolute(), sorted(known.catalog))
    before = recorded.read("siblings") or {}
    past = before["pairs"] if before.get("torch") == options.torch and not options.anew else []
    pairs = run_pairs(environment, known, full=options.full, recorded_rows=past)
    tests = []
    if options.full and not options.no_tests:
        tests = run_tests(ROOT, environment, known, options.files)
    if options.record:
        about = {
            **recorded.about_this_run(),
            "torch": options.torch,
            "python": ".".join(map(str, sys.version_info[:3])),
            "tree": {name: str(version) for name, version in known.tree.items()},
        }
        found = {"missing": known.missing, "pairs": pairs, "side_by_side": side_by_side(known.catalog)}
        print(f"written: {recorded.write('siblings', {**about, **found})}")
        if not options.no_tests:  # otherwise the record of an earlier run's tests stays, with its own date
            ran = {"test_files": options.files, "tests": tests}
            print(f"written: {recorded.write('sibling-tests', {**about, **ran})}")
    broken = broken_now([*pairs, *tests], known)
    print(f"{len(pairs)} pairs and {len(tests)} test runs in {time.monotonic() - begin:.0f} s")
    print("\n".join(f"BROKEN {text}" for text in broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
