"""Versions beside each other: wheels of the past and of the checkout, and the reports on them."""

import sys

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from small_repository import commit, write_package

from releasing import siblings, trials
from releasing.commands import git, run
from releasing.known import Known, collect
from releasing.pairs import Pair
from releasing.trials import Environment

OLD, NEW, TREE = Version("0.1.0"), Version("0.2.0"), Version("0.2.0+tree")


def test_wheels_of_the_past_and_of_the_checkout_are_installed_as_their_ranges_say(repository, tmp_path):
    write_package(repository, "lower", "0.1.0", entries="## 0.1.0\n")
    commit(repository, "lower 0.1.0")
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0\n")
    commit(repository, "lower 0.2.0")
    source = repository / "packages/lower/src/lower/__init__.py"
    source.write_text(source.read_text() + "CHANGED = True\n")
    write_package(repository, "upper", "0.2.0", "lower>=0.2,<1", entries="## 0.1.0\n", tests=("lower<0.9",))
    wheels = tmp_path / "wheels"
    known = collect(repository, wheels)
    assert {name: set(versions) for name, versions in known.catalog.items()} == {
        "lower": {OLD, NEW, TREE},
        "upper": {OLD, NEW},
    }
    assert known.tree == {"lower": TREE, "upper": NEW}
    assert len(list(wheels.glob("*.whl"))) == 5
    assert not known.missing
    assert known.test_needs["upper", NEW] == {"lower": SpecifierSet(">=0.2,<1,<0.9")}

    venv = tmp_path / "venv"
    run(["uv", "venv", "--quiet", "--python", sys.executable, str(venv)], tmp_path)
    environment = Environment(venv / "bin" / "python", wheels, ["lower", "upper"])
    assert environment.install({"upper": NEW, "lower": TREE}).ok
    assert environment.installed() == {"lower": "0.2.0+tree", "upper": "0.2.0"}
    assert environment.install({"upper": NEW, "lower": NEW}).ok
    assert environment.installed() == {"lower": "0.2.0", "upper": "0.2.0"}
    assert environment.install({"upper": OLD, "lower": OLD}).ok
    assert environment.installed() == {"lower": "0.1.0", "upper": "0.1.0"}
    refused = environment.install({"upper": NEW, "lower": OLD})
    assert not refused.ok
    assert "depends on lower>=0.2" in refused.text

    # A tag on a different commit than the one that was found: its wheel is used, not the earlier one.
    source.write_text(source.read_text() + "TAGGED = True\n")
    commit(repository, "released here")
    git(repository, "tag", "lower-v0.2.0")
    assert collect(repository, wheels).tree["lower"] == NEW
    assert {path.name.split("-")[1] for path in wheels.glob("lower-*.whl")} == {"0.1.0", "0.2.0"}
    assert environment.install({"lower": NEW}).ok
    assert run([str(environment.python), "-c", "import lower; print(lower.TAGGED)"], tmp_path) == "True\n"


def test_a_release_that_cannot_be_built_any_more_is_named(repository, tmp_path):
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0\n")
    pyproject = repository / "packages/lower/pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"hatchling.build"', '"hatchling.gone"'))
    commit(repository, "lower 0.2.0")
    write_package(repository, "lower", "0.2.1", entries="## 0.2.1\n")
    known = collect(repository, tmp_path)
    assert list(known.missing) == ["lower 0.2.0"]
    assert NEW not in known.catalog["lower"]


def known_versions():
    needs = {"lower": SpecifierSet(">=0.1,<1")}
    return Known(
        catalog={"lower": {OLD: {}, NEW: {}, TREE: {}}, "upper": {OLD: needs, NEW: needs}},
        commits={("lower", OLD): "a" * 40, ("lower", NEW): "b" * 40, ("upper", OLD): "c" * 40},
        tree={"lower": TREE, "upper": NEW},
    )


def test_the_short_form_runs_the_ends_of_each_range_and_builds_nothing_else(repository, tmp_path):
    for number in (2, 3, 4):
        write_package(repository, "lower", f"0.{number}.0", entries=f"## 0.{number}.0\n")
        commit(repository, f"lower 0.{number}.0")
        write_package(
            repository, "upper", f"0.{number}.0", f"lower>=0.{number - 1},<1", entries=f"## 0.{number}.0\n"
        )
        commit(repository, f"upper 0.{number}.0")
    source = repository / "packages/lower/src/lower/__init__.py"
    source.write_text(source.read_text() + "CHANGED = True\n")
    known = collect(repository, tmp_path, siblings.wanted_for_pairs)
    pairs = [
        (str(pair.dependent_version), str(pair.sibling_version))
        for pair in siblings.pairs_to_run(known, full=False)
    ]
    assert pairs == [
        ("0.4.0", "0.3.0"),
        ("0.4.0", "0.4.0"),
        ("0.4.0", "0.4.0+tree"),
        ("0.1.0", "0.4.0+tree"),
    ]
    assert {tuple(path.name.split("-")[:2]) for path in tmp_path.glob("*.whl")} == {
        *(("lower", version) for version in ("0.3.0", "0.4.0", "0.4.0+tree")),
        *(("upper", version) for version in ("0.1.0", "0.4.0")),
    }


