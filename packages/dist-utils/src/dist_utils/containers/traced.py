"""The walk as ``torch.compile`` can trace it: plain recursion over plain containers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["traced"]


def traced(fn: Callable[[torch.Tensor], Any], obj: Any, *, otherwise: Callable[..., Any]) -> Any:
    """Apply ``fn`` to all tensors, and ``otherwise`` to what holds them in another way."""
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
    elif hasattr(obj, "__dataclass_fields__"):  # is_dataclass cannot be traced with torch 2.6
        values = {
            field.name: traced(fn, getattr(obj, field.name), otherwise=otherwise)
            for field in dataclasses.fields(obj)
            if field.init
        }
        result = type(obj)(**values)
    else:
        result = otherwise(fn, obj)
    return result
