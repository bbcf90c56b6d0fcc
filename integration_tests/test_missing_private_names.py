"""Every package can be imported with a torch that lacks any of the private names that it uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parent.parent / "packages/dist-utils/tests/missing_names.py"


@pytest.mark.parametrize(
    "package", ["dist_autograd_collectives", "ddp_compress_hooks", "ddp_quant_hooks", "ddp_optim_overlap"]
)
def test_a_package_can_be_imported_without_any_of_them(package):
    run = subprocess.run([sys.executable, str(COMMAND), package], check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert {name: problem for name, problem in found["imports"].items() if problem} == {}
    assert found["bound elsewhere"] == []
