"""All versions that can be installed: those that were released, and the checkout's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from releasing.pairs import Catalog, Needs
from releasing.released import Release, releases
from releasing.wheels import pyproject_at, released_wheel, tree_wheel, version_in_tree
from releasing.workspace import packages, sibling_ranges

CHECKOUT = "checkout"


@dataclass
class Known:
    """Every version of every package that can be installed here.

    Attributes:
        catalog: What each version needs.
        test_needs: What each version and its tests need of siblings.
        commits: Where the tests of each released version are.
        tree: The versions in the checkout.
        missing: Released versions whose wheel cannot be built any more, with the reason.
    """

    catalog: dict[str, dict[Version, Needs]] = field(default_factory=dict)
    test_needs: dict[tuple[str, Version], Needs] = field(default_factory=dict)
    commits: dict[tuple[str, Version], str] = field(default_factory=dict)
    tree: dict[str, Version] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def catalog_for_tests(self, name: str, version: Version) -> Catalog:
        """Return the catalog in which one version of one package needs what its tests need, too."""
        needs = self.test_needs.get((name, version), self.catalog[name][version])
        return {**self.catalog, name: {**self.catalog[name], version: needs}}

    def sources(self, versions: Mapping[str, Version]) -> dict[str, str]:
        """Return of what each of ``versions`` is made: a commit, or ``checkout``."""
        return {name: self.commits.get((name, version), CHECKOUT)[:12] for name, version in versions.items()}


def collect(root: Path, wheels: Path) -> Known:
    """Build the wheels of all released versions and of the checkout, and read their metadata.

    Args:
        root: The repository.
        wheels: The folder that has exactly these wheels afterwards. Those of released versions are kept in
            ``by-commit`` in it.
    """
    known = Known()
    for stale in wheels.glob("*.whl"):
        stale.unlink()
    names = [package.name for package in packages(root)]
    for package in packages(root):
        released = releases(root, package)
        versions = known.catalog[package.name] = {}
        for release in released:
            _add_release(root, release, wheels, names, known)
        version = version_in_tree(root, package, released)
        if version not in versions:
            tree_wheel(root, package, version, wheels)
            text = (root / package.folder / "pyproject.toml").read_text()
            _add_needs(known, package.name, version, text, names)
        known.tree[package.name] = version
    return known


def _add_release(root: Path, release: Release, wheels: Path, names: list[str], known: Known) -> None:
    name = release.package.name
    try:
        shutil.copy2(released_wheel(root, release, wheels / "by-commit"), wheels)
    except RuntimeError as error:
        known.missing[f"{name} {release.version}"] = str(error).strip().splitlines()[-1]
        return
    _add_needs(known, name, release.version, pyproject_at(root, release), names)
    known.commits[name, release.version] = release.commit


def _add_needs(known: Known, name: str, version: Version, pyproject: str, names: list[str]) -> None:
    known.catalog[name][version] = sibling_ranges(pyproject, names)
    known.test_needs[name, version] = sibling_ranges(pyproject, names, with_tests=True)
