"""Send many small tensors in few messages: joined before averaging, and copied back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

__all__ = ["Pack", "packs"]

_PACK_BYTES = 25 << 20
"""The largest pack: as large as a bucket of ``DistributedDataParallel``. Larger tensors go alone."""


class Pack:
    """Tensors of one dtype and device. A single contiguous tensor is not copied."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        alone = tensors[0] if len(tensors) == 1 else None
        in_place = alone is not None and alone.is_contiguous() and not (alone.is_conj() or alone.is_neg())
        self._in_place = alone if in_place else None

    def together(self) -> torch.Tensor:
        """Return all values in one flat tensor."""
        if self._in_place is not None:
            return self._in_place.view(-1)
        return torch.cat([tensor.flatten() for tensor in self._tensors]).resolve_conj().resolve_neg()

    def put_back(self, together: torch.Tensor) -> None:
        """Copy the averaged values back into the tensors."""
        if self._in_place is None:
            parts = torch.split(together, [tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def packs(tensors: Iterable[torch.Tensor]) -> Iterator[Pack]:
    """Group tensors of one dtype and device into packs, in their order."""
    waiting: list[torch.Tensor] = []
    waiting_bytes = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if waiting and waiting_bytes + nbytes > _PACK_BYTES:
            yield Pack(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(tensor)
        waiting_bytes += nbytes
    if waiting:
        yield Pack(waiting)
