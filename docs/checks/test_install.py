"""A package is installed with siblings from the checkout, though strangers own their names on the index."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRANGERS = ("dist-utils", "ddp-compress-hooks")
PACKAGE = "ddp-quant-hooks"
"""Needs both."""


def _wheel(folder, name, number):
    """Write a wheel with nothing in it."""
    module = name.replace("-", "_")
    info = f"{module}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return a folder that stands for an index: torch, and strangers' packages in the siblings' ranges."""
    folder = tmp_path_factory.mktemp("index")
    _wheel(folder, "torch", version("torch").partition("+")[0])
    for name in STRANGERS:
        _wheel(folder, name, "1.9.9")
    return folder


@pytest.mark.parametrize("constraints", [["-c", "constraints.txt"], []], ids=["constraints", "none"])
def test_only_constraints_keep_strangers_packages_out(constraints, index, tmp_path):
    site = tmp_path / "site"
    # No build isolation: this environment has the build's requirements, and nothing is downloaded.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--find-links", str(index), "--target", str(site), *constraints, f"packages/{PACKAGE}"],
        cwd=ROOT,
        env={**os.environ, "PWD": str(ROOT), "DDP_QUANT_HOOKS_BUILD": "skip"},
        check=True,
    )
    found = {}
    for name in STRANGERS:
        (info,) = site.glob(f"{name.replace('-', '_')}-*.dist-info")
        origin = info / "direct_url.json"
        found[name] = json.loads(origin.read_text())["url"] if origin.exists() else "the index"
    checkout = {name: (ROOT / "packages" / name).as_uri() for name in STRANGERS}
    assert found == (checkout if constraints else dict.fromkeys(STRANGERS, "the index"))
