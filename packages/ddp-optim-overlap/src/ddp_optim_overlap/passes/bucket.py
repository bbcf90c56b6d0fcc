"""One bucket: its gradients, the average that it waits for, and the future that DDP waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import ConfigError, OverlapError, not_averaged, text_of
from ddp_optim_overlap.passes.averaging import numbers_on, start_all_reduce
from ddp_optim_overlap.passes.backward_pass import BackwardPass
from dist_utils.process_groups import record_use, runs_on_host, same_error
from dist_utils.torch_compat import GradBucket

__all__ = ["Bucket", "BucketGradients", "KnownBuckets", "average_of", "gradients_replaced"]


@dataclass(eq=False)
class Bucket:
    """One bucket of a backward pass, from its communication hook to the step of its parameters.

    Attributes:
        index: Its number in DDP.
        gradients: The views that will hold its averaged gradients.
        averaged: The future that the communication hook returned.
        used: Which of its parameters got a gradient, first on this rank, then on any rank; ``None`` if all.
        done: The future that DDP waits for. DDP takes its value for the average.
        taken: Whether the worker has taken it.
    """

    index: int
    gradients: BucketGradients
    averaged: torch.futures.Future[Any]
    used: list[bool] | None = None
    done: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    taken: bool = False
    _used_anywhere: tuple[torch.Tensor, dist.Work] | None = None
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its gradients; sparse ones vary in size and count as enough for a step."""
        buffer = self.gradients.buffer
        return sys.maxsize if buffer.is_sparse else buffer.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether it can be stepped without waiting for its average or for another rank."""
        return self.used is None and self.averaged.done()

    def tell_used(self, used: list[bool], group: dist.ProcessGroup) -> None:
        """Let the ranks tell each other which parameters of the bucket got a gradient.

        What is enqueued on an accelerator starts now, as on the other ranks, whatever becomes of the step; on
        CPUs it is part of the step's job.

        Args:
            used: Which got one on this rank.
            group: The ranks.
        """
        self.used = used
        device = self.gradients.buffer.device
        if not runs_on_host(group, device):
            anywhere = numbers_on(device, used)
            self._used_anywhere = anywhere, start_all_reduce(anywhere, group, dist.ReduceOp.MAX)

    def await_average(self, current: BackwardPass, group: dist.ProcessGroup) -> None:
        """Wait until the average is in the bucket and it is known which parameters any rank has used.

        Raises:
            CommunicationError: Either failed.
        """
        try:
            if self.used is not None:
                if self.averaged.done():
                    self.averaged.value()  # raises if it failed: a rank that did not come will not come here
                self.used = self._await_used(self.used, group)
            self.gradients.write(current.await_average(self.averaged))
        except Exception as error:
            raise not_averaged(self.index, error, current.report()) from error

    def _await_used(self, used: list[bool], group: dist.ProcessGroup) -> list[bool]:
        """Return which parameters of a bucket got a gradient on some rank."""
        if self._used_anywhere is None:
            anywhere = numbers_on(self.gradients.buffer.device, used)
            self._used_anywhere = anywhere, start_all_reduce(anywhere, group, dist.ReduceOp.MAX)
        anywhere, work = self._used_anywhere
        work.wait()
        record_use(anywhere)
        # Reading it waits for the device, so only where the answer is open.
        return used if all(used) else [bool(value) for value in anywhere.tolist()]

    def averages(self) -> Sequence[torch.Tensor | None]:
        """Return what each parameter is stepped with."""
        if self.used is None:
            return self.gradients.views
        return [
            # A parameter that no rank has used keeps its previous gradient: None, or zeros.
            view if is_used else parameter.grad
            for parameter, view, is_used in zip(
                self.gradients.parameters, self.gradients.views, self.used, strict=True
            )
        ]

    def complete(self, average: torch.Tensor) -> None:
        """Complete the future, unless it is complete."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self.done.set_result(average)

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error, unless it is complete."""
        with self._ending:
            if not self._ended:
                self._ended = True
                # The future holds its error, and DDP the future. So the error must not hold frames with the
                # model, as a raised error does: a cycle through C++ is never collected.
                plain = str(error) if type(error) is RuntimeError else text_of(error)
                held = same_error(error if isinstance(error, OverlapError) else RuntimeError(plain))
                self.done.set_exception(held)  # type: ignore[arg-type] # torch's annotation
                held.__traceback__ = None
                self.done = torch.futures.Future()


class BucketGradients:
    """The averaged gradients of a bucket, as views of its memory.

    Args:
        bucket: As DDP passes it to the communication hook, before anything is done with it, because hooks
            may set another buffer.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.parameters: list[torch.Tensor] = bucket.parameters()
        self.buffer = bucket.buffer()
        self.views = [self.buffer] if self.buffer.is_sparse else _views(bucket, self.parameters)
        self.strides = _strides(self.parameters)

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


class KnownBuckets:
    """The gradients of buckets seen before: making the views takes as long as a small step.

    DDP keeps the buffers of its buckets until it rebuilds them, once, after the first pass. Nothing here
    keeps memory that DDP has freed: a buffer is kept only when it has come again.

    Args:
        parameters: The parameters of the model, if they are known.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._known: dict[int, BucketGradients] = {}
        self._strides = {parameter: parameter.stride() for parameter in parameters}

    def gradients(self, bucket: GradBucket) -> BucketGradients:
        """Return the gradients of a bucket, as DDP passes it to the communication hook.

        Raises:
            ConfigError: The layout of a parameter has changed since DDP was made.
        """
        index, buffer = bucket.index(), bucket.buffer()
        gradients = self._known.get(index)
        if gradients is None or gradients.buffer is not buffer:  # else DDP has rebuilt its buckets
            gradients = BucketGradients(bucket)
            self._require_layout(gradients)
            seen = self._seen.get(index)
            if seen is not None and seen() is buffer:
                self._known[index] = gradients
            else:
                self._known.pop(index, None)
                self._seen[index] = weakref.ref(buffer)
        elif gradients.strides != _strides(gradients.parameters):
            raise _layout_changed()
        return gradients

    def forget(self) -> None:
        """Release all memory."""
        self._known.clear()

    def _require_layout(self, gradients: BucketGradients) -> None:
        """Raise unless parameters, and gradients that are views of the bucket, are laid out as expected."""
        if gradients.buffer.is_sparse:
            return
        begin = gradients.buffer.data_ptr()
        end = begin + gradients.buffer.nbytes
        for parameter, view in zip(gradients.parameters, gradients.views, strict=True):
            grad = parameter.grad
            moved = self._strides.setdefault(parameter, parameter.stride()) != parameter.stride()
            in_bucket = grad is not None and not grad.is_sparse and begin <= grad.data_ptr() < end
            if moved or (grad is not None and in_bucket and grad.stride() != view.stride()):
                raise _layout_changed()


def _layout_changed() -> ConfigError:
    return ConfigError(
        "the memory layout of a parameter was changed after DDP was made, for example by "
        "model.to(memory_format=torch.channels_last): change it before, or make a new DDP model"
    )


def average_of(buffer: torch.Tensor, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Return the tensor in a hook's future, as DDP reads it."""
    value = done.value()
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return buffer if _same_memory(first, buffer) else first


@contextlib.contextmanager
def gradients_replaced(
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
        view.as_strided(view.size(), parameter.stride()) if _fills_its_memory(parameter) else view
        for view, parameter in zip(flat, parameters, strict=True)
    ]


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
