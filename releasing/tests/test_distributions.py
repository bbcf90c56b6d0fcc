"""Wheels beside the checkout's siblings, and tests of an sdist with what they need."""

import sys

import pytest
from small_repository import write_package

from releasing import distributions
from releasing.commands import run
from releasing.trials import Environment
from releasing.workspace import Package, packages

UPPER = Package("upper")


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


def test_tests_of_an_sdist_need_a_torch(tmp_path, capsys):
    with pytest.raises(SystemExit):
        distributions.main(["dist-utils", "--scratch", str(tmp_path), "--test-sdist"])
    assert "--test-sdist needs --torch" in capsys.readouterr().err
