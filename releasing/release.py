"""Release one package: ``python -m releasing.release NAME minor|patch|major [--yes]``.

The release is made in a worktree of its own: version, changelog, checks, a line in releasing/releases.txt. A
dry run shows it and discards it; ``--yes`` moves the branch to it. Nothing is published: the commands
for that are printed.

A version in the tree that was not released yet is released as it is, without a suffix such as ``.dev0``: it
was set together with the change that needs it. Otherwise the next version is.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.version import Version

from releasing.workspace import (
    RELEASES,
    ROOT,
    CommandError,
    Package,
    admits,
    packages,
    releases,
    run,
    tomllib,
)

PARTS = ("major", "minor", "patch")
Check = Callable[[Path, str], None]
"""Checks the release of a package in a worktree; raises CommandError if it is not to be released."""


class ReleaseError(RuntimeError):
    """The release cannot be made; nothing was changed."""


def next_version(root: Path, name: str, part: str) -> Version:
    """Return the version to release.

    Raises:
        ReleaseError: It would be wrong for users, or the checkout is not in a state to release.
    """
    known = packages(root)
    if name not in known:
        raise ReleaseError(f"there is no package {name!r}; there are {', '.join(known)}")
    if run(["git", "rev-parse", "--abbrev-ref", "HEAD"], root).strip() == "HEAD":
        raise ReleaseError("HEAD is on no branch that could keep the commit of the release")
    if changed := run(["git", "status", "--porcelain"], root).strip():
        raise ReleaseError(f"the tree has changes that are not committed:\n{changed}")
    _require_notes(root, known[name])
    released = [release.version for release in releases(root) if release.name == name]
    version = Version(known[name].version.base_version)
    if version in released:
        fields = list(version.release)
        index = PARTS.index(part)
        fields[index:] = [fields[index] + 1, *[0] * (len(fields) - index - 1)]
        version = Version(".".join(map(str, fields)))
    if version in released:
        raise ReleaseError(f"{name} {version} was released already")
    if run(["git", "tag", "--list", f"{name}-v{version}"], root):
        raise ReleaseError(f"the tag {name}-v{version} exists, but {RELEASES} has no such release")
    _require_ranges(root, known[name], version)
    return version


def _require_notes(root: Path, package: Package) -> None:
    settings = tomllib.loads((root / "towncrier.toml").read_text())["tool"]["towncrier"]
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    notes = [path.name for path in notes_of(package)]
    # towncrier leaves out a file of another kind without a word.
    if strange := [name for name in notes if not re.fullmatch(rf".+\.({kinds})(\.\d+)?\.md", name)]:
        raise ReleaseError(f"{', '.join(strange)}: a note's name ends in .KIND.md, one of {kinds}")
    if not notes:
        raise ReleaseError(f"packages/{package.name}/changelog.d has no note that says what is new")


def notes_of(package: Package) -> list[Path]:
    """Return the notes on what changed since the last release."""
    folder = package.folder / "changelog.d"
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def _require_ranges(root: Path, package: Package, version: Version) -> None:
    """Refuse ranges that exclude the new version, and those in which users find no released sibling."""
    known = packages(root)
    wrong = [
        f"{other.name} needs {need}, which excludes {version}"
        for other in known.values()
        for need in other.needs()
        if need.name == package.name and not admits(need.specifier, version)
    ]
    for need in [need for need in package.needs() if need.name in known]:
        available = [release.version for release in releases(root) if release.name == need.name]
        if not any(admits(need.specifier, one) for one in available):
            wrong.append(f"{package.name} needs {need}, of which none was released yet")
        if notes_of(known[need.name]):  # the checkout's tests run with the checkout's siblings
            wrong.append(f"{package.name} needs {need.name}, which has unreleased changes: release it first")
    if wrong:
        raise ReleaseError("\n".join(dict.fromkeys(wrong)))


def write_release(root: Path, name: str, version: Version) -> str:
    """Commit version and changelog, then the line in the file of releases; return the first commit."""
    package = packages(root)[name]
    package.set_version(version)
    _write_address(root, package)
    towncrier = [sys.executable, "-m", "towncrier", "build", "--yes", "--config", "towncrier.toml"]
    run([*towncrier, "--dir", f"packages/{name}", "--version", str(version)], root)
    if left := [path.name for path in notes_of(package)]:
        raise ReleaseError(f"the changelog left out {', '.join(left)}")
    commit = _commit(root, f"{name} {version}")
    file = root / RELEASES
    file.write_text(f"{file.read_text()}{name} {version} {commit}\n")
    _commit(root, f"{name} {version} is in the file of releases")
    return commit


def _write_address(root: Path, package: Package) -> None:
    """Write where the repository is into the package's metadata, if the root's ``pyproject.toml`` says it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["torch-dist-extras"]
    file = package.folder / "pyproject.toml"
    text = re.sub(r"\[project\.urls\]\n(?:\S.*\n)*\n", "", file.read_text())
    if settings["repository"]:
        address = f"{settings['repository']}/tree/main/packages/{package.name}"
        text = re.sub(
            r"^(?=\[tool\.)", f'[project.urls]\nSource = "{address}"\n\n', text, count=1, flags=re.MULTILINE
        )
    file.write_text(text)


def _commit(root: Path, message: str) -> str:
    run(["git", "add", "--all"], root)
    run(["git", "commit", "--quiet", "--message", message], root)
    return run(["git", "rev-parse", "HEAD"], root).strip()


def release(root: Path, name: str, version: Version, checks: Sequence[Check], *, yes: bool) -> str:
    """Make and check the release apart; move the branch to it if ``yes``. Return its commit.

    Raises:
        ReleaseError: The changelog cannot be written.
        CommandError: A check failed. Nothing was changed.
    """
    with _worktree(root) as apart:
        commit = write_release(apart, name, version)
        print(run(["git", "show", "--stat", "--patch", "--format=%s", commit], apart))
        for check in checks:
            check(apart, name)
        if yes:
            head = run(["git", "rev-parse", "HEAD"], apart).strip()
            run(["git", "merge", "--quiet", "--ff-only", head], root)
    return commit


@contextmanager
def _worktree(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        apart = Path(folder) / "release"
        run(["git", "worktree", "add", "--quiet", "--detach", str(apart), "HEAD"], root)
        try:
            yield apart
        finally:
            run(["git", "worktree", "remove", "--force", str(apart)], root)


def run_sessions(root: Path, name: str) -> None:
    """Test the package with only what it declares, build its files, and try it beside released siblings."""
    for session in ([f"alone({name})"], ["build", "--", name], ["siblings", "--", name]):
        print("$ nox -s", *session, flush=True)
        run(["nox", "-s", *session], root)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return 1 if the release cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the package")
    parser.add_argument("part", choices=PARTS, help="the part of the version to increase")
    parser.add_argument("--yes", action="store_true", help="keep the release; without it this is a dry run")
    parser.add_argument("--unchecked", action="store_true", help="a dry run without tests: to see the plan")
    options = parser.parse_args(arguments)
    if options.yes and options.unchecked:
        parser.error("--unchecked is for dry runs")
    try:
        version = next_version(root, options.name, options.part)
        checks = [] if options.unchecked else [run_sessions]
        commit = release(root, options.name, version, checks, yes=options.yes)
    except (ReleaseError, CommandError) as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    tag = f"{options.name}-v{version}"
    print("Publish it with:" if options.yes else "This was a dry run; --yes keeps it. Then:")
    print(f"git tag {tag} {commit if options.yes else 'COMMIT'}")
    print(f"git push --atomic origin HEAD {tag}   # .github/workflows/publish.yml builds and uploads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
