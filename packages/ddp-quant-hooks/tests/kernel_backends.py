"""The backends that compute on the CPU, and how to choose one."""

import importlib
from contextlib import contextmanager
from unittest import mock

import pytest

from ddp_quant_hooks.kernels.cpu import CpuKernels, library_path

DISPATCH = importlib.import_module("ddp_quant_hooks.kernels.dispatch")
SETS = CpuKernels().available if library_path().exists() else []
needs_library = pytest.mark.skipif(not SETS, reason="there are no compiled kernels: no C++ compiler")


@contextmanager
def computed_by(backend):
    """Make the kernels' functions use a backend, whatever the device."""
    with mock.patch.object(DISPATCH, "backend_for", return_value=backend):
        yield
