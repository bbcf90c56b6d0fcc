"""A release is made whole or not at all, and only if users can install it."""

import pytest

from releasing.release import ReleaseError, main, next_version, release
from releasing.workspace import CommandError, Version, packages, releases


def versions(repository, name, *parts):
    return [str(next_version(repository.root, name, part)) for part in parts]


def test_the_version_of_the_tree_is_released_first_then_the_next_one(repository):
    repository.note("lower")
    repository.commit("a note")
    assert versions(repository, "lower", "minor", "patch", "major") == ["1.0.0", "1.0.0", "1.0.0"]
    repository.released("lower", "1.0.0")
    assert versions(repository, "lower", "minor", "patch") == ["1.1.0", "1.0.1"]


def test_a_release_has_version_changelog_address_and_a_line(repository, capsys):
    repository.note("lower")
    repository.commit("a note")
    head = repository.git("rev-parse", "HEAD")
    assert main(["lower", "minor", "--unchecked"], repository.root) == 0, "a dry run"
    assert "__version__ = " in capsys.readouterr().out
    assert repository.git("rev-parse", "HEAD") == head
    assert repository.git("status", "--porcelain") == ""

    commit = release(repository.root, "lower", Version("1.0.0"), [], yes=True)
    assert [(one.name, str(one.version), one.commit) for one in releases(repository.root)] == [
        ("lower", "1.0.0", commit)
    ]
    assert repository.git("log", "-2", "--format=%s").splitlines() == [
        "lower 1.0.0 is in the file of releases",
        "lower 1.0.0",
    ]
    lower = packages(repository.root)["lower"]
    assert str(lower.version) == "1.0.0"
    assert "Something new." in (lower.folder / "CHANGELOG.md").read_text()
    assert lower.project["urls"] == {"Source": "https://example.org/here/tree/main/packages/lower"}
    assert not list((lower.folder / "changelog.d").glob("*.md"))
    with pytest.raises(ReleaseError, match="no note"):
        next_version(repository.root, "lower", "minor")


def test_a_check_that_fails_leaves_everything_as_it_was(repository):
    repository.note("lower")
    head = repository.commit("a note")

    def fails(root, name):
        assert str(packages(root)[name].version) == "1.0.0"
        raise CommandError("a test fails")

    with pytest.raises(CommandError, match="a test fails"):
        release(repository.root, "lower", Version("1.0.0"), [fails], yes=True)
    assert repository.git("rev-parse", "HEAD") == head
    assert repository.git("worktree", "list").count("\n") == 0


def leave_a_change(repository):
    repository.write("packages/lower/src/lower/more.py", "")


def detach(repository):
    repository.git("checkout", "--quiet", "--detach")


def leave_no_note(repository):
    repository.git("rm", "--quiet", "packages/lower/changelog.d/+new.added.md")
    repository.commit("no note")


def write_a_strange_note(repository):
    repository.note("lower", "+new.feature.md")
    repository.commit("a strange note")


def leave_a_tag(repository):
    repository.git("tag", "lower-v1.0.0")


def exclude_it(repository):
    repository.package("upper", "1.0.0.dev0", "lower>=0.5,<1")
    repository.commit("an old range")


def need_what_nobody_has(repository):
    repository.package("lower", "1.0.0.dev0", "upper>=1")
    repository.commit("a range without a release")


def need_what_has_changed(repository):
    repository.package("upper", "1.0.0")
    repository.commit("upper 1.0.0")
    repository.released("upper", "1.0.0")
    repository.package("lower", "1.0.0.dev0", "upper>=1")
    repository.note("upper")
    repository.commit("new in both")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (leave_a_change, "not committed"),
        (detach, "no branch"),
        (leave_no_note, "no note"),
        (write_a_strange_note, r"\+new.feature.md: .* one of added"),
        (leave_a_tag, "the tag lower-v1.0.0 exists"),
        (exclude_it, "upper needs lower.* excludes 1.0.0"),
        (need_what_nobody_has, "lower needs upper>=1, of which none was released"),
        (need_what_has_changed, "lower needs upper, which has unreleased changes"),
    ],
)
def test_a_wrong_release_is_refused(repository, change, problem):
    repository.note("lower")
    repository.commit("a note")
    change(repository)
    with pytest.raises(ReleaseError, match=problem):
        next_version(repository.root, "lower", "minor")


def test_the_command_says_what_is_wrong(repository, capsys):
    assert main(["middle", "minor"], repository.root) == 1
    assert capsys.readouterr().err == "No release: there is no package 'middle'; there are lower, upper\n"
