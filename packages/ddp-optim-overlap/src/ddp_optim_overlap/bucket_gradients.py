"""The averaged gradients of one bucket, which the parameters have as their own while they are stepped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dist_utils.torch_compat import GradBucket

__all__ = ["BucketGradients", "KnownBuckets", "average_of", "gradients_replaced"]


class BucketGradients:
    """Where the averaged gradients of a bucket will be: views of its memory.

    Args:
        bucket: As DDP hands it to the communication hook, before anything is done with it: hooks may set
            another buffer.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.parameters: list[torch.Tensor] = bucket.parameters()
        self.buffer = bucket.buffer()
        self.views = [self.buffer] if self.buffer.is_sparse else _views(bucket, self.parameters)
        self._strides = _strides(self.parameters)

    @property
    def are_in_place(self) -> bool:
        """Whether all parameters have the strides they had: DDP lays out a gradient as its parameter."""
        return _strides(self.parameters) == self._strides

    def write(self, average: Any) -> None:
        """Put what the hook's future holds into the bucket, unless it is there.

        Args:
            average: A tensor of as many elements, of any dtype; or a list that starts with one.

        Raises:
            TypeError, ValueError: It is something else.
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
        if first.device.type != "cpu":
            # It may belong to the hook's stream, and is read on this one.
            first.record_stream(torch.get_device_module(first.device).current_stream(first.device))
        self.buffer.copy_(first if self.buffer.is_sparse else first.view_as(self.buffer))


class KnownBuckets:
    """The gradients of buckets that have come before: making views takes as long as a small step.

    DDP keeps the buffers of its buckets until it forms other ones, once, after the first pass. Nothing here
    keeps memory that it has let go: a buffer is only kept when it has come again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._known: dict[int, BucketGradients] = {}

    def gradients(self, bucket: GradBucket) -> BucketGradients:
        """Return those of a bucket, as DDP hands it to the communication hook."""
        index, buffer = bucket.index(), bucket.buffer()
        known = self._known.get(index)
        # Other buckets have buffers of their own.
        if known is not None and known.buffer is buffer and known.are_in_place:
            return known
        made = BucketGradients(bucket)
        seen = self._seen.get(index)
        if seen is not None and seen() is buffer:
            self._known[index] = made
        else:
            self._seen[index] = weakref.ref(buffer)
            self._known.pop(index, None)
        return made

    def forget(self) -> None:
        """Let go of all memory."""
        self._seen.clear()
        self._known.clear()


def average_of(buffer: torch.Tensor, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Return what a hook's future holds, as DDP takes it."""
    value = done.value()
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return buffer if _same_memory(first, buffer) else first


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether these are one buffer: Gloo returns that of complex numbers as pairs of real ones."""
    if one is other or one.is_sparse or other.is_sparse:
        return one is other
    same_kind = one.dtype == other.dtype or other.is_complex()
    return same_kind and one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


def _views(bucket: GradBucket, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one view for each parameter, with the strides that DDP has given it.

    ``bucket.gradients()`` has the right places but always rows first: for a channels_last weight it
    permutes the gradient. DDP takes the parameter's own strides; with ``gradient_as_bucket_view`` those that
    it had when the bucket was made.
    """
    buffer = bucket.buffer()
    flat = _complex_views(buffer, parameters) or bucket.gradients()
    laid_out = [_laid_out(parameter, buffer) for parameter in parameters]
    return [
        view
        if one.is_contiguous() or not _fills_its_memory(one)
        else view.as_strided(one.size(), one.stride())
        for one, view in zip(laid_out, flat, strict=True)
    ]


def _laid_out(parameter: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return what has the strides of a parameter's gradient in a bucket: the gradient, if it is there."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return parameter
    begin = buffer.data_ptr()
    return gradient if begin <= gradient.data_ptr() < begin + buffer.nbytes else parameter


def _strides(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in parameters]


def _complex_views(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a bucket of complex parameters; of another one, none.

    DDP keeps them as pairs of real numbers, and ``bucket.gradients()`` finds half of them, up to torch 2.13.
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
    """Let ``parameter.grad`` be these gradients for a while; gives those that the parameters have themselves.

    Optimizers read ``.grad``, and DDP copies the averages there only when the backward pass ends.
    """
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield own
    finally:
        for parameter, mine in zip(parameters, own, strict=True):
            parameter.grad = mine
