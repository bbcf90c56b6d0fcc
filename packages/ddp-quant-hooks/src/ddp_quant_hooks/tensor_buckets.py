"""Plain tensors treated as a bucket; the key of a call identifies their residuals."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from ddp_quant_hooks.resume import Bucket
from ddp_quant_hooks.values import Values, flat_real

__all__ = ["AnyBucket", "StandIns", "TensorBucket", "label_of", "names_of", "small_parts", "values_of"]


class TensorBucket:
    """Tensors of one dtype and device that are averaged together.

    Args:
        tensors: Contiguous.
        stand_ins: Instead of parameters: what residuals belong to.
        number: The number of the bucket in its step.
        label: Identical on all ranks, and different for every key.

    Attributes:
        tensors: As given.
        label: As given.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], stand_ins: list[torch.Tensor], number: int, label: int
    ) -> None:
        self.tensors = tensors
        self.label = label
        self._stand_ins = stand_ins
        self._number = number

    def index(self) -> int:
        """Return its place in the step."""
        return self._number

    def parameters(self) -> list[torch.Tensor]:
        """Return what stands for parameters."""
        return self._stand_ins


AnyBucket: TypeAlias = Bucket | TensorBucket


class StandIns:
    """Stand-ins for plain tensors, to which residuals belong: a tensor without memory for each key.

    Residuals are kept by parameter, and a plain tensor may be a different object in each step.
    """

    def __init__(self) -> None:
        self.named: dict[str, torch.Tensor] = {}
        """Keyed by the key of the call, with the number of the tensor if there are several."""

    def of(self, key: str | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the stand-ins of a call's tensors, always the same for the same key."""
        if key is None:  # nothing is kept
            return [_stand_in(_real_count(tensor), tensor.device) for tensor in tensors]
        found = []
        for name, tensor in zip(names_of(key, tensors), tensors, strict=True):
            if name not in self.named:
                self.named[name] = _stand_in(_real_count(tensor), tensor.device)
            found.append(self.named[name])
        return found

    def require_lengths(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``ValueError`` if a key was used with another number of values, which its residual has."""
        for name, tensor in zip(names_of(key, tensors), tensors, strict=True):
            count, here = _real_count(tensor), self.named.get(name)
            if here is not None and here.numel() != count:
                raise ValueError(
                    f"the key {name!r} had {here.numel()} values before, and now it has {count}: values of "
                    "another length need another key"
                )

    def key_for(self, key: str, tensor: torch.Tensor) -> str:
        """Return ``key``, or a key of its own if ``key`` was used with another number of values.

        Modules reduce those parameters that have gradients, and these may change.
        """
        here, count = self.named.get(key), _real_count(tensor)
        return key if here is None or here.numel() == count else f"{key} of {count} values"

    def load(self, counts: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the stand-ins of these names and numbers of values, new ones where none exist."""
        found = {}
        for name, count in counts.items():
            here = self.named.get(name)
            found[name] = _stand_in(count, device) if here is None or here.numel() != count else here
        return found


def names_of(key: str, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names under which the residuals of a call's tensors are kept."""
    return [key] if len(tensors) == 1 else [f"{key}[{number}]" for number in range(len(tensors))]


def values_of(bucket: AnyBucket) -> Values | None:
    """Return the values to average; ``None`` for a sparse bucket."""
    if isinstance(bucket, TensorBucket):
        return Values(bucket.tensors)
    buffer = bucket.buffer()
    return None if buffer.is_sparse else Values([buffer])


def small_parts(bucket: TensorBucket) -> Iterator[torch.Tensor]:
    """Yield the tensors of at most one dimension, flat and real."""
    for tensor in bucket.tensors:
        if tensor.dim() <= 1:
            yield flat_real(tensor)


def label_of(key: str | None) -> int:
    """Return a number for a key, identical in every process; 0 for none."""
    return 0 if key is None else 1 + zlib.crc32(key.encode(errors="surrogatepass"))


def _real_count(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _stand_in(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(1, device=device).expand(count)
