"""One bucket: its averaged gradients, the average that it waits for, and the future that DDP waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ddp_optim_overlap.errors import CommunicationError, ConfigError
from ddp_optim_overlap.passes.averaging import completes_within
from dist_utils.process_groups import error_text, record_use
from dist_utils.torch_compat import GradBucket


class Bucket:
    """One bucket of a model: its averaged gradients and, pass by pass, what their step waits for.

    Args:
        bucket: As DDP passes it to the communication hook, before anything is done with it, because hooks
            may set another buffer.
        strides: Those that its parameters had when DDP was made.

    Attributes:
        index: Its number in DDP.
        parameters: Whose gradients it has.
        buffer: The memory of the gradients.
        views: The gradients in it, which will be averaged.
        average: The future that the communication hook returned.
        used: Which of its parameters got a gradient, first on this rank, then on any rank; ``None`` if all.
        done: What DDP waits for, if the bucket is stepped after its hook has returned.
    """

    average: torch.futures.Future[Any]
    used: list[bool] | None
    done: torch.futures.Future[torch.Tensor]

    def __init__(self, bucket: GradBucket, strides: dict[torch.Tensor, tuple[int, ...]]) -> None:
        self.index = bucket.index()
        self.parameters: list[torch.Tensor] = bucket.parameters()
        self.buffer = bucket.buffer()
        self.views = [self.buffer] if self.buffer.is_sparse else _views(bucket, self.parameters)
        self._with_layout = [one for one in self.parameters if one.dim() > 1]
        self._strides = [strides.setdefault(one, one.stride()) for one in self._with_layout]

    def begin(self, average: torch.futures.Future[Any], used: list[bool] | None) -> None:
        """Begin a pass in which this is its average."""
        device = self.buffer.device
        self.average, self.used = average, used
        self.done = torch.futures.Future(devices=None if device.type == "cpu" else [device])

    @property
    def nbytes(self) -> int:
        """The size of its gradients; sparse ones vary in size and count as a mebibyte."""
        return 2**20 if self.buffer.is_sparse else self.buffer.nbytes

    def require_same_layout(self) -> None:
        """Raise if the memory layout of a parameter has changed since DDP was made."""
        if [parameter.stride() for parameter in self._with_layout] != self._strides:
            raise ConfigError(
                "the memory layout of a parameter was changed after DDP was made, for example by "
                "model.to(memory_format=torch.channels_last): change it before, or make a new DDP model"
            )

    def await_average(self, seconds: float | None = None) -> None:
        """Wait until the average is in the bucket.

        Args:
            seconds: How long at most; ``None``: as long as the communication hook takes.

        Raises:
            CommunicationError: The average has failed.
            ConfigError: It is not a tensor of the bucket's size, or has not come in time.
        """
        if seconds is not None and not completes_within(self.average.done, seconds):
            raise ConfigError(
                "a bucket was not averaged in time: if the communication hook waits for later buckets, leave "
                "release_gradients out"
            )
        try:
            average = self.average.wait()
        except Exception as error:
            text = f"bucket {self.index} was not averaged: {error_text(error)}"
            raise CommunicationError(text) from error
        self._write(average)

    def averages(self) -> Sequence[torch.Tensor | None]:
        """Return what each parameter is stepped with."""
        if self.used is None:
            return self.views
        return [
            # A parameter that no rank has used keeps its previous gradient: None, or zeros.
            view if is_used else parameter.grad
            for parameter, view, is_used in zip(self.parameters, self.views, self.used, strict=True)
        ]

    def _write(self, average: Any) -> None:
        """Copy the result of the hook's future into the bucket, unless it is there already.

        Args:
            average: A tensor with as many elements, of any dtype; or a list that starts with one.

        Raises:
            ConfigError: It is anything else.
        """
        first = _tensor_in(average)
        if _same_memory(first, self.buffer):
            return
        if first.numel() != self.buffer.numel():
            raise ConfigError(
                f"the hook's future must hold a tensor of {self.buffer.numel()} elements, got {first.numel()}"
            )
        try:
            record_use(first)  # it may belong to the hook's stream, and is read on this one
            self.buffer.copy_(first if self.buffer.is_sparse else first.reshape(self.buffer.shape))
        except RuntimeError as error:  # raised as it is, it would leave DDP in the middle of a pass
            text = f"the hook's future must hold a tensor that its bucket can take: {error_text(error)}"
            raise ConfigError(text) from error


class KnownBuckets:
    """Buckets seen before: making the views of one takes as long as a small step.

    DDP keeps the buffers of its buckets until it rebuilds them, once, after the first pass: :meth:`forget`
    then, so that no memory is kept that DDP has freed.

    Args:
        parameters: The parameters of the model.

    Attributes:
        parameters: All parameters that have been in a bucket.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters: set[torch.Tensor] = set()
        self._known: dict[int, Bucket] = {}
        self._strides = {parameter: parameter.stride() for parameter in parameters}

    def find(self, bucket: GradBucket) -> Bucket:
        """Return a bucket that DDP passes to the communication hook.

        Raises:
            ConfigError: The layout of a parameter has changed since DDP was made.
        """
        known = self._known.get(bucket.index())
        if known is None or known.buffer is not bucket.buffer():  # else DDP has rebuilt its buckets
            known = Bucket(bucket, self._strides)
            self.parameters.update(known.parameters)
            if not known.buffer.is_sparse:  # that is another one in every pass
                self._known[known.index] = known
        known.require_same_layout()
        return known

    def forget(self) -> None:
        """Release all memory."""
        self._known.clear()

    def drop_gradients(self) -> None:
        """Set all gradients to ``None``: of a pass that has failed, some are used and others not averaged."""
        for parameter in self._strides:
            parameter.grad = None


