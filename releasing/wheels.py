"""Wheels of released versions and of the checkout, built once each and kept in a folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

from releasing.commands import CommandError, git, run
from releasing.released import Release, files_at
from releasing.workspace import VERSION_LINE, Package, tree_version


def export(root: Path, package: Package, commit: str, folder: Path) -> Path:
    """Write ``package`` as it was at ``commit`` under ``folder``; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{package.name}.tar"
    git(root, "archive", f"--output={archive}", commit, package.folder)
    run(["tar", "--extract", "--file", str(archive)], folder)
    archive.unlink()
    return folder / package.folder


def export_tree(root: Path, package: Package, folder: Path, version: Version) -> Path:
    """Copy the files of ``package`` that git knows from the checkout, with another version."""
    for name in git(root, "ls-files", "-z", package.folder).split("\0"):
        if name and (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    file = folder / package.version_file
    file.write_text(VERSION_LINE.sub(f'__version__ = "{version}"', file.read_text(), count=1))
    return folder / package.folder


def version_in_tree(root: Path, package: Package, released: list[Release]) -> Version:
    """Return the version of the checkout's package; ``X.Y.Z+tree`` if it differs from the released X.Y.Z."""
    version = tree_version(package, root)
    for release in released:
        if release.version == version and _differs(root, package, release.commit):
            return Version(f"{version}+tree")
    return version


def released_wheel(root: Path, release: Release, cache: Path) -> Path:
    """Return the wheel of a released version, from ``cache``, from the index, or built now.

    The cache has one folder per commit, so a version whose commit or tag has changed is built again. The
    index is asked only if ``RELEASED_FROM_INDEX`` is set, because the names on it must be ours, and only for
    tagged versions.

    Raises:
        CommandError: The wheel cannot be built, or the index cannot be reached.
    """
    if release.tagged and os.environ.get("RELEASED_FROM_INDEX"):
        downloaded = cache / f"{release.commit}-from-index"
        if (wheel := find(downloaded, release) or _download(release, downloaded)) is not None:
            return wheel
    built = cache / release.commit
    if (wheel := find(built, release)) is not None:
        return wheel
    with tempfile.TemporaryDirectory() as sources:
        return build(export(root, release.package, release.commit, Path(sources)), built)


def _download(release: Release, folder: Path) -> Path | None:
    """Download the index's wheel of ``release`` to ``folder``; None if it has none for this platform."""
    wanted = f"{release.package.name}=={release.version}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", "."]
    try:
        run([*command, wanted], folder)
    except CommandError as error:
        if "No matching distribution found" not in str(error):
            raise
        print(f"{wanted}: not on the index, built from {release.commit[:12]}", flush=True)
        return None
    print(f"{wanted}: from the index", flush=True)
    return find(folder, release)


def tree_wheel(root: Path, package: Package, version: Version, folder: Path) -> Path:
    """Rebuild the wheel of the checkout's ``package`` as ``version`` in ``folder``."""
    with tempfile.TemporaryDirectory() as sources:
        return build(export_tree(root, package, Path(sources), version), folder)


def build(sources: Path, folder: Path) -> Path:
    """Build a wheel of the package in ``sources`` in ``folder`` and return it."""
    with tempfile.TemporaryDirectory() as made:
        run(["uv", "build", "--quiet", "--wheel", "--out-dir", made, str(sources)], sources)
        (wheel,) = Path(made).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, folder / wheel.name))


def find(folder: Path, release: Release) -> Path | None:
    """Return the wheel of ``release`` in ``folder``."""
    name = f"{release.package.module}-{release.version}-*.whl"
    return next(iter(sorted(folder.glob(name))), None)


def _differs(root: Path, package: Package, commit: str) -> bool:
    """Return whether the contents of the checkout's wheel would differ from those at ``commit``."""
    # Nearly all files affect it: the README is its description, and build scripts make its machine code.
    left_out = [f":(exclude){package.folder}/{part}" for part in ("tests", "changelog.d", "CHANGELOG.md")]
    return bool(git(root, "diff", "--name-only", commit, "--", package.folder, *left_out).strip())


def pyproject_at(root: Path, release: Release) -> str:
    """Return the text of the release's ``pyproject.toml``."""
    (text,) = files_at(root, [release.commit], f"{release.package.folder}/pyproject.toml")
    if text is None:
        raise ValueError(f"{release.package.name} {release.version} has no pyproject.toml")
    return text