def test_the_short_form_takes_the_next_version_for_one_that_cannot_be_built(repository, tmp_path):
    for number in (2, 3):
        write_package(repository, "lower", f"0.{number}.0", entries=f"## 0.{number}.0\n")
        if number == 2:
            pyproject = repository / "packages/lower/pyproject.toml"
            pyproject.write_text(pyproject.read_text().replace('"hatchling.build"', '"hatchling.gone"'))
        commit(repository, f"lower 0.{number}.0")
    write_package(repository, "upper", "0.1.1", "lower>=0.2,<1", entries="## 0.1.1\n")
    commit(repository, "upper 0.1.1")
    known = collect(repository, tmp_path, siblings.wanted_for_pairs)
    assert list(known.missing) == ["lower 0.2.0"]
    pairs = siblings.pairs_to_run(known, full=False)
    newest = [pair for pair in pairs if pair.dependent_version == Version("0.1.1")]
    assert [str(pair.sibling_version) for pair in newest] == ["0.3.0"]


def test_tests_of_an_earlier_run_stay_where_none_are_run(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(siblings, "collect", lambda *arguments: known_versions())
    monkeypatch.setattr(siblings, "run_pairs", lambda *arguments, **options: [])
    monkeypatch.setattr(siblings, "run_tests", lambda *arguments: [])
    monkeypatch.setattr(siblings.recorded, "write", lambda name, result: written.append((name, list(result))))
    arguments = ["--wheels", str(tmp_path), "--full", "--record"]
    assert siblings.main([*arguments, "--no-tests"]) == 0
    assert [name for name, _ in written] == ["siblings"]
    assert siblings.main(arguments) == 0
    assert [name for name, _ in written[1:]] == ["siblings", "sibling-tests"]
    assert "tests" not in written[0][1]


def test_the_full_form_runs_oldest_and_newest_siblings_and_released_dependents():
    assert siblings.test_sets(known_versions()) == [
        ("upper", NEW, {"upper": NEW, "lower": OLD}),
        ("upper", NEW, {"upper": NEW, "lower": TREE}),
        ("upper", OLD, {"upper": OLD, "lower": TREE}),
    ]


def test_requirements_of_tests_only_are_installed_for_them():
    known = known_versions()
    known.catalog["upper"] = {OLD: {}, NEW: {}}
    known.test_needs = {("upper", NEW): {"lower": SpecifierSet("<0.2")}}
    assert siblings.test_sets(known) == [("upper", NEW, {"upper": NEW, "lower": OLD})]


def test_a_recorded_pair_of_the_past_is_not_run_again():
    class Working:
        ran = ()

        def install(self, pins):
            self.ran += (tuple(map(str, pins.values())),)
            return trials.Outcome(ok=True, text="")

        def installed(self):
            return {}

        def program(self, package):
            return trials.Outcome(ok=True, text="")

    first, second, third = Working(), Working(), Working()
    rows = siblings.run_pairs(first, known_versions(), full=True)
    assert {row["result"] for row in rows} == {siblings.OK}
    assert len(first.ran) == 6
    assert siblings.run_pairs(second, known_versions(), full=True, recorded_rows=rows) == rows
    assert second.ran == first.ran[2:]  # those of upper 0.2.0 (the checkout's) and of lower 0.2.0+tree
    siblings.run_pairs(third, known_versions(), full=False)
    assert set(third.ran) == set(second.ran)

    moved, fourth = known_versions(), Working()
    moved.commits["lower", OLD] = "d" * 40
    again = siblings.run_pairs(fourth, moved, full=True, recorded_rows=rows)
    assert set(fourth.ran) - set(second.ran) == {("0.1.0", "0.1.0")}
    assert again[0]["commits"] == {"upper": "c" * 12, "lower": "d" * 12}


def test_only_broken_pairs_with_the_checkout_fail_the_run():
    def row(version, sibling_version, result):
        names = {"package": "upper", "sibling": "lower"}
        return {
            **names,
            "version": version,
            "sibling_version": sibling_version,
            "result": result,
            "reason": "why",
        }

    rows = [
        row("0.1.0", "0.2.0", siblings.BROKEN),
        row("0.1.0", "0.2.0+tree", siblings.OK),
        row("0.1.0", "1.0.0", siblings.EXCLUDED),
    ]
    assert not siblings.broken_now(rows, known_versions())
    (broken,) = siblings.broken_now([*rows, row("0.2.0", "0.1.0", siblings.BROKEN)], known_versions())
    assert broken.endswith(": why")
    tests = {
        "package": "upper",
        "version": "0.1.0",
        "siblings": {"lower": "0.2.0+tree"},
        "result": siblings.BROKEN,
    }
    assert siblings.broken_now([{**tests, "summary": "1 failed"}], known_versions())


def test_a_pair_that_no_versions_fit_is_broken_with_the_resolvers_reason():
    class Refusing:
        def install(self, pins):
            return trials.Outcome(ok=False, text="Because middle needs lower<0.2")

    catalog = {
        "lower": {NEW: {}},
        "middle": {OLD: {"lower": SpecifierSet("<0.2")}},
        "upper": {OLD: {"lower": SpecifierSet(">=0.2"), "middle": SpecifierSet(">=0.1")}},
    }
    pair = Pair("upper", OLD, "lower", NEW, SpecifierSet(">=0.2"), admitted=True)
    row = siblings.check_pair(Refusing(), catalog, pair)
    assert (row["result"], row["reason"]) == (
        siblings.NOT_TOGETHER,
        "Because middle needs lower<0.2",
    )
    excluded = Pair("upper", OLD, "lower", NEW, SpecifierSet("<0.2"), admitted=False)
    assert siblings.check_pair(Refusing(), catalog, excluded)["result"] == siblings.EXCLUDED
