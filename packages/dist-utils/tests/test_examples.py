"""The examples in the docstrings and in the README run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import dist_utils

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


def test_the_readmes_batch_example(capsys):
    exec(_readme_block("class Batch"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "torch.bfloat16 torch.int64\n"


def test_the_readmes_test_on_real_ranks(tmp_path, monkeypatch):
    (tmp_path / "test_mine.py").write_text(_readme_block("test_mine.py"))
    monkeypatch.syspath_prepend(tmp_path)  # also for the ranks
    importlib.import_module("test_mine").test_total()
