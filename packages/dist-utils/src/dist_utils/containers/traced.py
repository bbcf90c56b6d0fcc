"""The walk in a form that ``torch.compile`` can trace: plain recursion over plain containers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["traced"]


def traced(fn: Callable[[torch.Tensor], Any], obj: Any, *, otherwise: Callable[..., Any]) -> Any:
    """Apply ``fn`` to all tensors, and pass all other kinds of objects to ``otherwise``."""
    if isinstance(obj, torch.Tensor):
        result = fn(obj)
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        result = type(obj)(*[traced(fn, value, otherwise=otherwise) for value in obj])
    elif type(obj) in (list, tuple):
        result = type(obj)([traced(fn, value, otherwise=otherwise) for value in obj])
    elif type(obj) in (dict, OrderedDict):
        result = type(obj)([(key, traced(fn, value, otherwise=otherwise)) for key, value in obj.items()])
    elif isinstance(obj, (type(None), bool, int, float, complex, str, torch.dtype, torch.device)):
        result = obj
    elif _is_made_of_its_arguments(obj):
        values = {
            field.name: traced(fn, getattr(obj, field.name), otherwise=otherwise)
            for field in dataclasses.fields(obj)
        }
        result = type(obj)(**values)
    else:
        result = otherwise(fn, obj)
    return result


def _is_made_of_its_arguments(obj: Any) -> bool:
    """Return whether ``obj`` is a dataclass whose constructor takes everything that it holds."""
    if not hasattr(obj, "__dataclass_fields__"):  # is_dataclass cannot be traced with torch 2.6
        return False
    fields = dataclasses.fields(obj)
    if isinstance(obj, dict):  # such as transformers' ModelOutput, whose items are its fields
        names = [field.name for field in fields]
        return all(field.init for field in fields) and all(key in names for key in obj)
    return all(field.init for field in fields) and not isinstance(obj, (list, tuple, set, frozenset))
