"""What a tag says: ``python -m releasing.publish NAME-vX.Y.Z`` checks it and prints the package's name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from releasing.workspace import ROOT, Package, packages, tree_version


def package_of_tag(tag: str, root: Path = ROOT) -> Package:
    """Return the package that ``tag`` releases.

    Raises:
        ValueError: It is no package's tag, or the checkout has another version of it.
    """
    known = {package.name: package for package in packages(root)}
    parts = re.fullmatch(r"(?P<name>.+)-v(?P<version>\d+\.\d+\.\d+)", tag)
    if parts is None or parts["name"] not in known:
        raise ValueError(f"{tag!r} is not NAME-vX.Y.Z of one of {', '.join(known)}")
    package = known[parts["name"]]
    if (version := str(tree_version(package, root))) != parts["version"]:
        raise ValueError(f"{tag!r}, but {package.name} has version {version} here")
    return package


if __name__ == "__main__":
    try:
        print(package_of_tag(sys.argv[1]).name)
    except ValueError as error:
        sys.exit(f"Nothing is published: {error}")
