"""One bucket: its gradients, the average that it waits for, and the future that DDP waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.passes.averaging import numbers_on, start_all_reduce
from dist_utils.process_groups import record_use, runs_on_host
from dist_utils.torch_compat import GradBucket


@dataclass(eq=False)
class Bucket:
    """One bucket of a backward pass, from its communication hook to the step of its parameters.

    Attributes:
        index: Its number in DDP.
        gradients: The views that will hold its averaged gradients.
        average: The future that the communication hook returned.
        used: Which of its parameters got a gradient, first on this rank, then on any rank; ``None`` if all.
    """

    index: int
    gradients: BucketGradients
    average: torch.futures.Future[Any]
    used: list[bool] | None = None
    _used_anywhere: tuple[torch.Tensor, dist.Work] | None = None
    _once: threading.Lock = field(default_factory=threading.Lock)
    """Whoever takes it completes the future; it is never released."""
    _done: torch.futures.Future[None] = field(default_factory=torch.futures.Future)
    _outcomes: list[torch.Tensor | Exception] = field(default_factory=list)
    """Taken out by the future's callback, which must not hold the bucket: a cycle through C++."""

    @property
    def nbytes(self) -> int:
        """The size of its gradients; sparse ones vary in size and count as enough for a step."""
        buffer = self.gradients.buffer
        return sys.maxsize if buffer.is_sparse else buffer.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether it can be stepped without waiting for its average or for another rank."""
        return self.used is None and self.average.done()

    def share_used(self, used: list[bool], group: dist.ProcessGroup) -> None:
        """Let the ranks know from each other which parameters of the bucket got a gradient.

        What is enqueued on an accelerator starts now, as on the other ranks, whatever becomes of the step; on
        CPUs it is part of the step's job.

        Args:
            used: Which got one on this rank.
            group: The ranks.
        """
        self.used = used
        if not runs_on_host(group, self.gradients.buffer.device):
            self._used_anywhere = self._start_sharing(used, group)

    def await_used(self, group: dist.ProcessGroup) -> None:
        """Wait until it is known which parameters any rank has used."""
        if self.used is None:
            return
        if self.average.done():
            self.average.value()  # raises if it failed: a rank that did not come will not come here
        anywhere, work = self._used_anywhere or self._start_sharing(self.used, group)
        work.wait()
        record_use(anywhere)
        if not all(self.used):  # reading it waits for the device, so only where the answer is open
            self.used = [bool(value) for value in anywhere.tolist()]

    def _start_sharing(self, used: list[bool], group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        anywhere = numbers_on(self.gradients.buffer.device, used)
        return anywhere, start_all_reduce(anywhere, group, dist.ReduceOp.MAX)

    def averages(self) -> Sequence[torch.Tensor | None]:
        """Return what each parameter is stepped with."""
        gradients = self.gradients
        if self.used is None:
            return gradients.views
        return [
            # A parameter that no rank has used keeps its previous gradient: None, or zeros.
            view if is_used else parameter.grad
            for parameter, view, is_used in zip(gradients.parameters, gradients.views, self.used, strict=True)
        ]

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return the future for DDP, whose value DDP takes for the average."""
        # Only an error raised in a callback reaches C++ waiters such as DDP's reducer.
        return self._done.then(partial(_outcome, self._outcomes))

    def end(self, outcome: torch.Tensor | Exception) -> None:
        """Complete the future with the average or an error, unless it is complete."""
        if self._once.acquire(blocking=False):
            self._outcomes.append(outcome)
            self._done.set_result(None)


def _outcome(outcomes: list[torch.Tensor | Exception], _: torch.futures.Future[None]) -> torch.Tensor:
    outcome = outcomes.pop()
    if isinstance(outcome, torch.Tensor):
        return outcome
    try:
        raise outcome
    finally:
        del outcome  # else its own frame would hold it


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

    def write(self, average: Any) -> None:
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
        record_use(first)  # it may belong to the hook's stream, and is read on this one
        self.buffer.copy_(first if self.buffer.is_sparse else first.view_as(self.buffer))


class KnownBuckets:
    """The gradients of buckets seen before: making the views takes as long as a small step.

    DDP keeps the buffers of its buckets until it rebuilds them, once, after the first pass: :meth:`forget`
    then, so that no memory is kept that DDP has freed.

    Args:
        parameters: The parameters of the model, if they are known.
        watch: Called with the parameters of every new bucket.

    Attributes:
        parameters: All parameters that have been in a bucket.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], watch: Callable[[list[torch.Tensor]], None]
    ) -> None:
        self.parameters: set[torch.Tensor] = set()
        self._watch = watch
        self._known: dict[int, tuple[BucketGradients, list[tuple[int, ...]]]] = {}
        self._strides = {parameter: parameter.stride() for parameter in parameters}

    def gradients(self, bucket: GradBucket) -> BucketGradients:
        """Return the gradients of a bucket, as DDP passes it to the communication hook.

        Raises:
            ConfigError: The layout of a parameter has changed since DDP was made.
        """
        known = self._known.get(bucket.index())
        if known is None or known[0].buffer is not bucket.buffer():  # else DDP has rebuilt its buckets
            known = self._new(bucket)
        gradients, strides = known
        if [parameter.stride() for parameter in gradients.parameters] != strides:
            raise ConfigError(
                "the memory layout of a parameter was changed after DDP was made, for example by "
                "model.to(memory_format=torch.channels_last): change it before, or make a new DDP model"
            )
        return gradients

    def forget(self) -> None:
        """Release all memory."""
        self._known.clear()

    def drop_gradients(self) -> None:
        """Set all gradients to ``None``: of a pass that has failed, some are used and others not averaged."""
        for parameter in self._strides:
            parameter.grad = None

    def _new(self, bucket: GradBucket) -> tuple[BucketGradients, list[tuple[int, ...]]]:
        gradients = BucketGradients(bucket)
        parameters = gradients.parameters
        self.parameters.update(parameters)
        self._watch(parameters)
        known = gradients, [self._strides.setdefault(one, one.stride()) for one in parameters]
        if not gradients.buffer.is_sparse:  # that is another one in every pass
            self._known[bucket.index()] = known
        return known


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
        view.as_strided(view.size(), parameter.stride()) if _fills_its_memory(parameter) else view
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


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
