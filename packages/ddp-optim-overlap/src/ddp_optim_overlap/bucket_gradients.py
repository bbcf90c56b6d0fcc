"""The averaged gradients of one bucket, which the parameters get as ``.grad`` while they are stepped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch

from dist_utils.process_groups import record_use
from dist_utils.torch_compat import GradBucket

__all__ = ["BucketGradients", "KnownBuckets", "average_of", "gradients_replaced"]


Strides = tuple[int, ...] | None
"""Strides of a gradient in its bucket; ``None`` if it is contiguous there."""


class BucketGradients:
    """The averaged gradients of a bucket, as views of its memory.

    Args:
        bucket: As DDP passes it to the communication hook, before anything is done with it, because hooks
            may set another buffer.
        strides: The strides that DDP has given to each gradient.
    """

    def __init__(self, bucket: GradBucket, strides: Sequence[Strides]) -> None:
        self.parameters: list[torch.Tensor] = bucket.parameters()
        self.buffer = bucket.buffer()
        self.views = [self.buffer] if self.buffer.is_sparse else _views(bucket, self.parameters, strides)
        self._strides = _strides(self.parameters)

    @property
    def are_in_place(self) -> bool:
        """Whether all parameters still have their strides: DDP lays out a gradient like its parameter."""
        return _strides(self.parameters) == self._strides

    def write(self, average: Any) -> None:
        """Copy the result of the hook's future into the bucket, unless it is there already.

        Args:
            average: A tensor with as many elements, of any dtype; or a list that starts with one.

        Raises:
            TypeError, ValueError: It is anything else.
        """
        first = average[0] if isinstance(average, (list, tuple)) and average else average
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"the hook's future must hold a tensor, got {type(average).__name__}")
        if _same_memory(first, self.buffer):
            return
        if first.numel() != self.buffer.numel():
            raise ValueError(
                f"the hook's future must hold a tensor of {self.buffer.numel()} elements, got {first.numel()}"
            )
        record_use(first)  # it may belong to the hook's stream, and is read on this one
        self.buffer.copy_(first if self.buffer.is_sparse else first.view_as(self.buffer))


class _Layout:
    """The strides of the gradients in a bucket.

    Without ``gradient_as_bucket_view`` DDP takes the strides of the parameters anew in every pass. With it
    they stay as they were when the bucket was made. They show in gradients that are views of the bucket,
    but not in those of parameters that this rank has not used.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = weakref.ref(buffer)  # DDP owns it and may free it
        self._first: list[Strides] = []
        self._shown: dict[int, Strides] = {}

    @property
    def all_shown(self) -> bool:
        """Whether every gradient has been seen as a view of the bucket."""
        return len(self._shown) == len(self._first)

    def strides(self, bucket: GradBucket, *, stays: bool) -> list[Strides]:
        """Return the strides of a bucket's gradients.

        Args:
            bucket: A bucket with this buffer.
            stays: Whether the layout stays as it was when the bucket was made.
        """
        parameters = bucket.parameters()
        now = [_strides_of(parameter) for parameter in parameters]
        self._first = self._first or now
        if not stays:
            return now
        for position, parameter in enumerate(parameters):
            if _lies_in(parameter.grad, bucket.buffer()):
                self._shown[position] = _strides_of(parameter.grad)
            elif not parameter.numel():  # has no memory
                self._shown[position] = None
        return [self._shown.get(position, first) for position, first in enumerate(self._first)]


class KnownBuckets:
    """The gradients of buckets seen before: making the views takes as long as a small step.

    DDP keeps the buffers of its buckets until it rebuilds them, once, after the first pass. Nothing here
    keeps memory that DDP has freed: a buffer is kept only when it has come again.
    """

    def __init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}
        self._known: dict[int, BucketGradients] = {}
        self._as_views = False
        """Whether gradients are views of their buckets."""

    def gradients(self, bucket: GradBucket) -> BucketGradients:
        """Return the gradients of a bucket, as DDP passes it to the communication hook."""
        index, buffer = bucket.index(), bucket.buffer()
        known = self._known.get(index)
        # A different buffer means that DDP has rebuilt its buckets.
        if known is not None and known.buffer is buffer and known.are_in_place:
            return known
        layout = self._layouts.get(index)
        came_again = layout is not None and layout.buffer() is buffer
        if layout is None or not came_again:
            layout = self._layouts[index] = _Layout(buffer)
            self._known.pop(index, None)
        self._as_views = self._as_views or any(_lies_in(one.grad, buffer) for one in bucket.parameters())
        made = BucketGradients(bucket, layout.strides(bucket, stays=self._as_views))
        if came_again and (layout.all_shown or not self._as_views):
            self._known[index] = made
        return made

    def forget(self) -> None:
        """Release all memory."""
        self._known.clear()


def average_of(buffer: torch.Tensor, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Return the tensor in a hook's future, as DDP reads it."""
    value = done.value()
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return buffer if _same_memory(first, buffer) else first


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether these are one buffer: Gloo returns a complex buffer as pairs of real numbers."""
    if one is other or one.is_sparse or other.is_sparse:
        return one is other
    same_kind = one.dtype == other.dtype or other.is_complex()
    return same_kind and one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


def _views(
    bucket: GradBucket, parameters: Sequence[torch.Tensor], strides: Sequence[Strides]
) -> list[torch.Tensor]:
    """Return one view for each parameter, with the strides that DDP has given it.

    ``bucket.gradients()`` has the right offsets but always contiguous strides: it would permute the gradient
    of a channels_last weight.
    """
    flat = _complex_views(bucket.buffer(), parameters) or bucket.gradients()
    return [
        view if one is None else view.as_strided(view.size(), one)
        for view, one in zip(flat, strides, strict=True)
    ]


def _strides_of(tensor: torch.Tensor) -> Strides:
    """Return the strides that DDP gives the gradient of a parameter, or those of such a gradient."""
    return None if tensor.is_contiguous() or not _fills_its_memory(tensor) else tensor.stride()


def _lies_in(gradient: torch.Tensor | None, buffer: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a gradient is a view of a bucket."""
    if gradient is None or gradient.layout is not torch.strided or buffer.layout is not torch.strided:
        return False
    begin = buffer.data_ptr()
    return begin <= gradient.data_ptr() < begin + buffer.nbytes


def _strides(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in parameters]


def _complex_views(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a bucket of complex parameters; an empty list for any other bucket.

    DDP keeps them as pairs of real numbers, and up to torch 2.13 ``bucket.gradients()`` finds half of them.
    """
    if buffer.is_complex() or not all(parameter.is_complex() for parameter in parameters):
        return []
    values = torch.view_as_complex(buffer.view(-1, 2))
    parts = torch.split(values, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


@contextlib.contextmanager
def gradients_replaced(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[list[torch.Tensor | None]]:
    """Replace each ``parameter.grad`` by these gradients for a while; yields the parameters' own gradients.

    Optimizers read ``.grad``, but DDP copies the averages there only at the end of the backward pass.
    """
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield own
    finally:
        for parameter, mine in zip(parameters, own, strict=True):
            parameter.grad = mine
