"""Checks of a tag: ``python -m releasing.publish NAME-vX.Y.Z`` checks it and prints the package's name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.version import Version

from releasing.commands import git
from releasing.notes import notes
from releasing.released import has_entry, releases_in_history
from releasing.workspace import ROOT, Package, packages, tree_version


def package_of_tag(tag: str, root: Path = ROOT) -> Package:
    """Return the package that ``tag`` releases, from the checkout of its commit.

    Raises:
        ValueError: The tag names no package, or the checkout is not that release: it has another version,
            its changelog has no entry for it or leaves notes for the next, or it is not the release's commit.
    """
    known = {package.name: package for package in packages(root)}
    parts = re.fullmatch(r"(?P<name>.+)-v(?P<version>\d+\.\d+\.\d+)", tag)
    if parts is None or parts["name"] not in known:
        raise ValueError(f"{tag!r} is not NAME-vX.Y.Z of one of {', '.join(known)}")
    package, version = known[parts["name"]], Version(parts["version"])
    if (here := tree_version(package, root)) != version:
        raise ValueError(f"{tag!r}, but {package.name} has version {here} here")
    if not has_entry((root / package.changelog).read_text(), version):
        raise ValueError(f"{tag!r}, but {package.changelog} has no entry for it")
    if left := [path.name for path in notes(root, package)]:
        raise ValueError(f"{tag!r}, but {', '.join(left)} came after its changelog")
    head = git(root, "rev-parse", "HEAD").strip()
    (released,) = [one.commit for one in releases_in_history(root, package) if one.version == version]
    if released != head:
        raise ValueError(f"{tag!r} is on {head[:12]}, but {version} was released from {released[:12]}")
    return package


if __name__ == "__main__":
    try:
        print(package_of_tag(sys.argv[1]).name)
    except ValueError as error:
        sys.exit(f"Nothing is published: {error}")
