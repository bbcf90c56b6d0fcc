"""The arguments of a call: cast together, or packed into one flat tuple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dist_utils.containers.apply import apply_to_tensors

__all__ = ["cast_forward_inputs", "pack_kwargs", "unpack_kwargs"]


def cast_forward_inputs(
    dtype: torch.dtype | None, /, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast every floating-point tensor in the arguments of a call.

    Args:
        dtype: What to cast to; ``None`` for no cast. Positional only, so that the call may have a
            ``dtype=`` of its own.
        *args: Positional arguments, with containers as in :func:`apply_to_tensors`.
        **kwargs: Keyword arguments, likewise.

    Returns:
        ``(args, kwargs)``. Autograd sees the casts. Integer, bool and complex tensors, and tensors that
        have the dtype, are the same objects.

    Raises:
        TypeError: ``dtype`` is not a dtype.
        ValueError: A container contains itself.

    Source:
        ``torch.distributed.utils._cast_forward_inputs``.

    Example:
        >>> cast_forward_inputs(torch.bfloat16, torch.ones(1), ids=torch.tensor([7]))
        ((tensor([1.], dtype=torch.bfloat16),), {'ids': tensor([7])})
    """
    if dtype is None:
        return args, kwargs
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the first argument of cast_forward_inputs must be a dtype, got {dtype!r}")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, (args, kwargs))


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Put the arguments of a call into one flat tuple, for functions that take positional arguments only.

    Returns:
        ``(flat_args, kwarg_keys)``, the positional arguments followed by the keyword arguments' values, and
        the keyword names in the same order. :func:`unpack_kwargs` is the inverse.

    Source:
        ``torch.distributed.utils._pack_kwargs``.

    Example:
        >>> pack_kwargs(1, 2, a=3)
        ((1, 2, 3), ('a',))
    """
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(
    flat_args: Sequence[Any], kwarg_keys: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take apart what :func:`pack_kwargs` put together.

    Args:
        flat_args: Positional arguments, then values of keyword arguments.
        kwarg_keys: The names of the last ``len(kwarg_keys)`` of them.

    Returns:
        ``(args, kwargs)``.

    Raises:
        ValueError: There are more names than arguments, or a name occurs twice.

    Source:
        ``torch.distributed.utils._unpack_kwargs``, which drops values under a repeated name.

    Example:
        >>> unpack_kwargs((1, 2, 3), ("a",))
        ((1, 2), {'a': 3})
    """
    if len(kwarg_keys) > len(flat_args):
        raise ValueError(f"{len(kwarg_keys)} keyword names for {len(flat_args)} arguments: {kwarg_keys}")
    if len(set(kwarg_keys)) != len(kwarg_keys):
        raise ValueError(f"a keyword name occurs twice: {kwarg_keys}")
    first = len(flat_args) - len(kwarg_keys)
    return tuple(flat_args[:first]), dict(zip(kwarg_keys, flat_args[first:], strict=True))
