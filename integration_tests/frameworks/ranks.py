"""Two ranks started as by ``torchrun``, for frameworks that make their own process group."""

import importlib.util
import os

import pytest
import torch

from dist_utils.testing import run_ranks

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TORCHELASTIC_RUN_ID": "frameworks",
}


def needs(package):
    """Skip a test if a framework is missing."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: nox -s frameworks")


def run_as_torchrun(fn, folder, *args):
    """Return what ``fn(*args)`` returns on each of two ranks, in ``folder``."""
    return run_ranks(
        _started, 2, fn, str(folder), args, {"CUDA_VISIBLE_DEVICES": ""}, backend=None, timeout=240
    )


def run_on_gpus(fn, folder, *args):
    """Return what ``fn(*args)`` returns on each of two nodes with a GPU, which may be the same one."""
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return run_ranks(_started, 2, fn, str(folder), args, environ, backend=None, timeout=240)


def _started(rank, fn, folder, args, environ):
    os.environ.update(_OFFLINE | environ)
    if "LOCAL_RANK" in environ:
        os.environ["GROUP_RANK"] = str(rank)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank % torch.cuda.device_count())
    os.chdir(folder)
    return fn(*args)
