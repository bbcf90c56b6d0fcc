"""Private names of torch: each is looked up when it is used, and the error that names one that is missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

__all__ = ["MissingTorchFeatureError", "private"]


class MissingTorchFeatureError(RuntimeError):
    """This torch lacks a name that a feature is built on. Everything else works without it."""


def private(owner: object, name: str, purpose: str) -> Any:
    """Return what torch calls by a private name.

    Every use of such a name goes through this function, in one named function of a package: a search for it
    finds them all, and a torch that has renamed one breaks nothing but that function.

    Args:
        owner: What has the name: the name of a module of torch, or an object.
        name: The name.
        purpose: What does not work without it, as in ``"the end of a backward pass"``.

    Raises:
        MissingTorchFeatureError: This torch does not have it.

    Cost:
        A tenth of a microsecond.

    Example:
        >>> private("torch._C", "_current_graph_task_id", "the number of a backward pass")()
        -1
    """
    try:
        if isinstance(owner, str):
            owner = sys.modules.get(owner) or importlib.import_module(owner)
        return getattr(owner, name)
    except (ImportError, AttributeError):
        where = owner if isinstance(owner, str) else getattr(owner, "__name__", type(owner).__name__)
        raise MissingTorchFeatureError(
            f"torch {torch.__version__} has no {where}.{name}, which is needed for {purpose}"
        ) from None
