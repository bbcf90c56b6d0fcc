"""The versions of the checkout's wheels, and the environment of the programs that try them."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from small_repository import commit, write_package

from releasing import trials
from releasing.commands import CommandError, git, run
from releasing.released import releases
from releasing.trials import Environment
from releasing.wheels import released_wheel, version_in_tree
from releasing.workspace import Package

LOWER = Package("lower")


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("src/lower/more.py", "0.1.0+tree"),
        ("README.md", "0.1.0+tree"),
        ("LICENSE", "0.1.0+tree"),
        ("build_kernels.py", "0.1.0+tree"),
        ("tests/test_lower.py", "0.1.0"),
        ("changelog.d/+a.fixed.md", "0.1.0"),
    ],
)
def test_whatever_changes_the_wheel_makes_another_version(repository, file, version):
    path = repository / "packages/lower" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("new = 1\n")
    commit(repository, "a change")
    assert version_in_tree(repository, LOWER, releases(repository, LOWER)) == Version(version)


def test_a_number_without_an_entry_is_the_checkouts_own(repository):
    write_package(repository, "lower", "0.2.0", entries="## 0.1.0\n")
    assert version_in_tree(repository, LOWER, releases(repository, LOWER)) == Version("0.2.0")


def test_wheels_of_tagged_versions_come_from_the_index_where_it_has_them(
    repository, tmp_path, monkeypatch, capsys
):
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0\n")
    commit(repository, "lower 0.2.0")
    old, new = releases(repository, LOWER)
    cache, index = tmp_path / "cache", tmp_path / "index"
    index.mkdir()
    uploaded = shutil.copy2(released_wheel(repository, old, cache), index)
    monkeypatch.setenv("RELEASED_FROM_INDEX", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert released_wheel(repository, old, cache).parent.name == old.commit, "not asked: it has no tag"
    old, new = (dataclasses.replace(one, tagged=True) for one in (old, new))
    wheel = released_wheel(repository, old, cache)
    assert wheel.parent.name == f"{old.commit}-from-index"
    assert wheel.read_bytes() == Path(uploaded).read_bytes()
    assert released_wheel(repository, new, cache).parent.name == new.commit
    said = capsys.readouterr().out.splitlines()
    built = f"lower==0.2.0: not on the index, built from {new.commit[:12]}"
    assert said == ["lower==0.1.0: from the index", built]
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "no number")
    with pytest.raises(CommandError, match="no number"):
        released_wheel(repository, new, cache)


def test_a_reason_has_no_path_of_this_machine(tmp_path):
    folder = tmp_path / "lib/site-packages"
    (folder / "lower").mkdir(parents=True)
    (folder / "lower/__init__.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from lower import gone"
    with pytest.raises(CommandError) as caught:
        run([sys.executable, "-c", program], tmp_path)
    assert f"({folder}" in str(caught.value)
    reason = trials._last_error(str(caught.value))
    assert reason == "ImportError: cannot import name 'gone' from 'lower' (lower/__init__.py)"


def test_tests_of_a_wheel_run_without_the_variables_of_the_calling_session(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p a_plugin_of_the_session")
    test = tmp_path / "packages/lower/tests/test_variables.py"
    test.parent.mkdir(parents=True)
    test.write_text(
        "import os\n\n\ndef test_variables():\n"
        "    assert not {'PYTHONPATH', 'PYTEST_ADDOPTS'} & set(os.environ)\n"
    )
    (tmp_path / "pyproject.toml").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    outcome = Environment(Path(sys.executable), tmp_path, []).tests(tmp_path, LOWER, None)
    assert (outcome.ok, outcome.text) == (True, "1 passed")
