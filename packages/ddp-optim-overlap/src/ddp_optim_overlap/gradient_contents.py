"""Check whether gradients written since a step are still bitwise those that it used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_optim_overlap.bucket_gradients import BucketGradients

__all__ = ["GradientContents"]

_ROWS, _COLUMNS = 127, 65
"""Shape of the blocks of 8-byte words whose columns are summed. Both are odd: swapped rows of a gradient then
fall into other columns, and a power-of-two number of sign bits does not cancel in a sum."""


class GradientContents:
    """The gradients of a pass at the time of its step.

    Where DDP copies gradients out of its buckets, the buckets still hold them. Where ``.grad`` is the
    bucket's own memory, sums over its blocks are kept.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[BucketGradients, _Memory]] = []
        self._of: dict[torch.Tensor, tuple[torch.Tensor, _Memory]] = {}

    def clear(self) -> None:
        """Forget the pass, and release its buckets."""
        self._buckets.clear()
        self._of.clear()

    def keep(
        self, bucket: BucketGradients, used: Sequence[bool] | None, own: Sequence[torch.Tensor | None]
    ) -> None:
        """Record a bucket that was stepped.

        Args:
            bucket: The bucket; the step has used its views.
            used: Which of them it has used; ``None`` for all.
            own: The ``.grad`` of the parameters, which will hold the same values.

        Cost:
            Reads the memory once if ``.grad`` lies in it.
        """
        if bucket.buffer.layout is not torch.strided:
            return
        begin = bucket.buffer.data_ptr()
        end = begin + bucket.buffer.nbytes
        inside = any(
            begin <= one.data_ptr() < end for one in own if one is not None and one.layout is torch.strided
        )
        self._buckets.append((bucket, _Memory(bucket.buffer, summed=inside)))
        if used is not None:  # a parameter that no rank has used keeps its gradient
            for parameter, gradient, is_used in zip(bucket.parameters, own, used, strict=True):
                if not is_used:
                    self._keep_own(parameter, gradient)

    def keep_own(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record the current ``.grad``, wherever it lies. Reads all of it once."""
        for parameter in parameters:
            self._keep_own(parameter, parameter.grad)

    def _keep_own(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.layout is torch.strided:
            self._of[parameter] = gradient, _Memory(gradient, summed=True)

    def are_unchanged(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all of these have the gradients that the step has used. Reads them."""
        for bucket, memory in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self._of.setdefault(parameter, (view, memory))
        self._buckets.clear()
        checked: dict[int, bool] = {}
        for parameter in parameters:
            if parameter not in self._of or parameter.grad is None:
                return False
            gradient, memory = self._of[parameter]
            if id(memory) not in checked:
                checked[id(memory)] = memory.is_unchanged()
            if not checked[id(memory)] or not _same_bits(parameter.grad, gradient):
                return False
        return True


class _Memory:
    """A piece of memory, with sums over its blocks if anyone else may write there."""

    def __init__(self, tensor: torch.Tensor, *, summed: bool) -> None:
        self._tensor = tensor
        self._sums = _sums(tensor) if summed else None

    def is_unchanged(self) -> bool:
        return self._sums is None or all(map(torch.equal, self._sums, _sums(self._tensor)))


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums over blocks of a tensor's bits, and the remaining bytes."""
    memory = _bytes(tensor)
    left = len(memory) % (8 * _ROWS * _COLUMNS)
    blocks, rest = memory[: len(memory) - left], memory[len(memory) - left :]
    return blocks.view(torch.int64).view(-1, _ROWS, _COLUMNS).sum(1), rest.clone()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    dense = tensor.permute(order).contiguous().view(-1).view(torch.uint8)
    return dense if dense.data_ptr() % 8 == 0 and dense.storage_offset() % 8 == 0 else dense.clone()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout is not torch.strided:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(_bytes(one.contiguous()), _bytes(other.contiguous()))
