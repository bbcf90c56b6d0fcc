"""The examples in the docstrings and in the README run as they stand."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import dist_utils

MODULES = [f"dist_utils.{module.name}" for module in pkgutil.iter_modules(dist_utils.__path__)]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    public = {name: getattr(dist_utils, name) for name in dist_utils.__all__}
    results = doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch, **public})
    assert results.failed == 0


def test_there_are_examples():
    found = doctest.DocTestFinder().find(importlib.import_module("dist_utils.call_arguments"))
    assert sum(len(test.examples) for test in found) >= 3
