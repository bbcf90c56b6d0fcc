"""Notes on changes since the last release: files ``changelog.d/NAME.KIND.md`` of a package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from releasing.workspace import Package

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def kinds(root: Path) -> list[str]:
    """Return the kinds of notes that a changelog has."""
    settings = tomllib.loads((root / "towncrier.toml").read_text())
    return [kind["directory"] for kind in settings["tool"]["towncrier"]["type"]]


def notes(root: Path, package: Package) -> list[Path]:
    """Return the notes of a package, and any other files in their folder."""
    folder = root / package.folder / "changelog.d"
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def strange_notes(root: Path, package: Package) -> list[str]:
    """Return the names of files that the changelog ignores because they have no known kind."""
    name = re.compile(rf".+\.({'|'.join(kinds(root))})(\.\d+)?\.md")
    return [path.name for path in notes(root, package) if not name.fullmatch(path.name)]
