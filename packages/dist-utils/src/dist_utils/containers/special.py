"""Containers with special rules: some of torch's, struct sequences, mapping proxies, TensorDicts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dist_utils.containers.builtin import Content, indices

__all__ = ["SPECIAL"]


def _rebuild_packed_sequence(obj: PackedSequence, values: list[Any]) -> PackedSequence:
    (data,) = values
    follow: list[torch.Tensor | None] = [obj.sorted_indices, obj.unsorted_indices]
    if isinstance(data, torch.Tensor):  # they belong where the data is
        follow = [index if index is None else index.to(data.device) for index in follow]
    return tuple.__new__(type(obj), (data, obj.batch_sizes, *follow))


def _is_structseq(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "n_sequence_fields", None), int)


def _rebuild_structseq(obj: Any, values: list[Any]) -> Any:
    cls, (_, hidden) = obj.__reduce__()  # hidden: fields that have a name but no index
    return cls(values, hidden)


# TensorDict, known by name: the package need not be installed. Taken apart one level at a time, so that
# what is nested keeps its identity, its device and its lock.


def _derives_from(cls: type, module: str, name: str) -> bool:
    return any((base.__module__, base.__qualname__) == (module, name) for base in cls.__mro__)


def _is_lazy_stack(cls: type) -> bool:
    return _derives_from(cls, "tensordict._lazy", "LazyStackedTensorDict")


def _is_tensordict(cls: type) -> bool:
    return bool(cls.__dict__.get("_is_tensorclass")) or _derives_from(
        cls, "tensordict.base", "TensorDictBase"
    )


def _entries(obj: Any) -> list[Any]:
    return [obj.get(key) for key in obj.keys()]  # noqa: SIM118 - not a dictionary


def _rebuild_tensordict(obj: Any, values: list[Any]) -> Any:
    new = obj.clone(recurse=False)
    if new.is_locked:  # some copies are
        new.unlock_()
    devices = {value.device for value in values if isinstance(getattr(value, "device", None), torch.device)}
    moved = obj.device is not None and devices - {obj.device}
    if moved:
        new.clear_device_()  # else it would move new values back
    for key, old, value in zip(list(obj.keys()), _entries(obj), values, strict=True):
        if value is not old or not isinstance(value, torch.Tensor):
            new.set(key, value)
    if moved and len(devices) == 1:
        new = new.to(devices.pop())
    return new.lock_() if obj.is_locked else new


def _rebuild_lazy_stack(obj: Any, values: list[Any]) -> Any:
    new = type(obj)(*values, stack_dim=obj.stack_dim)
    return new.lock_() if obj.is_locked else new


SPECIAL: list[tuple[Callable[[type], bool], Content]] = [
    (
        # The lengths stay on the CPU and the indices follow the data: neither is for fn to compute with.
        lambda cls: issubclass(cls, PackedSequence),
        Content(lambda obj: [obj.data], _rebuild_packed_sequence, lambda _: [".data"]),
    ),
    (_is_structseq, Content(list, _rebuild_structseq, indices)),
    (
        # The mapping behind the proxy, with its own type; only the garbage collector gives access to it.
        lambda cls: cls is MappingProxyType,
        Content(gc.get_referents, lambda _, values: MappingProxyType(values[0]), lambda _: [".mapping"]),
    ),
    (
        _is_lazy_stack,
        Content(lambda obj: list(obj.tensordicts), _rebuild_lazy_stack, lambda obj: indices(obj.tensordicts)),
    ),
    (
        _is_tensordict,
        Content(_entries, _rebuild_tensordict, lambda obj: [f"[{key!r}]" for key in obj.keys()]),  # noqa: SIM118
    ),
]
"""Pairs of a test for a class, and how to walk it; the first match counts."""
