"""Release one package: ``python -m releasing.release NAME minor|patch [--yes]``.

The release is made at HEAD in its own worktree: version, changelog, tests, sdist and wheel. A dry run
shows it and discards it; ``--yes`` moves the branch to its commit and keeps the files in ``dist/``. The
checkout is never in an intermediate state. Nothing is published: the commands for that are printed.

A version in the tree without an entry in the changelog is released as it is: it was set together with the
change that needs it. Otherwise the next minor or patch version is released.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from releasing.commands import CommandError, git, run
from releasing.notes import kinds, notes, strange_notes
from releasing.pairs import admits
from releasing.released import has_entry, is_shallow, releases
from releasing.workspace import (
    ROOT,
    VERSION_LINE,
    Package,
    packages,
    sibling_ranges,
    tree_version,
)


class ReleaseError(RuntimeError):
    """The release cannot be made; nothing was changed."""


@dataclass(frozen=True)
class Plan:
    """A planned release.

    Attributes:
        package: The package.
        old: The version in the tree.
        new: The version to release; equal to ``old`` if that was not released yet.
    """

    package: Package
    old: Version
    new: Version

    @property
    def tag(self) -> str:
        """The tag of the release."""
        return f"{self.package.name}-v{self.new}"

    def __str__(self) -> str:
        """Describe the plan in one line."""
        if self.old == self.new:
            return f"{self.package.name}: {self.new}, which the tree has and was not released yet"
        return f"{self.package.name}: {self.old} -> {self.new}"


Check = Callable[[Path, Package], None]
"""A check that runs in the release's worktree and raises CommandError if it fails."""


def bumped(version: Version, part: str) -> Version:
    """Return the next minor or patch version."""
    major, minor, patch = version.release
    return Version(f"{major}.{minor + 1}.0" if part == "minor" else f"{major}.{minor}.{patch + 1}")


def plan(root: Path, name: str, part: str) -> Plan:
    """Return the plan for a release of ``name``, or raise if it cannot be released.

    Raises:
        ReleaseError: There is no such package, the clone is shallow, HEAD is on no branch, the tree has
            changes, no changelog note says what is new, the version was released already, or a range admits
            no version that users could install.
    """
    known = {package.name: package for package in packages(root)}
    if name not in known:
        raise ReleaseError(f"there is no package {name!r}; there are {', '.join(known)}")
    package = known[name]
    if is_shallow(root):
        raise ReleaseError("this clone is shallow: what was released cannot be known")
    if branch(root) is None:
        raise ReleaseError("HEAD is on no branch that could keep the commit of the release")
    if changed := git(root, "status", "--porcelain").strip():
        raise ReleaseError(f"the tree has changes that are not committed:\n{changed}")
    if strange := strange_notes(root, package):
        known_kinds = ", ".join(kinds(root))
        raise ReleaseError(f"{', '.join(strange)}: such a name must end in .KIND.md, one of {known_kinds}")
    if not notes(root, package):
        raise ReleaseError(f"{package.folder}/changelog.d has no note that says what is new")
    old = tree_version(package, root)
    is_released = has_entry((root / package.changelog).read_text(), old)
    planned = Plan(package, old, bumped(old, part) if is_released else old)
    for past in releases(root, package):
        if past.version == planned.new:
            raise ReleaseError(f"{name} {planned.new} was released already, from {past.commit[:12]}")
    if wrong := wrong_ranges(root, planned):
        raise ReleaseError("\n".join(wrong))
    return planned


def branch(root: Path) -> str | None:
    """Return the branch that is checked out; None for a detached HEAD."""
    name = git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    return None if name == "HEAD" else name


def wrong_ranges(root: Path, planned: Plan) -> list[str]:
    """Return the dependents' ranges that exclude the new version, and its own that admit no released one.

    For its own ranges the siblings in the tree do not count, because users have only released ones. A range
    in the extra ``test`` counts: if it is wrong, neither tests nor a development install work.
    """
    names, released_name = [package.name for package in packages(root)], planned.package.name
    wrong = []
    for package in packages(root):
        text = (root / package.folder / "pyproject.toml").read_text()
        for sibling, needed in sibling_ranges(text, names, with_tests=True).items():
            if sibling == released_name and not admits(needed, planned.new):
                wrong.append(f"{package.name} needs {sibling}{needed}, which excludes {planned.new}")
            if package == planned.package:
                released = [release.version for release in releases(root, Package(sibling))]
                if not any(admits(needed, version) for version in released):
                    wrong.append(f"{package.name} needs {sibling}{needed}, of which none was released yet")
    return wrong


