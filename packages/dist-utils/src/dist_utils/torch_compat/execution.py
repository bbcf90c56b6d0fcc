"""Where and how a thread computes: devices, subnormal numbers, compilation."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

__all__ = ["compiling_refused", "flushes_denormals", "import_compiler", "is_accelerator", "never_traced"]

P = ParamSpec("P")
R = TypeVar("R")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is of the machine's kind of accelerator.

    torch 2.6 raises when asked for the current accelerator where there is none.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


_SUBNORMAL = 5e-324


def flushes_denormals() -> bool:
    """Return whether arithmetic on this thread treats subnormal numbers as zero.

    ``torch.set_flush_denormal`` sets this for the thread that calls it; torch has no function that reads it.
    """
    return _SUBNORMAL * 1.0 == 0.0


@contextlib.contextmanager
def compiling_refused() -> Iterator[None]:
    """Make functions under ``torch.compile`` raise instead of being compiled."""
    stance = getattr(torch.compiler, "set_stance", None)
    # Anything compiled has imported this module; importing it here would take seconds.
    with (
        contextlib.nullcontext()
        if stance is None or "torch._dynamo" not in sys.modules
        else stance("fail_on_recompile")
    ):
        yield


def never_traced(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that ``torch.compile`` runs as it is, between two graphs.

    Like ``torch.compiler.disable``, which would import the compiler here, for seconds.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            untraced: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
            return untraced(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


def import_compiler() -> None:
    """Import the parts of ``torch.compile`` that the first DDP model imports, which takes 1.5 seconds.

    For a process that forks others. No public module up to torch 2.15 imports them.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