def average_of(buffer: torch.Tensor, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Return the tensor in a hook's future, as DDP reads it."""
    first = _tensor_in(done.value())
    return buffer if _same_memory(first, buffer) else first


def _tensor_in(average: Any) -> torch.Tensor:
    """Return the tensor that a hook's future holds, maybe first in a list; raises if it holds none."""
    first = average[0] if isinstance(average, (list, tuple)) and average else average
    if not isinstance(first, torch.Tensor):
        raise ConfigError(f"the hook's future must hold a tensor, got {type(average).__name__}")
    return first


@contextlib.contextmanager
def lend_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """Replace each ``parameter.grad`` by these gradients for a while.

    Optimizers read ``.grad``, but DDP copies the averages there only at the end of the backward pass.
    """
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, mine in zip(parameters, own, strict=True):
            parameter.grad = mine


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether these are one buffer: Gloo returns a complex buffer as pairs of real numbers."""
    if one is other or one.is_sparse or other.is_sparse:
        return one is other
    same_kind = one.dtype == other.dtype or other.is_complex()
    return same_kind and one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


def _views(bucket: GradBucket, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one view for each parameter, with the strides that DDP gives it: those of the parameter.

    ``bucket.gradients()`` has the right offsets but always contiguous strides: it would permute the gradient
    of a channels_last weight.
    """
    flat = _complex_views(bucket.buffer(), parameters) or bucket.gradients()
    return [
        view.as_strided(view.size(), parameter.stride()) if fills_its_memory(parameter) else view
        for view, parameter in zip(flat, parameters, strict=True)
    ]


def _complex_views(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a bucket of complex parameters; an empty list for any other bucket.

    DDP keeps them as pairs of real numbers, and up to torch 2.13 ``bucket.gradients()`` finds half of them.
    """
    if buffer.is_complex() or not all(parameter.is_complex() for parameter in parameters):
        return []
    values = torch.view_as_complex(buffer.view(-1, 2))
    parts = torch.split(values, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie side by side, in whatever order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
