"""Which backend computes on which device, and why."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch

from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.kernels.backends import Backend
from ddp_quant_hooks.kernels.cpu import LIBRARY_VARIABLE, CpuKernels, library_path
from ddp_quant_hooks.kernels.cuda import CudaKernels

__all__ = ["backend_for", "cuda_kernels_for", "describe"]

_log = logging.getLogger(__name__)


def backend_for(device: torch.device) -> Backend:
    """Return the backend for tensors of ``device``."""
    if device.type == "cpu" and isinstance(compiled := _cpu_kernels(), CpuKernels):
        return compiled
    return cuda_kernels_for(device) or torch_ops


def cuda_kernels_for(device: torch.device) -> CudaKernels | None:
    """Return the CUDA kernels for a tensor's device, if they are in use there."""
    if device.type != "cuda":
        return None
    found = _cuda_kernels(device.index)
    return found if isinstance(found, CudaKernels) else None


def describe() -> str:
    """Say which backend computes on the CPU and on the current GPU, and why.

    Example:
        >>> print(describe())  # doctest: +SKIP
        cpu: compiled kernels with AVX-512 (of AVX-512, AVX2, SSE2), 2 thread(s)
        cuda:0: CUDA kernels for sm_90, compiled by NVRTC 13.0
        other devices: torch operators
    """
    lines = [f"cpu: {_describe_cpu()}"]
    if torch.cuda.is_available():
        current = torch.cuda.current_device()
        lines.append(f"cuda:{current}: {_describe_gpu(current)}")
    return "\n".join([*lines, "other devices: torch operators"])


@cache
def _cpu_kernels() -> CpuKernels | OSError:
    try:
        return CpuKernels()
    except OSError as error:
        if LIBRARY_VARIABLE in os.environ:
            _log.warning(
                "%s is not used, torch's operators quantize, which is slow: %s", LIBRARY_VARIABLE, error
            )
        return error


@cache
def _cuda_kernels(index: int) -> CudaKernels | str:
    """Return a GPU's kernels, or what is missing, which is logged once."""
    device = torch.device("cuda", index)
    if torch.version.cuda is None:
        return "this build of torch is not for CUDA"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        missing = f"cuda-core is not installed; {_how_to_get_it()}"
    else:
        try:
            return CudaKernels(device)
        except Exception as error:  # noqa: BLE001 - torch's operators work in any case
            missing = f"cuda-core does not work here: {error}; {_how_to_get_it()}"
    _log.warning("gradients on %s are quantized by torch's operators, which is slow: %s", device, missing)
    return missing


def _how_to_get_it() -> str:
    extra = "cuda12" if str(torch.version.cuda).startswith("12.") else "cuda"
    return f"pip install 'ddp-quant-hooks[{extra}]' has what this torch (CUDA {torch.version.cuda}) needs"


def _describe_gpu(index: int) -> str:
    found = _cuda_kernels(index)
    if isinstance(found, CudaKernels):
        return f"CUDA kernels for {found.architecture}, compiled by {found.compiler}"
    return f"torch operators: {found}"


def _describe_cpu() -> str:
    compiled = _cpu_kernels()
    if isinstance(compiled, CpuKernels):
        sets, threads = ", ".join(compiled.available), torch.get_num_threads()
        return f"compiled kernels with {compiled.instruction_set} (of {sets}), {threads} thread(s)"
    slow = "torch operators, 20 to 40 times slower"
    if library_path().exists():
        return f"{slow}: the compiled kernels do not load here: {compiled}"
    if LIBRARY_VARIABLE in os.environ:
        return f"{slow}: {LIBRARY_VARIABLE} names no file: {library_path()}"
    return (
        f"{slow}: this installation has no compiled kernels; install a C++ compiler, then: pip install "
        "--force-reinstall --no-deps --no-binary ddp-quant-hooks ddp-quant-hooks"
    )
