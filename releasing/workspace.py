"""The packages of a checkout, and what was released of each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
RELEASES = "releasing/releases.txt"
VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class CommandError(RuntimeError):
    """A program failed; the message contains its output."""


def run(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a program in ``folder`` and return what it wrote to stdout.

    Raises:
        CommandError: It exits with a nonzero code.
    """
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise CommandError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Release:
    """One line of the file of releases."""

    name: str
    version: Version
    commit: str


def releases(root: Path = ROOT) -> list[Release]:
    """Return what was released, oldest first."""
    lines = (root / RELEASES).read_text().splitlines()
    fields = [line.split() for line in lines if line and not line.startswith("#")]
    return [Release(name, Version(version), commit) for name, version, commit in fields]


@dataclass(frozen=True)
class Package:
    """One distribution, in a checkout or in sources that were unpacked.

    Attributes:
        folder: The folder with its ``pyproject.toml``.
    """

    folder: Path

    @property
    def project(self) -> dict[str, Any]:
        """The ``project`` table of its metadata."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def name(self) -> str:
        """The name on a package index, such as ``dist-utils``."""
        return str(self.project["name"])

    @property
    def version_file(self) -> Path:
        """The file with its literal version."""
        return self.folder / "src" / self.name.replace("-", "_") / "__init__.py"

    @property
    def version(self) -> Version:
        """The version in its sources."""
        found = VERSION_LINE.search(self.version_file.read_text())
        if found is None:
            raise ValueError(f'{self.version_file} has no line __version__ = "X.Y.Z"')
        return Version(found[1])

    def set_version(self, version: Version | str) -> None:
        """Write a version into its sources."""
        file = self.version_file
        file.write_text(VERSION_LINE.sub(f'__version__ = "{version}"', file.read_text(), count=1))

    def needs(self) -> list[Requirement]:
        """Return what it and its tests need."""
        tests = self.project.get("optional-dependencies", {}).get("test", [])
        return [Requirement(text) for text in [*self.project["dependencies"], *tests]]


def packages(root: Path = ROOT) -> dict[str, Package]:
    """Return the packages of a checkout, by name."""
    found = [Package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]
    return {package.name: package for package in found}


def admits(needed: SpecifierSet, version: Version) -> bool:
    """Return whether a version is in a range, pre-releases included."""
    return needed.contains(version, prereleases=True)
