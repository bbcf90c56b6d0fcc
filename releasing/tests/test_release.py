"""A release is made apart, checked, and either kept as one commit or thrown away."""

import pytest
from packaging.version import Version
from small_repository import commit, write_package

from releasing import release
from releasing.commands import CommandError, git
from releasing.released import releases
from releasing.workspace import Package


def add_note(root, name):
    (root / "packages" / name / "changelog.d" / "+new-thing.added.md").write_text("A new thing.\n")
    commit(root, "a note")


def state(root):
    return git(root, "rev-parse", "HEAD"), git(root, "status", "--porcelain"), git(root, "worktree", "list")


def test_a_dry_run_shows_the_release_and_leaves_the_tree_as_it_was(repository):
    add_note(repository, "lower")
    before = state(repository)
    planned = release.plan(repository, "lower", "minor")
    seen = []
    shown = release.release(
        repository, planned, [lambda root, package: seen.append((root, package))], yes=False
    )
    assert '+__version__ = "0.2.0"' in shown
    assert "A new thing." in shown
    ((folder, package),) = seen
    assert folder != repository
    assert package == Package("lower")
    assert state(repository) == before


def test_a_kept_release_is_one_commit_that_the_finder_finds(repository):
    add_note(repository, "upper")
    before = git(repository, "rev-parse", "HEAD").strip()

    def build(root, package):
        (root / "dist").mkdir()
        (root / "dist" / f"{package.module}-0.1.1.tar.gz").write_text("")

    release.release(repository, release.plan(repository, "upper", "patch"), [build], yes=True)
    assert git(repository, "rev-parse", "HEAD~1").strip() == before
    assert git(repository, "log", "-1", "--format=%s").strip() == "upper 0.1.1"
    assert not release.notes(repository, Package("upper"))
    changelog = (repository / "packages/upper/CHANGELOG.md").read_text()
    assert changelog.index("## 0.1.1 (2") < changelog.index("## 0.1.0")
    readme = (repository / "README.md").read_text()
    assert readme == "| [lower](packages/lower) | 0.1.0 |\n| [upper](packages/upper) | 0.1.1 |\n"
    newest = releases(repository, Package("upper"))[-1]
    assert (newest.version, newest.commit) == (Version("0.1.1"), git(repository, "rev-parse", "HEAD").strip())
    assert (repository / "dist/upper-0.1.1.tar.gz").exists()


def test_a_number_in_the_tree_without_an_entry_is_released_as_it_is(repository, capsys):
    write_package(repository, "lower", "0.2.0", entries="## 0.1.0\n")
    add_note(repository, "lower")
    assert release.main(["lower", "patch", "--unchecked"], repository) == 0
    assert "lower: 0.2.0, which the tree has" in capsys.readouterr().out
    planned = release.plan(repository, "lower", "patch")
    release.release(repository, planned, [], yes=True)
    assert [str(found.version) for found in releases(repository, Package("lower"))] == ["0.1.0", "0.2.0"]
    assert "| [lower](packages/lower) | 0.2.0 |" in (repository / "README.md").read_text()
    add_note(repository, "lower")
    assert release.plan(repository, "lower", "patch").new == Version("0.2.1")


def test_a_failed_check_changes_nothing(repository):
    add_note(repository, "lower")
    before = state(repository)

    def fail(root, package):
        raise CommandError("a test failed")

    with pytest.raises(CommandError, match="a test failed"):
        release.release(repository, release.plan(repository, "lower", "minor"), [fail], yes=True)
    assert state(repository) == before


def test_what_cannot_be_released_is_refused(repository):
    def refusal(name, part="minor"):
        with pytest.raises(release.ReleaseError) as caught:
            release.plan(repository, name, part)
        return str(caught.value)

    assert "there is no package 'middle'" in refusal("middle")
    assert "no note" in refusal("lower")
    add_note(repository, "lower")
    (repository / "stray.txt").write_text("")
    assert "stray.txt" in refusal("lower")
    (repository / "stray.txt").unlink()
    git(repository, "tag", "lower-v0.2.0")
    assert "lower-v0.2.0 exists" in refusal("lower")
    assert str(release.plan(repository, "lower", "patch").new) == "0.1.1"


def test_a_dependant_that_excludes_the_new_version_is_named(repository):
    write_package(repository, "upper", "0.1.0", "lower>=0.1,<0.2", entries="## 0.1.0\n")
    add_note(repository, "lower")
    with pytest.raises(release.ReleaseError, match=r"upper needs lower<0\.2,>=0\.1, which excludes 0\.2\.0"):
        release.plan(repository, "lower", "minor")
    assert release.plan(repository, "lower", "patch").new == Version("0.1.1")


def test_a_range_of_tests_that_excludes_the_new_version_is_named(repository):
    write_package(repository, "upper", "0.1.0", entries="## 0.1.0\n", tests=("pytest", "lower<0.2"))
    add_note(repository, "lower")
    with pytest.raises(release.ReleaseError, match=r"upper needs lower<0\.2, which excludes 0\.2\.0"):
        release.plan(repository, "lower", "minor")


def test_the_command_prints_what_publishes(repository, capsys):
    add_note(repository, "lower")
    assert release.main(["lower", "minor", "--unchecked"], repository) == 0
    printed = capsys.readouterr().out
    assert "lower: 0.1.0 -> 0.2.0" in printed
    assert "git tag lower-v0.2.0\ngit push origin main lower-v0.2.0" in printed
    assert release.main(["upper", "minor", "--unchecked"], repository) == 1
    assert "No release: packages/upper/changelog.d has no note" in capsys.readouterr().err
