"""What tensors and transforms of them do not tell in public."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "function_transforms_active",
    "is_batched_gradient",
    "keep_versions",
    "saved_tensor_hooks",
    "tensor_version",
]


# torch.autograd.Function asks the same, to choose between its two ways; no public name up to torch 2.15.
function_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
"""Whether a transform of ``torch.func`` is running."""

is_batched_gradient: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # noqa: SLF001
"""Whether a tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``, which does not go through
``torch.func``. No public name up to torch 2.15."""


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written in place. No public way to read it up to torch 2.15."""
    return tensor._version  # noqa: SLF001


def saved_tensor_hooks() -> object:
    """Return the hooks that a tensor saved for backward goes through now; ``None`` if there are none.

    They are other ones each time a checkpoint runs its function. No public name up to torch 2.15. torch 2.6
    does not tell: there they seem to be other ones in every call.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001
    if top is None:
        return object()
    hooks = top(False)
    return None if hooks is None else hooks[0]


@contextlib.contextmanager
def keep_versions(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take nothing that happens to these tensors for a write: autograd finds them as it has left them.

    For tensors that get their own memory back in the end. No public name up to torch 2.15.
    """
    keep: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # noqa: SLF001
    with contextlib.ExitStack() as stack:
        for tensor in tensors:  # one by one, since torch 2.6 takes no more
            stack.enter_context(keep(tensor))
        yield
