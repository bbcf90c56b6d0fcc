"""Pairs of a package and a sibling that it needs, in all known versions, and which versions fit together.

Computed from metadata only; nothing is installed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

Needs = Mapping[str, SpecifierSet]
"""The range of each sibling that one version of a package needs."""

Catalog = Mapping[str, Mapping[Version, Needs]]
"""For each package, the requirements of each known version."""


@dataclass(frozen=True)
class Pair:
    """One version of a package and one version of a sibling that it needs.

    Attributes:
        dependent: The package that needs the other one.
        dependent_version: Its version.
        sibling: The package that is needed.
        sibling_version: Its version.
        range: The sibling's range in the dependent's metadata.
        admitted: Whether the sibling's version is in that range.
    """

    dependent: str
    dependent_version: Version
    sibling: str
    sibling_version: Version
    range: SpecifierSet
    admitted: bool

    @property
    def pins(self) -> dict[str, Version]:
        """Both versions, by package."""
        return {self.dependent: self.dependent_version, self.sibling: self.sibling_version}


def admits(needed: SpecifierSet, version: Version) -> bool:
    """Return whether ``version`` is in a range; ``0.5.0+tree`` counts as 0.5.0."""
    return needed.contains(Version(version.public), prereleases=True)


def all_pairs(catalog: Catalog) -> list[Pair]:
    """Return every pair of versions of packages that need each other, in range or not."""
    return [
        Pair(dependent, version, sibling, other, needed, admits(needed, other))
        for dependent, versions in sorted(catalog.items())
        for version, needs in sorted(versions.items())
        for sibling, needed in sorted(needs.items())
        for other in sorted(catalog[sibling])
    ]


def solve(
    catalog: Catalog, pins: Mapping[str, Version], wanted: list[str], *, oldest: bool = False
) -> dict[str, Version] | None:
    """Return the newest compatible versions of ``wanted`` and their requirements, or None.

    Args:
        catalog: The known versions.
        pins: Fixed versions.
        wanted: Packages to install.
        oldest: Return the oldest compatible versions instead.
    """
    names = list(wanted)
    for name in names:  # grows during the loop
        needed = {sibling for needs in catalog[name].values() for sibling in needs}
        names += sorted(needed - set(names))
    # Only requirements are installed; an unneeded choice must not cause a conflict.
    for chosen in _choices(catalog, pins, names, oldest=oldest):
        installed = _closure(catalog, chosen, wanted)
        if all(
            admits(needed, chosen[sibling])
            for name in installed
            for sibling, needed in catalog[name][chosen[name]].items()
        ):
            return {name: chosen[name] for name in installed}
    return None


def beside(catalog: Catalog, left: str, right: str) -> Iterator[tuple[str, str, dict[str, Version] | None]]:
    """Yield every pair of minor series of two packages with compatible versions, or None."""
    for one, other in itertools.product(series(catalog[left]), series(catalog[right])):
        narrowed = {
            name: {
                version: needs
                for version, needs in versions.items()
                if {left: one, right: other}.get(name, minor(version)) == minor(version)
            }
            for name, versions in catalog.items()
        }
        yield one, other, solve(narrowed, {}, [left, right])


def minor(version: Version) -> str:
    """Return the minor series of a version, ``0.2``."""
    return f"{version.major}.{version.minor}"


def series(versions: Mapping[Version, Needs]) -> list[str]:
    """Return the minor series of ``versions``, oldest first."""
    return list(dict.fromkeys(minor(version) for version in sorted(versions)))


def _choices(
    catalog: Catalog, pins: Mapping[str, Version], names: list[str], *, oldest: bool
) -> Iterator[dict[str, Version]]:
    candidates = [
        [pins[name]] if name in pins else sorted(catalog[name], reverse=not oldest) for name in names
    ]
    for versions in itertools.product(*candidates):
        yield dict(zip(names, versions, strict=True))


def _closure(catalog: Catalog, chosen: Mapping[str, Version], wanted: list[str]) -> list[str]:
    installed = list(wanted)
    for name in installed:  # grows during the loop
        installed += [sibling for sibling in catalog[name][chosen[name]] if sibling not in installed]
    return installed
