"""A release is made in its own worktree, checked, and either kept as one commit or discarded."""

import re

import pytest
from packaging.version import Version
from small_repository import commit, write_package

from releasing import release
from releasing.commands import CommandError, git
from releasing.notes import notes, strange_notes
from releasing.released import releases
from releasing.workspace import ROOT, Package, packages


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
    _, shown = release.release(
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

    kept, _ = release.release(repository, release.plan(repository, "upper", "patch"), [build], yes=True)
    assert kept == git(repository, "rev-parse", "HEAD").strip()
    assert git(repository, "rev-parse", "HEAD~1").strip() == before
    assert git(repository, "log", "-1", "--format=%s").strip() == "upper 0.1.1"
    assert not notes(repository, Package("upper"))
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


def test_impossible_releases_are_refused(repository):
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
    assert "lower 0.2.0 was released already" in refusal("lower")
    assert str(release.plan(repository, "lower", "patch").new) == "0.1.1"
    git(repository, "switch", "--quiet", "--detach")
    assert "HEAD is on no branch" in refusal("lower", "patch")


def test_a_version_that_a_maintenance_branch_released_is_refused_without_a_tag_too(repository):
    git(repository, "switch", "--quiet", "-c", "maintenance/lower-0.1")
    write_package(repository, "lower", "0.1.1", entries="## 0.1.1 (2026-01-01)\n\n## 0.1.0\n")
    commit(repository, "lower 0.1.1")
    git(repository, "switch", "--quiet", "main")
    git(repository, "merge", "--quiet", "-s", "ours", "-m", "merge", "maintenance/lower-0.1")
    add_note(repository, "lower")
    with pytest.raises(release.ReleaseError, match=r"lower 0\.1\.1 was released already"):
        release.plan(repository, "lower", "patch")
    assert str(release.plan(repository, "lower", "minor").new) == "0.2.0"


def test_a_shallow_clone_releases_nothing(repository, tmp_path):
    add_note(repository, "lower")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", str(clone))
    with pytest.raises(release.ReleaseError, match="shallow"):
        release.plan(clone, "lower", "minor")


def test_a_file_that_the_changelog_would_not_take_is_named(repository):
    add_note(repository, "lower")
    folder = repository / "packages/lower/changelog.d"
    for name in ("+x.bugfix.md", "+x.fixed.rst", "notes.txt", "12.md"):
        (folder / name).write_text("Something.\n")
        commit(repository, "a strange note")
        with pytest.raises(
            release.ReleaseError, match=rf"{re.escape(name)}: .* added, changed, fixed, removed"
        ):
            release.plan(repository, "lower", "minor")
        (folder / name).unlink()
    (folder / "12.fixed.1.md").write_text("Something.\n")
    commit(repository, "a second note of an issue")
    release.release(repository, release.plan(repository, "lower", "minor"), [], yes=True)
    assert "Something. (#12)" in (repository / "packages/lower/CHANGELOG.md").read_text()


def test_notes_that_the_changelog_left_and_a_missing_row_stop_the_release(repository, monkeypatch):
    add_note(repository, "lower")
    with monkeypatch.context() as patched:
        patched.setattr(release, "strange_notes", lambda root, package: [])
        (repository / "packages/lower/changelog.d/+x.bugfix.md").write_text("A bug.\n")
        commit(repository, "a misspelt kind")
        planned, before = release.plan(repository, "lower", "minor"), state(repository)
        with pytest.raises(release.ReleaseError, match=r"\+x\.bugfix\.md"):
            release.release(repository, planned, [], yes=True)
        assert state(repository) == before
    (repository / "packages/lower/changelog.d/+x.bugfix.md").unlink()
    (repository / "README.md").write_text("| [lower](packages/lower) |\n")
    commit(repository, "the table has no versions")
    with pytest.raises(release.ReleaseError, match=r"README\.md has no row of lower"):
        release.release(repository, release.plan(repository, "lower", "minor"), [], yes=True)


@pytest.mark.parametrize("package", packages())
def test_all_notes_of_the_tree_are_of_a_kind(package):
    assert strange_notes(ROOT, package) == []


def test_a_sibling_that_only_the_tree_has_cannot_be_needed_by_a_release(repository):
    write_package(repository, "lower", "0.2.0", entries="## 0.1.0\n")
    write_package(repository, "upper", "0.1.0", "lower>=0.2,<1", entries="## 0.1.0\n")
    add_note(repository, "upper")
    with pytest.raises(release.ReleaseError, match=r"upper needs lower<1,>=0\.2, of which none was released"):
        release.plan(repository, "upper", "minor")
    add_note(repository, "lower")
    release.release(repository, release.plan(repository, "lower", "minor"), [], yes=True)
    assert str(release.plan(repository, "upper", "minor").new) == "0.2.0"


def test_a_dependent_that_excludes_the_new_version_is_named(repository):
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
    assert "git tag lower-v0.2.0 COMMIT\ngit push origin main lower-v0.2.0" in printed
    assert release.main(["upper", "minor", "--unchecked"], repository) == 1
    assert "No release: packages/upper/changelog.d has no note" in capsys.readouterr().err


def test_a_kept_release_was_tried_beside_released_siblings_and_its_own_commit_is_tagged(
    repository, capsys, monkeypatch
):
    add_note(repository, "lower")
    ran = []
    monkeypatch.setattr(release, "_show", lambda command, folder: ran.append(" ".join(command)))
    assert release.main(["lower", "minor", "--yes"], repository) == 0
    assert ran == ["nox -s alone(lower)", "nox -s wheels(lower) -- --released", "nox -s siblings"]
    released = git(repository, "rev-parse", "HEAD").strip()
    assert f"git tag lower-v0.2.0 {released}\ngit push origin main lower-v0.2.0" in capsys.readouterr().out
