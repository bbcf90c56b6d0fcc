"""Bitwise comparisons: of two values on one rank, and of one value on all ranks."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dist_utils.containers.kinds import KINDS
from dist_utils.module_state.broadcasts import class_handles_memory
from dist_utils.process_groups.groups import GroupLike, resolve_group
from dist_utils.process_groups.messages import all_gather_plain


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are bitwise equal: tensors, or containers of them.

    Tensors must have one dtype, shape and layout, and the same bits, those of NaN and of negative zero
    included; their strides and devices may differ. Mappings must have their keys in one order.

    Args:
        left: A tensor or NumPy array, a container that :func:`dist_utils.apply_to_tensors` walks, or anything
            else, which is compared by its ``repr``.
        right: Likewise.

    Raises:
        TypeError: A part is an iterator, a module or an optimizer, whose ``repr`` does not show its contents,
            or a tensor of a class that handles its memory itself, such as a ``DTensor``.

    Example:
        >>> same_bits({"a": torch.tensor([0.0, float("nan")])}, {"a": torch.tensor([0.0, float("nan")])})
        True
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    return all(one == other for one, other in itertools.zip_longest(_parts(left), _parts(right)))


def same_on_all_ranks(values: Any, group: GroupLike = None) -> bool:
    """Return whether all ranks hold bitwise identical values; all ranks get the same answer.

    Args:
        values: As for :func:`same_bits`.
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.

    Raises:
        TypeError: As :func:`same_bits`, on a rank that has such a part; the others wait for it.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        Collective: two small all-gathers. Tensors are copied to the CPU and hashed there.

    Example:
        >>> assert same_on_all_ranks(model.state_dict())  # doctest: +SKIP
    """
    resolved = resolve_group(group)
    digest = hashlib.sha256()
    for part in _parts(values):
        digest.update(part)
    return len(set(all_gather_plain(resolved, digest.hexdigest()))) == 1


def _parts(values: Any) -> Iterator[bytes]:
    """Yield all that a comparison depends on."""
    if isinstance(values, torch.Tensor):
        yield from _parts_of_tensor(values)
    elif isinstance(values, Mapping):
        yield b"{"
        for key, value in values.items():
            yield f"{key!r}:".encode()
            yield from _parts(value)
        yield b"}"
    elif isinstance(values, (list, tuple)):
        yield b"["
        for value in values:
            yield from _parts(value)
            yield b","
        yield b"]"
    elif hasattr(values, "tobytes") and hasattr(values, "dtype"):  # NumPy's
        yield f"{values.dtype} {values.shape}".encode()
        yield from _parts(values.tolist()) if values.dtype.hasobject else [values.tobytes()]
    elif isinstance(values, (set, frozenset)):
        yield type(values).__qualname__.encode() + b"{"
        yield b",".join(sorted(b"".join(_parts(value)) for value in values)) + b"}"
    elif (kind := KINDS[type(values)]) is not None:
        yield type(values).__qualname__.encode()
        yield from _parts({str(name): value for name, value in kind.attributes(values).items()})
        yield from _parts(list(kind.flatten(values)))
    elif isinstance(values, (Iterator, torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(f"a {type(values).__name__} cannot be compared: give a list, or a state_dict")
    else:
        yield repr(values).encode()


def _parts_of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    if class_handles_memory(tensor):
        raise TypeError(
            f"a {type(tensor).__name__} cannot be compared, because its class handles its memory: of a "
            "DTensor give its to_local() or full_tensor()"
        )
    if tensor.is_quantized:
        yield from _parts([tensor.int_repr(), tensor.dequantize()])
        return
    yield f"{tensor.dtype} {tensor.shape} {tensor.layout}".encode()
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().flatten()
    content = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    yield ctypes.string_at(content.data_ptr(), content.numel())
