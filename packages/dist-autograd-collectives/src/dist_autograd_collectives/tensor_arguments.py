"""Arguments that must be tensors, lists of tensors, or whole numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from dist_autograd_collectives.transforms import function_transforms_active

__all__ = ["check_tensor", "integers", "tensor_list"]


def check_tensor(label: str, given: Any) -> None:
    """Raise unless it is a dense tensor with memory, or one made by a transform or a compiler."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{label} must be a tensor, got {_named(given)}")
    if given.layout is not torch.strided:
        raise TypeError(f"{label} must be a dense tensor, got {given.layout}")
    if given.is_nested or given.is_quantized:
        raise TypeError(
            f"{label} must be a dense tensor, got a {'nested' if given.is_nested else 'quantized'} one"
        )
    if type(given).__name__ == "DTensor":  # by name: importing its module takes long
        raise TypeError(f"{label} must be a tensor of this rank, got a DTensor: see its to_local()")
    if not _has_memory(given):
        raise ValueError(f"{label} has no memory: its storage was freed")


def _has_memory(tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or function_transforms_active():
        return True
    return not tensor.numel() or tensor.device.type == "meta" or bool(tensor.untyped_storage().nbytes())


def tensor_list(label: str, given: Any) -> list[torch.Tensor]:
    """Return a list of dense tensors; raises if it is anything else."""
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
        # Symbolic integers of torch.compile stay symbolic.
        return [size if isinstance(size, torch.SymInt) else operator.index(size) for size in given]
    except TypeError as error:
        raise TypeError(f"{label} must be integers, got {given!r}") from error


def _named(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
