"""All versions that can be installed: the released ones and the checkout's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from releasing.pairs import Catalog, Needs
from releasing.released import Release, releases
from releasing.wheels import pyproject_at, released_wheel, tree_wheel, version_in_tree
from releasing.workspace import Package, packages, sibling_ranges

CHECKOUT = "checkout"


@dataclass
class Known:
    """Every version of every package that can be installed here.

    Attributes:
        catalog: The requirements of each version.
        test_needs: The siblings that each version and its tests need.
        commits: The commit with the tests of each released version.
        tree: The versions in the checkout.
        missing: Released versions whose wheel can no longer be built, with the reason.
    """

    catalog: dict[str, dict[Version, Needs]] = field(default_factory=dict)
    test_needs: dict[tuple[str, Version], Needs] = field(default_factory=dict)
    commits: dict[tuple[str, Version], str] = field(default_factory=dict)
    tree: dict[str, Version] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def catalog_for_tests(self, name: str, version: Version) -> Catalog:
        """Return the catalog in which one version of one package also has the requirements of its tests."""
        needs = self.test_needs.get((name, version), self.catalog[name][version])
        return {**self.catalog, name: {**self.catalog[name], version: needs}}

    def sources(self, versions: Mapping[str, Version]) -> dict[str, str]:
        """Return the source of each of ``versions``: a commit, or ``checkout``."""
        return {name: self.commits.get((name, version), CHECKOUT)[:12] for name, version in versions.items()}


Wanted = Callable[["Known"], set[tuple[str, Version]]]
"""Chooses the versions to install among all known versions."""


def every_version(known: Known) -> set[tuple[str, Version]]:
    """Return all versions of all packages."""
    return {(name, version) for name, versions in known.catalog.items() for version in versions}


def collect(root: Path, wheels: Path, wanted: Wanted = every_version) -> Known:
    """Read the requirements of all released versions and the checkout, and build the wanted wheels.

    Args:
        root: The repository.
        wheels: The folder that contains exactly these wheels afterwards. Those of released versions are kept
            in its folder ``by-commit``.
        wanted: Called again after a version that it wanted could not be built and was removed.
    """
    known, released = _read(root)
    for stale in wheels.glob("*.whl"):
        stale.unlink()
    built: set[tuple[str, Version]] = set()
    while todo := wanted(known) - built:
        for name, version in sorted(todo):
            release = released.get((name, version))
            try:
                if release is None:
                    tree_wheel(root, Package(name), version, wheels)
                else:
                    shutil.copy2(released_wheel(root, release, wheels / "by-commit"), wheels)
            except RuntimeError as error:
                if release is None:
                    raise
                known.missing[f"{name} {version}"] = str(error).strip().splitlines()[-1]
                del known.catalog[name][version]
        built |= todo
    return known


def _read(root: Path) -> tuple[Known, dict[tuple[str, Version], Release]]:
    known, found = Known(), dict[tuple[str, Version], Release]()
    names = [package.name for package in packages(root)]
    for package in packages(root):
        released = releases(root, package)
        texts = {release.version: pyproject_at(root, release) for release in released}
        version = known.tree[package.name] = version_in_tree(root, package, released)
        if version not in texts:
            texts[version] = (root / package.folder / "pyproject.toml").read_text()
        known.catalog[package.name] = {number: sibling_ranges(text, names) for number, text in texts.items()}
        for number, text in texts.items():
            known.test_needs[package.name, number] = sibling_ranges(text, names, with_tests=True)
        for release in released:
            found[package.name, release.version] = release
            known.commits[package.name, release.version] = release.commit
    return known, found
