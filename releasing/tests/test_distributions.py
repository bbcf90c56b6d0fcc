"""Wheels beside the checkout's or released siblings, and an sdist's tests with their requirements."""

import os
import shutil
import sys

import pytest
from packaging.requirements import Requirement
from small_repository import commit, write_package

from releasing import distributions
from releasing.commands import CommandError, run
from releasing.trials import Environment
from releasing.workspace import ROOT, Package, packages, tomllib

UPPER = Package("upper")
PINS = (ROOT / "releasing/build-requirements.txt").read_text().splitlines()


def test_tests_of_an_sdist_find_the_siblings_that_only_they_need(repository, tmp_path):
    write_package(repository, "upper", "0.1.0", entries="## 0.1.0\n", tests=("Lower>=0.1,<1", "pytest>=8"))
    test = repository / "packages/upper/tests/test_upper.py"
    test.parent.mkdir()
    test.write_text(
        "import lower, upper\n\n\ndef test_both():\n    assert lower.__file__ != upper.__file__\n"
    )
    sdist = distributions.build_sdist(repository, UPPER, tmp_path)
    wheel = distributions.build_wheel(sdist, tmp_path)
    wheels = tmp_path / "wheels"
    versions = distributions.gather_wheels(repository, UPPER, wheel, wheels)
    assert {name: str(version) for name, version in versions.items()} == {"upper": "0.1.0", "lower": "0.1.0"}

    venv = tmp_path / "venv"
    run(["uv", "venv", "--quiet", "--python", sys.executable, str(venv)], tmp_path)
    names = [package.name for package in packages(repository)]
    environment = Environment(venv / "bin" / "python", wheels, names)
    assert environment.install({"upper": versions["upper"]}).ok
    assert environment.installed() == {"upper": "0.1.0"}
    summary = distributions.run_sdist_tests(sdist, environment, versions, tmp_path, [])
    assert summary.startswith("1 passed")


def test_what_only_the_checkouts_sibling_has_fails_beside_released_ones(repository, tmp_path):
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0\n")
    commit(repository, "lower 0.2.0")
    source = repository / "packages/lower/src/lower/__init__.py"
    source.write_text(source.read_text() + "NEW = True\n")
    write_package(repository, "upper", "0.2.0", "lower>=0.1,<1", entries="## 0.2.0\n", tests=("pytest>=8",))
    test = repository / "packages/upper/tests/test_upper.py"
    test.parent.mkdir()
    test.write_text("import lower\n\n\ndef test_new():\n    assert lower.NEW\n")
    commit(repository, "upper needs what lower has since yesterday")
    sdist = distributions.build_sdist(repository, UPPER, tmp_path)
    wheel = distributions.build_wheel(sdist, tmp_path)
    venv = tmp_path / "venv"
    run(["uv", "venv", "--quiet", "--python", sys.executable, str(venv)], tmp_path)

    def beside(siblings):
        wheels = tmp_path / siblings
        versions = distributions.gather_wheels(repository, UPPER, wheel, wheels, siblings)
        environment = Environment(venv / "bin" / "python", wheels, ["lower", "upper"])
        return str(versions["lower"]), (sdist, environment, versions, tmp_path, [])

    version, arguments = beside("checkout")
    assert version == "0.2.0"
    assert distributions.run_sdist_tests(*arguments).startswith("1 passed")
    for siblings, number in (("newest", "0.2.0"), ("oldest", "0.1.0")):
        version, arguments = beside(siblings)
        assert version == number
        with pytest.raises(CommandError, match="has no attribute 'NEW'"):
            distributions.run_sdist_tests(*arguments)

    write_package(repository, "upper", "0.2.0", "lower>=0.3,<1", entries="## 0.2.0\n")
    with pytest.raises(RuntimeError, match=r"no versions of siblings \(newest\)"):
        distributions.gather_wheels(repository, UPPER, wheel, tmp_path / "none", "newest")


def test_tests_of_an_sdist_need_a_torch(tmp_path, capsys):
    with pytest.raises(SystemExit):
        distributions.main(["dist-utils", "--scratch", str(tmp_path), "--test-sdist"])
    assert "--test-sdist needs --torch" in capsys.readouterr().err


def test_the_same_sources_give_the_same_bytes(repository, tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    built = []
    for name in ("one", "two"):
        sources = tmp_path / name / "sources"
        shutil.copytree(repository, sources)
        for number, path in enumerate(sorted(sources.rglob("*.py"))):
            os.utime(path, (number + 1e9, number + 1e9 + len(built)))
        sdist = distributions.build_sdist(sources, UPPER, tmp_path / name)
        wheel = distributions.build_wheel(sdist, tmp_path / name)
        built.append([sdist.read_bytes(), wheel.read_bytes()])
    assert built[0] == built[1]


def test_build_requirements_are_pinned():
    """Every build requirement of a package is pinned exactly."""
    pinned = {Requirement(line).name for line in PINS if "==" in line and not line.startswith("#")}
    for package in packages():
        project = tomllib.loads((ROOT / package.folder / "pyproject.toml").read_text())
        assert {Requirement(text).name for text in project["build-system"]["requires"]} <= pinned
