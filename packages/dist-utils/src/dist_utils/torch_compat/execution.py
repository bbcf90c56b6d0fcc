"""How operations run: subnormal numbers, profilers, versions and transforms of tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from dist_utils.torch_compat.private_names import private

__all__ = [
    "every_thread",
    "flushes_denormals",
    "profiler_range",
    "tensor_version",
    "transformed_as",
]


_SUBNORMAL = 5e-324


def flushes_denormals() -> bool:
    """Return whether arithmetic on this thread treats subnormal numbers as zero.

    ``torch.set_flush_denormal`` sets this for the thread that calls it; torch has no function that reads it.
    """
    return _SUBNORMAL * 1.0 == 0.0


_NO_RANGE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that names what runs in it for a profiler, if one runs in this process.

    ``torch.profiler.record_function`` alone takes 25 microseconds where no profiler runs, this 1.5 (torch
    2.13, two busy cores). Whether a profiler runs is checked on entry, for all threads at once: one that
    ``torch.profiler.profile`` starts on any thread counts, and ``torch.autograd.profiler.emit_nvtx`` and
    ``emit_itt``. No public name up to torch 2.15; where torch does not tell, it is always recorded.

    Args:
        name: The name of the range.

    Example:
        >>> with profiler_range("mine:bucket_0"):
        ...     total = 1 + 1
    """
    return record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NO_RANGE


def every_thread() -> Any | None:
    """Return the ``experimental_config`` with which ``torch.profiler.profile`` sees every thread.

    Otherwise it sees the thread that started it, and those of ``backward()``: not an
    :class:`~dist_utils.OrderedWorker`'s. No public name up to torch 2.15.

    Returns:
        ``None`` where torch has no such option, as in 2.6.

    Raises:
        MissingTorchFeatureError: torch has renamed it.

    Example:
        >>> with torch.profiler.profile(experimental_config=every_thread()) as profiler:  # doctest: +SKIP
        ...     loss.backward()
    """
    config = private("torch._C._profiler", "_ExperimentalConfig", "a profiler that sees every thread")
    try:
        return config(profile_all_threads=True)
    except TypeError:
        return None


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written in place. No public way to read it up to torch 2.15."""
    version: int = private(tensor, "_version", "noticing writes in place")
    return version


def transformed_as(tensor: torch.Tensor) -> str:
    """Describe what transforms of ``torch.func`` and forward mode have made of a tensor; ``""`` if nothing.

    No public names for it up to torch 2.15.
    """
    purpose = "recognizing transforms of torch.func"
    is_wrapped = private("torch._C._functorch", "is_functorch_wrapped_tensor", purpose)
    is_batch = private("torch._C._functorch", "is_batchedtensor", purpose)
    dimension = private("torch._C._functorch", "maybe_get_bdim", purpose)
    unwrapped = private("torch._C._functorch", "get_unwrapped", purpose)
    found = []
    while True:
        dual: Any = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            found.append("with a tangent")
        if not is_wrapped(tensor):
            return ", ".join(found)
        inner = unwrapped(tensor)
        if is_batch(tensor):
            found.append(f"a batch of {inner.shape[dimension(tensor)]}")
        tensor = inner
