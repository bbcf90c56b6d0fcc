"""Two ranks started as by ``torchrun``, for frameworks that make their own process group."""

import importlib.util
import os

import pytest

from dist_utils.testing import run_ranks

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHELASTIC_RUN_ID": "frameworks",
}


def needs(package):
    """Skip a test if a framework is missing."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: nox -s frameworks")


def run_as_torchrun(fn, folder, *args):
    """Return what ``fn(*args)`` returns on each of two ranks, in ``folder``."""
    return run_ranks(_started, 2, fn, str(folder), args, backend=None, timeout=240)


def _started(_, fn, folder, args):
    os.environ.update(_OFFLINE)
    os.chdir(folder)
    return fn(*args)
