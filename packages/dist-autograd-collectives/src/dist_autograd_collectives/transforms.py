"""Transforms of ``torch.func`` around a call, and batches of gradients, which have no public names."""

from __future__ import annotations

import contextlib

import torch

from dist_utils.torch_compat import private

__all__ = ["function_transforms_active", "is_batched_gradient", "outside_function_transforms"]

_PURPOSE = "collectives under torch.func"


def function_transforms_active() -> bool:
    """Return whether a transform of ``torch.func`` is running.

    ``torch.autograd.Function`` chooses between its two implementations by it. No public name up to torch
    2.15.
    """
    return bool(private("torch._C", "_are_functorch_transforms_active", _PURPOSE)())


def outside_function_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context for making and sending tensors as if no transform of ``torch.func`` were running.

    torch's own way to do that has no public name up to torch 2.15.
    """
    if not function_transforms_active():
        return contextlib.nullcontext()
    clear = private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack", _PURPOSE)
    context: contextlib.AbstractContextManager[object] = clear()
    return context


def is_batched_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``.

    That does not go through ``torch.func``. No public name up to torch 2.15.
    """
    purpose = "collectives in batches of gradients"
    return bool(private("torch._C._functorch", "is_legacy_batchedtensor", purpose)(tensor))
