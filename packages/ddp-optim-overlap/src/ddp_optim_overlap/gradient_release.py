"""Gradients that go when their bucket is stepped, so that a model's size of them is never there at once."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import BucketGradients
from ddp_optim_overlap.bucket_memory import BucketMemory
from ddp_optim_overlap.errors import ConfigError
from dist_utils.torch_compat import default_group_timeout, group_timeout

__all__ = ["GradientRelease", "require_owned", "require_readable"]

_IN_FLIGHT = 2
"""Buckets whose average or step backward() does not wait for. With the one that fills up, and the gradient
that is copied there, four of them are there at once; with 3, five. Gloo averages two at a time."""

_PART_BYTES = 2**25
"""Of a bucket, to step at once. DDP's buckets have 25 MiB, but in its first pass one has the whole model."""


class GradientRelease:
    """Takes the gradients of a bucket away when it is stepped, and gives its memory back.

    Until ``backward()`` ends, ``.grad`` is the bucket's own memory, given back or not: DDP finds the averages
    where it would copy them to, and copies nothing.

    Args:
        memory: How to give memory back.
        process_group: Its timeout limits what is waited for.
        owned: Returns the parameters that are stepped.
        may_leave_out: Returns whether parameters may get no gradient in a pass.

    Attributes:
        memory: As given.
    """

    def __init__(
        self,
        memory: BucketMemory,
        process_group: dist.ProcessGroup,
        *,
        owned: Callable[[], Collection[torch.Tensor]],
        may_leave_out: Callable[[], bool],
    ) -> None:
        self.memory = memory
        self._process_group = process_group
        self._owned, self._may_leave_out = owned, may_leave_out
        self._places = threading.Semaphore(_IN_FLIGHT)
        self._events: deque[Any] = deque()
        self._limited = True

    def begin(self, averaged: Collection[torch.Tensor]) -> None:
        """A backward pass that steps begins.

        Args:
            averaged: The parameters that have been in a bucket before.

        Raises:
            ConfigError: Gradients would be lost, or DDP would touch memory that is not there.
        """
        self._places = threading.Semaphore(_IN_FLIGHT)
        self._events.clear()
        require_owned(averaged, self._owned())
        require_readable(self.memory, may_leave_out=self._may_leave_out())

    def hand_over(self, current: BackwardPass, gradients: BucketGradients, used: Sequence[bool]) -> None:
        """Drop the gradients that DDP has copied into a bucket; others may still be what is stepped with."""
        current.handed_over += gradients.parameters
        if not gradients.buffer.is_sparse:
            for parameter, view, is_used in zip(gradients.parameters, gradients.views, used, strict=True):
                if is_used:
                    parameter.grad = view

    def limit_backward(self, done: torch.futures.Future[Any], device: torch.device) -> None:
        """Let ``backward()`` go on when few enough buckets are on their way.

        Args:
            done: Ends when the bucket that was just handed over is stepped, or has failed.
            device: Of the bucket.
        """
        places = self._places
        if done.done():  # on an accelerator a callback would take a stream
            places.release()
        else:
            done.add_done_callback(lambda _: places.release())
        timeout = group_timeout(self._process_group, device) or default_group_timeout()
        if self._limited and not places.acquire(timeout=timeout.total_seconds()):
            # An average that takes longer fails. The hook must see the other buckets, or DDP waits for ever.
            self._limited = False
            warnings.warn(
                f"a bucket was not averaged within {timeout}: the communication hook seems to wait for later "
                "ones, so that release_gradients=True saves little. backward() no longer waits for it",
                RuntimeWarning,
                stacklevel=2,
            )
        while len(self._events) > _IN_FLIGHT:
            self._events.popleft().synchronize()

    def parts(self, gradients: BucketGradients) -> Iterator[list[torch.Tensor]]:
        """Yield a bucket's parameters in parts to step one by one; gives each part back when it is stepped.

        New states of a part come when the gradients of the parts before it are gone.
        """
        parameters, views = gradients.parameters, gradients.views
        begin = size = 0
        for place, view in enumerate(views):
            size += 0 if view.is_sparse else view.nbytes
            if size >= _PART_BYTES or place == len(views) - 1:
                yield parameters[begin : place + 1]
                if not gradients.buffer.is_sparse and place < len(views) - 1:
                    self.memory.give_back_part(views[begin : place + 1])
                begin, size = place + 1, 0

    def give_back(
        self, current: BackwardPass, gradients: BucketGradients, averaged: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Give the memory of a bucket back that was stepped.

        Args:
            current: The backward pass.
            gradients: The bucket.
            averaged: What it was stepped with: not the bucket's gradient, where no rank has used a parameter.

        Returns:
            What DDP is to take for the average.
        """
        if gradients.buffer.is_sparse:
            return gradients.buffer
        value, views = self.memory.give_back(gradients, alone=current.only_bucket)
        for parameter, view, used, instead in zip(
            gradients.parameters, gradients.views, averaged, views, strict=True
        ):
            if used is view:
                parameter.grad = None if current.over else instead
        if value.device.type != "cpu":
            stream = torch.get_device_module(value.device).current_stream(value.device)
            self._events.append(stream.record_event())
        return value

    def end(self, current: BackwardPass) -> None:
        """DDP has ended the pass, well or not: take the gradients away of all that were handed over."""
        with current.stepping:
            current.over = True
            for parameter in current.handed_over:
                parameter.grad = None


def require_owned(averaged: Collection[torch.Tensor], owned: Collection[torch.Tensor]) -> None:
    """Raise if a parameter would lose its gradient and is not stepped.

    Raises:
        ConfigError: There is one.
    """
    for parameter in averaged:
        if parameter.requires_grad and parameter not in owned:
            raise ConfigError(
                "release_gradients=True takes all gradients away, and no overlapped optimizer has the "
                f"parameter of shape {tuple(parameter.shape)}: give its optimizer to overlap_optimizer too, "
                "freeze it, or leave release_gradients out"
            )


def require_readable(memory: BucketMemory, *, may_leave_out: bool, as_view: bool = False) -> None:
    """Raise if DDP would touch a bucket while its memory is given back.

    Raises:
        ConfigError: It would.
    """
    if memory.stays_readable:
        return
    if as_view:
        raise ConfigError(
            "release_gradients=True needs gradient_as_bucket_view=False on this device: gradients in a "
            "bucket would lose their memory with it. What that option saves, they save anyway"
        )
    if may_leave_out:
        raise ConfigError(
            "release_gradients=True is not for find_unused_parameters=True or static_graph=True on this "
            "device: DDP would write zeros into a bucket whose memory is given back. Leave one of them out"
        )
