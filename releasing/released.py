"""Released versions of a package, found in the history of the repository.

A version's commit is that of its tag ``NAME-vX.Y.Z``. Without such a tag, it is the first commit on any
branch that has the version as its literal ``__version__``, an entry for it in the changelog, and the release
command's subject ``NAME X.Y.Z``; any branch, because maintenance branches are merged for their versions.
Without such a commit, it is the first one with another subject on the branch itself, along first parents,
because commits of merged branches are work on a version, not the version. A number alone is not a release: it
may change before its entry is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from releasing.commands import git
from releasing.workspace import Package, literal_version

# "## 0.1.0 (not released)" does not count as an entry.
ENTRY = re.compile(r"^## (\d+\.\d+\.\d+)(?! \(not released\))\b", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """One released version and where its sources are.

    Attributes:
        package: The package.
        version: Its number.
        commit: The full hash.
        tagged: Whether a tag marks the commit; otherwise the commit set the version.
    """

    package: Package
    version: Version
    commit: str
    tagged: bool


def is_shallow(root: Path) -> bool:
    """Return whether the clone lacks part of its history, so that untagged versions may be missing."""
    return git(root, "rev-parse", "--is-shallow-repository").strip() == "true"


def releases(root: Path, package: Package) -> list[Release]:
    """Return the released versions of ``package``, oldest first.

    In a shallow clone, only those that its tags and its part of the history show; see :func:`is_shallow`.
    """
    found = {release.version: release for release in releases_in_history(root, package)}
    found.update((release.version, release) for release in _tagged(root, package))
    return sorted(found.values(), key=lambda release: release.version)


def releases_in_history(root: Path, package: Package) -> list[Release]:
    """Return the released versions of ``package`` as :func:`releases` does, but ignore tags."""
    log = git(root, "log", "--topo-order", "--reverse", "--format=%H %s", "HEAD").splitlines()
    subjects = dict(line.split(" ", 1) for line in log)
    branch = set(git(root, "rev-list", "--first-parent", "HEAD").split())
    commits = list(subjects)
    sources = files_at(root, commits, package.version_file)
    changelogs = files_at(root, commits, package.changelog)
    by_command: dict[Version, str] = {}
    on_branch: dict[Version, str] = {}
    for commit, source, changelog in zip(commits, sources, changelogs, strict=True):
        version = literal_version(source or "")
        if version is None or not has_entry(changelog or "", version):
            continue
        if subjects[commit].split(":")[0] == f"{package.name} {version}":
            by_command.setdefault(version, commit)
        if commit in branch:
            on_branch.setdefault(version, commit)
    found = on_branch | by_command
    return [Release(package, version, commit, tagged=False) for version, commit in found.items()]


def has_entry(changelog: str, version: Version) -> bool:
    """Return whether the text of a changelog says that ``version`` was released."""
    return str(version) in ENTRY.findall(changelog)


def files_at(root: Path, commits: list[str], path: str) -> list[str | None]:
    """Return the text of one file at each of ``commits``; None where it does not exist."""
    answer = git(root, "cat-file", "--batch", text="".join(f"{commit}:{path}\n" for commit in commits))
    raw, texts, position = answer.encode(), list[str | None](), 0
    for _ in commits:
        header_end = raw.index(b"\n", position)
        header = raw[position:header_end].split()
        position = header_end + 1
        if header[-1] == b"missing":
            texts.append(None)
            continue
        size = int(header[-1])
        texts.append(raw[position : position + size].decode())
        position += size + 1
    return texts


def _tagged(root: Path, package: Package) -> list[Release]:
    prefix = f"{package.name}-v"
    lines = git(root, "tag", "--list", f"{prefix}*", "--format=%(refname:short) %(objectname) %(*objectname)")
    found = []
    for line in lines.splitlines():
        tag, *objects = line.split()
        try:
            version = Version(tag.removeprefix(prefix))
        except InvalidVersion:
            continue
        found.append(Release(package, version, objects[-1], tagged=True))  # an annotated tag's commit is last
    return found
