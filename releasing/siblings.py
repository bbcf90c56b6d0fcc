"""Test packages beside the oldest and the newest sibling: ``python -m releasing.siblings [NAME ...]``.

Every package of the checkout, and the newest release of each, is installed from wheels with the siblings that
its metadata admit: once all as old, once all as new as possible. There its short suite runs (tests
marked ``short``; those of a release are taken from its commit). With names: only these packages and
those that need them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from releasing.workspace import ROOT, CommandError, Package, packages, releases, run

RESOLUTIONS = ("lowest", "highest")


@dataclass(frozen=True)
class Source:
    """The sources of one version, unpacked: a release, or the checkout as ``X.Y.Z+tree``.

    Attributes:
        package: The package, in a folder of its own.
        version: Its version.
        in_checkout: Whether these are the checkout's sources.
    """

    package: Package
    version: Version
    in_checkout: bool


def gather(root: Path, folder: Path) -> list[Source]:
    """Unpack the sources of all releases and of the checkout under ``folder``, oldest first."""
    found = []
    for release in releases(root):
        place = folder / f"{release.name}-{release.version}"
        command = ["git", "archive", "--format=zip", release.commit, f"packages/{release.name}"]
        archive = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout  # noqa: S603
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            files.extractall(place)
        package = Package(place / "packages" / release.name)
        if package.version != release.version:
            raise ValueError(f"{release} is not in its commit, which has {package.version}")
        found.append(Source(package, release.version, in_checkout=False))
    for name in packages(root):
        place = folder / name
        for file in run(["git", "ls-files", "-z", f"packages/{name}"], root).split("\0"):
            if file and (root / file).exists():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, place / file)
        package = Package(place / "packages" / name)
        version = Version(f"{package.version}+tree")  # newer than a release with the same number
        package.set_version(version)
        found.append(Source(package, version, in_checkout=True))
    return found


def build_wheels(sources: Sequence[Source], wheels: Path) -> None:
    """Build the wheel of each source; without compiled kernels, which no sibling sees."""
    env = {**os.environ, "DDP_QUANT_HOOKS_BUILD": "skip"}
    for source in sources:
        run(
            ["uv", "build", "--quiet", "--wheel", "--out-dir", str(wheels), str(source.package.folder)],
            wheels,
            env,
        )


def sources_to_test(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """Return the sources of the checkout and of the newest releases.

    With names, only those of the named packages and of packages that need one of them.
    """
    newest = {source.package.name: source for source in sources if not source.in_checkout}
    chosen = [source for source in sources if source.in_checkout or source is newest[source.package.name]]
    if not names:
        return chosen
    wanted = set(names)
    return [
        source
        for source in chosen
        if wanted & {source.package.name, *(need.name for need in source.package.needs())}
    ]


def install(
    source: Source, wheels: Path, resolution: str, names: Sequence[str], python: str
) -> dict[str, Version]:
    """Install one version with the oldest or newest siblings in range; return the versions of all.

    Raises:
        CommandError: No versions fit together.
    """

    def uv_pip(command: str, *arguments: str) -> str:
        return run(["uv", "pip", command, "--quiet", "--python", python, *arguments], wheels)

    uv_pip("uninstall", *names)
    needs = [str(need) for need in source.package.needs() if need.name in names]
    # Siblings come from these wheels alone: an index may have others of the same name.
    options = ["--no-index", "--find-links", str(wheels), "--resolution", resolution, "--prerelease", "allow"]
    # Named by its file: "==1.0.0" also admits 1.0.0+tree.
    (wheel,) = wheels.glob(f"{source.package.name.replace('-', '_')}-{source.version}-*.whl")
    uv_pip("install", *options, str(wheel), *needs)
    listed = json.loads(uv_pip("list", "--format", "json"))
    return {one["name"]: Version(one["version"]) for one in listed if one["name"] in names}


def run_short_suite(source: Source, python: str) -> str:
    """Run the short suite of a source against what is installed; return pytest's last line."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-m", "pytest", "-q", "-m", "short", "tests"]
    return run(command, source.package.folder, env).strip().splitlines()[-1]


def try_all(root: Path, names: Sequence[str], python: str = sys.executable) -> list[str]:
    """Run the short suites of the named packages, or of all, beside their siblings; return what is broken.

    Wheels are installed into the environment of ``python``, which also runs the suites.
    """
    broken = []
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch) / "wheels"
        wheels.mkdir()
        sources = gather(root, Path(scratch))
        build_wheels(sources, wheels)
        for source in sources_to_test(sources, names):
            tried: list[dict[str, Version]] = []
            for resolution in RESOLUTIONS:
                title = f"{source.package.name} {source.version} with the {resolution} siblings"
                try:
                    versions = install(source, wheels, resolution, list(packages(root)), python)
                    is_past = all(version.local is None for version in versions.values())
                    if versions in tried or is_past:
                        continue
                    tried.append(versions)
                    title = ", ".join(f"{name} {version}" for name, version in versions.items())
                    print(f"{title}: {run_short_suite(source, python)}", flush=True)
                except CommandError as error:
                    broken.append(f"{title}: {error}")
                    print(f"BROKEN {broken[-1]}", flush=True)
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a pair is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages, with those that need them; by default all")
    names, known = parser.parse_args(arguments).names, packages(ROOT)
    if unknown := set(names) - set(known):
        parser.error(f"there is no package {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return bool(try_all(ROOT, names))


if __name__ == "__main__":
    sys.exit(main())
