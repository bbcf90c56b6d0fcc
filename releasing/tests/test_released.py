"""Released versions are found by tag, or where the release command or a branch itself set them."""

from small_repository import commit, write_package

from releasing.commands import git
from releasing.released import is_shallow, releases
from releasing.workspace import Package

LOWER, UPPER = Package("lower"), Package("upper")


def found(root, package):
    return {str(release.version): (release.commit, release.tagged) for release in releases(root, package)}


def test_a_version_without_a_tag_is_where_number_and_changelog_entry_meet(repository):
    begin = git(repository, "rev-parse", "HEAD").strip()
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0 (not released)\n\n## 0.1.0\n")
    commit(repository, "the number alone")
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0 (2026-02-01)\n\n## 0.1.0\n")
    second = commit(repository, "its entry")
    assert found(repository, UPPER) == {"0.1.0": (begin, False)}
    assert found(repository, LOWER) == {"0.1.0": (begin, False), "0.2.0": (second, False)}


def test_a_number_that_is_changed_before_its_entry_is_no_release(repository):
    write_package(repository, "lower", "0.3.0", entries="## 0.1.0\n")
    commit(repository, "the next number")
    assert list(found(repository, LOWER)) == ["0.1.0"]
    write_package(repository, "lower", "0.2.1", entries="## 0.1.0\n")
    commit(repository, "only a patch")
    write_package(repository, "lower", "0.2.1", entries="## 0.2.1 (2026-02-01)\n\n## 0.1.0\n")
    commit(repository, "its entry")
    assert list(found(repository, LOWER)) == ["0.1.0", "0.2.1"]
    git(repository, "tag", "lower-v0.3.0", "HEAD~2")
    assert list(found(repository, LOWER)) == ["0.1.0", "0.2.1", "0.3.0"]


def test_versions_of_merged_branches_are_found_though_the_merge_took_nothing_of_them(repository):
    git(repository, "switch", "--quiet", "-c", "maintenance")
    write_package(repository, "upper", "0.1.1", "lower>=0.1,<2", entries="## 0.1.1 (2026-01-01)\n")
    fixed = commit(repository, "upper 0.1.1")
    git(repository, "switch", "--quiet", "main")
    write_package(repository, "upper", "0.2.0", "lower>=0.1,<1", entries="## 0.2.0 (2026-01-01)\n")
    newest = commit(repository, "upper 0.2.0")
    git(repository, "merge", "--quiet", "-s", "ours", "-m", "merge", "maintenance")
    versions = found(repository, UPPER)
    assert versions["0.1.1"] == (fixed, False)
    assert versions["0.2.0"] == (newest, False)


def test_a_feature_branch_that_sets_a_version_is_no_release_but_its_merge_is(repository):
    git(repository, "switch", "--quiet", "-c", "feature")
    write_package(repository, "lower", "0.1.1", entries="## 0.1.1 (2026-01-01)\n\n## 0.1.0\n")
    write_package(repository, "upper", "0.2.0", "lower>=0.1.1,<0.2", entries="## 0.2.0 (2026-01-01)\n")
    commit(repository, "upper: a new thing, which needs lower 0.1.1")
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0 (2026-01-01)\n\n## 0.1.0\n")
    write_package(repository, "upper", "0.2.0", "lower>=0.2,<1", entries="## 0.2.0 (2026-01-01)\n")
    commit(repository, "lower 0.1.1 became 0.2.0")
    git(repository, "switch", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "-m", "Merge branch 'feature'", "feature")
    merge = git(repository, "rev-parse", "HEAD").strip()
    assert found(repository, UPPER)["0.2.0"] == (merge, False)
    assert list(found(repository, LOWER)) == ["0.1.0", "0.2.0"]


def test_a_release_on_a_branch_is_where_the_command_made_it_and_not_its_merge(repository):
    git(repository, "switch", "--quiet", "-c", "release")
    write_package(repository, "lower", "0.2.0", entries="## 0.2.0 (2026-01-01)\n\n## 0.1.0\n")
    released = commit(repository, "lower 0.2.0")
    git(repository, "switch", "--quiet", "main")
    commit(repository, "other work")
    git(repository, "merge", "--quiet", "--no-ff", "-m", "Merge branch 'release'", "release")
    assert found(repository, LOWER)["0.2.0"] == (released, False)


def test_a_tag_says_more_than_the_history(repository):
    tagged = commit(repository, "released here")
    git(repository, "tag", "upper-v0.1.0")
    git(repository, "tag", "-a", "-m", "annotated", "lower-v0.1.0")
    git(repository, "tag", "upper-vnext")
    commit(repository, "later")
    assert found(repository, UPPER) == {"0.1.0": (tagged, True)}
    assert found(repository, LOWER) == {"0.1.0": (tagged, True)}


def test_a_shallow_clone_says_so_and_gives_what_it_has(repository, tmp_path):
    write_package(repository, "upper", "0.2.0", entries="## 0.2.0 (2026-01-01)\n")
    commit(repository, "upper 0.2.0")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", str(clone))
    assert not is_shallow(repository)
    assert is_shallow(clone)
    assert list(found(clone, UPPER)) == ["0.2.0"]
