"""Features of tensors and their transforms that have no public names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# torch's own way to run something as if outside of torch.func; no public name up to torch 2.15.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = [
    "copy_flat",
    "function_transforms_active",
    "gradient_marks",
    "is_batched_gradient",
    "keep_versions",
    "outside_function_transforms",
    "saved_tensor_hooks",
    "tensor_version",
    "tensor_versions",
    "transformed_as",
]


# torch.autograd.Function uses it to choose between its two implementations; no public name up to torch 2.15.
function_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
"""Whether a transform of ``torch.func`` is running."""

is_batched_gradient: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # noqa: SLF001
"""Whether a tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``, which does not go through
``torch.func``. No public name up to torch 2.15."""


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written in place. No public way to read it up to torch 2.15."""
    return tensor._version  # noqa: SLF001


def tensor_versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the :func:`tensor_version` of each, in half the time."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001


def gradient_marks(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Return, for each parameter, a mark that changes if its gradient is written in place or replaced.

    The version of its ``.grad`` and that tensor's address (0 if sparse); ``None`` without a gradient.
    """
    return [
        None
        if (gradient := parameter.grad) is None
        else (gradient._version, 0 if gradient.is_sparse else gradient.data_ptr())  # noqa: SLF001
        for parameter in parameters
    ]


def saved_tensor_hooks() -> object:
    """Return the hooks that a tensor saved for backward goes through now; ``None`` if there are none.

    They differ each time a checkpoint runs its function. No public name up to torch 2.15. torch 2.6 cannot
    tell: there every call returns a different object.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001
    if top is None:
        return object()
    hooks = top(False)
    return None if hooks is None else hooks[0]


@contextlib.contextmanager
def keep_versions(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hide writes to these tensors from autograd.

    For tensors that get their own memory back in the end. No public name up to torch 2.15.
    """
    keep: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # noqa: SLF001
    with contextlib.ExitStack() as stack:
        for tensor in tensors:  # one by one: torch 2.6 accepts only one
            stack.enter_context(keep(tensor))
        yield


def outside_function_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context for making and sending tensors as if no transform of ``torch.func`` were running."""
    if not function_transforms_active():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return context


def copy_flat(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy a flat tensor's parts into tensors, one after the other, in two calls for all.

    One by one it takes three times as long. No public names for them up to torch 2.15.
    """
    parts: list[torch.Tensor] = list(torch._utils._unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call,unused-ignore] # noqa: SLF001
    if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors):  # which _foreach_copy_ does not handle
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)
    else:
        torch._foreach_copy_(tensors, parts)


def transformed_as(tensor: torch.Tensor) -> str:
    """Describe what transforms of ``torch.func`` and forward mode have made of a tensor; ``""`` if nothing.

    No public names for it up to torch 2.15.
    """
    functorch: Any = torch._C._functorch  # noqa: SLF001
    found = []
    while True:
        dual: Any = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            found.append("with a tangent")
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return ", ".join(found)
        inner = functorch.get_unwrapped(tensor)
        if functorch.is_batchedtensor(tensor):
            found.append(f"a batch of {inner.shape[functorch.maybe_get_bdim(tensor)]}")
        tensor = inner
