"""The packages of a checkout, and their metadata on siblings."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """One distribution of the repository.

    Attributes:
        name: The name on a package index, for example ``dist-utils``.
    """

    name: str

    @property
    def module(self) -> str:
        """The import name."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> str:
        """Its folder, relative to the repository's root."""
        return f"packages/{self.name}"

    @property
    def version_file(self) -> str:
        """The file with its literal version."""
        return f"{self.folder}/src/{self.module}/__init__.py"

    @property
    def changelog(self) -> str:
        """Its list of released changes."""
        return f"{self.folder}/CHANGELOG.md"


def packages(root: Path = ROOT) -> list[Package]:
    """Return the packages of the checkout ``root``, by name."""
    return [Package(path.parent.name) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def metadata(pyproject: str) -> dict[str, Any]:
    """Return the ``project`` table of the text of a ``pyproject.toml``."""
    project: dict[str, Any] = tomllib.loads(pyproject)["project"]
    return project


def sibling_ranges(
    pyproject: str, names: Sequence[str], *, with_tests: bool = False
) -> dict[str, SpecifierSet]:
    """Return the version ranges of the packages among ``names`` that a ``pyproject.toml`` needs.

    Args:
        pyproject: The text of the file.
        names: The repository's packages.
        with_tests: Whether the extra ``test`` counts, too.
    """
    project = metadata(pyproject)
    texts = [*project["dependencies"], *(needs_of_tests(project) if with_tests else [])]
    ranges: dict[str, SpecifierSet] = {}
    for need in map(Requirement, texts):
        if (name := canonicalize_name(need.name)) in names:
            ranges[name] = ranges.get(name, SpecifierSet()) & need.specifier
    return ranges


def needs_of_tests(project: Mapping[str, Any]) -> list[str]:
    """Return the requirements of the extra ``test`` of a ``project`` table."""
    needs: list[str] = project.get("optional-dependencies", {}).get("test", [])
    return needs


def literal_version(text: str) -> Version | None:
    """Return the version in the text of an ``__init__.py``, or None."""
    found = VERSION_LINE.search(text)
    return Version(found[1]) if found else None


def tree_version(package: Package, root: Path = ROOT) -> Version:
    """Return the version of ``package`` in the checkout ``root``.

    Raises:
        ValueError: The package's ``__init__.py`` sets none.
    """
    version = literal_version((root / package.version_file).read_text())
    if version is None:
        raise ValueError(f'{package.version_file} has no line __version__ = "X.Y.Z"')
    return version