def write_release(root: Path, planned: Plan) -> str:
    """Set the version and build the changelog in the worktree ``root``; return the hash of the commit."""
    file = root / planned.package.version_file
    file.write_text(VERSION_LINE.sub(f'__version__ = "{planned.new}"', file.read_text(), count=1))
    towncrier = [sys.executable, "-m", "towncrier", "build", "--yes", "--config", "towncrier.toml"]
    run([*towncrier, "--dir", planned.package.folder, "--version", str(planned.new)], root)
    if left := [path.name for path in notes(root, planned.package)]:
        raise ReleaseError(f"the changelog left out {', '.join(left)}")
    _write_into_readme(root / "README.md", planned)
    git(root, "add", "--all", planned.package.folder, "README.md")
    git(root, "commit", "--quiet", "--message", f"{planned.package.name} {planned.new}")
    return git(root, "rev-parse", "HEAD").strip()


def _write_into_readme(readme: Path, planned: Plan) -> None:
    # The table of packages has one row per package, with the version in its own cell.
    row = re.compile(rf"^(\| \[{re.escape(planned.package.name)}]\(.*?\| )\d+\.\d+\.\d+(?= \|)", re.MULTILINE)
    text, rows = row.subn(rf"\g<1>{planned.new}", readme.read_text(), count=1)
    if not rows:
        raise ReleaseError(f"{readme.name} has no row of {planned.package.name} with a version")
    readme.write_text(text)


def run_alone(root: Path, package: Package) -> None:
    """Run the package's tests with only what it declares."""
    _show(["nox", "-s", f"alone({package.name})"], root)


def build_files(root: Path, package: Package) -> None:
    """Build sdist and wheel in ``dist/`` of ``root`` and test them with released siblings."""
    _show(["nox", "-s", f"wheels({package.name})", "--", "--released"], root)


def run_siblings(root: Path, _: Package) -> None:
    """Run the tree's pairs with older and newer siblings, with the new version beside released dependents."""
    _show(["nox", "-s", "siblings"], root)


def commands_to_publish(planned: Plan, onto: str, commit: str) -> str:
    """Return the commands that publish once the release's commit is on the branch ``onto``."""
    module = planned.package.module
    return (
        f"git tag {planned.tag} {commit}\n"
        f"git push origin {onto} {planned.tag}   # publish.yml builds the tag and uploads it\n"
        f"twine upload dist/{module}-{planned.new}*   # or by hand"
    )


def release(root: Path, planned: Plan, checks: Sequence[Check], *, yes: bool) -> tuple[str, str]:
    """Make and check the release in its own worktree; keep it if ``yes``. Return its commit and its changes.

    Raises:
        ReleaseError: The changelog or the README cannot be written.
        CommandError: A check failed; nothing was changed.
    """
    with worktree(root) as apart:
        commit = write_release(apart, planned)
        for check in checks:
            check(apart, planned.package)
        changes = git(apart, "show", "--stat", "--patch", "--format=%s", commit)
        if yes:
            git(root, "merge", "--quiet", "--ff-only", commit)
            if (apart / "dist").exists():
                shutil.copytree(apart / "dist", root / "dist", dirs_exist_ok=True)
    return commit, changes


@contextmanager
def worktree(root: Path) -> Iterator[Path]:
    """Yield a temporary checkout of HEAD in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        apart = Path(folder) / "release"
        git(root, "worktree", "add", "--quiet", "--detach", str(apart), "HEAD")
        try:
            yield apart
        finally:
            git(root, "worktree", "remove", "--force", str(apart))


def _show(command: list[str], folder: Path) -> None:
    print("$", " ".join(command), flush=True)
    run(command, folder)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return 1 if the release cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the package")
    parser.add_argument("part", choices=["minor", "patch"], help="the part of the version to increase")
    parser.add_argument("--yes", action="store_true", help="keep the release; without it this is a dry run")
    parser.add_argument("--unchecked", action="store_true", help="without tests and builds: to see the plan")
    options = parser.parse_args(arguments)
    if options.yes and options.unchecked:
        parser.error("--unchecked is for dry runs")
    checks = [] if options.unchecked else [run_alone, build_files, run_siblings]
    try:
        planned = plan(root, options.name, options.part)
        print(planned, flush=True)
        commit, changes = release(root, planned, checks, yes=options.yes)
    except (ReleaseError, CommandError) as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    print(changes)
    print("Publish it with:" if options.yes else "This was a dry run; --yes keeps it. Then:")
    print(commands_to_publish(planned, str(branch(root)), commit if options.yes else "COMMIT"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
