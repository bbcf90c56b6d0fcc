"""Arguments that must be tensors, lists of tensors, or whole numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

__all__ = ["check_tensor", "integers", "tensor_list"]


def check_tensor(label: str, given: Any) -> None:
    """Raise unless it is a dense tensor."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{label} must be a tensor, got {_named(given)}")
    if given.layout is not torch.strided:
        raise TypeError(f"{label} must be a dense tensor, got {given.layout}")


def tensor_list(label: str, given: Any) -> list[torch.Tensor]:
    """Return a list of dense tensors; raises if it is none."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{label} must be a list or tuple of tensors, got {_named(given)}")
    for index, entry in enumerate(given):
        check_tensor(f"{label}[{index}]", entry)
    return list(given)


def integers(label: str, given: Any) -> list[Any]:
    """Return whole numbers; raises if it is anything else."""
    if isinstance(given, torch.Tensor):
        raise TypeError(f"{label} must be integers, got a tensor: pass tensor.tolist()")
    if isinstance(given, str):
        raise TypeError(f"{label} must be integers, got {given!r}")
    try:
        # Symbolic ones, of torch.compile, stay what they are.
        return [size if isinstance(size, torch.SymInt) else operator.index(size) for size in given]
    except TypeError as error:
        raise TypeError(f"{label} must be integers, got {given!r}") from error


def _named(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
