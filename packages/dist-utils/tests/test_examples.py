"""The examples in the docstrings and in the README run as they stand."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_utils
from dist_utils.testing import patience

MODULES = [
    module.name
    for module in pkgutil.walk_packages(dist_utils.__path__, "dist_utils.")
    if module.name != "dist_utils.testing.server"  # importing it has effects
]
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    public = {name: getattr(dist_utils, name) for name in dist_utils.__all__}
    results = doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch, **public})
    assert results.failed == 0


def _readme_block(containing):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return block


def test_the_readmes_batch_example(tmp_path):
    script = tmp_path / "batch.py"
    script.write_text(_readme_block("class Batch"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60.0),
    )
    assert done.stdout == "torch.bfloat16 torch.int64\n"


def test_the_readmes_test_on_real_ranks(tmp_path):
    (tmp_path / "test_mine.py").write_text(_readme_block("test_mine.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience(60.0)
    )
    assert done.returncode == 0, done.stdout
