"""One backward pass whose gradients are freed as soon as their bucket is stepped."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.bucket_memory import BucketMemory, Gradients
from ddp_optim_overlap.errors import ConfigError
from dist_utils.torch_compat import default_group_timeout, group_timeout

__all__ = ["GradientRelease", "ReleasedPass"]

_IN_FLIGHT = 2
"""Buckets that may be averaged or stepped while backward() continues. With the bucket that fills up and the
gradient that is copied into it, four exist at a time; with 3 here, five. Gloo averages two at a time."""

_PART_BYTES = 2**25
"""Part of a bucket to step at once. DDP's buckets have 25 MiB, but its first pass has one large bucket."""


class GradientRelease:
    """Frees the gradients of all buckets, pass by pass.

    Args:
        memory: How to free memory.
        process_group: Its timeout limits every wait.
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
        self._limited = True

    def require_possible(self, averaged: Collection[torch.Tensor], *, as_view: bool = False) -> None:
        """Raise if the gradients of a backward pass that begins cannot be freed.

        Args:
            averaged: The parameters that have been in a bucket before.
            as_view: Whether gradients are views of their buckets.

        Raises:
            ConfigError: Gradients would be lost, or DDP would touch freed memory.
        """
        if as_view and not self.memory.stays_readable:
            raise ConfigError(
                "release_gradients=True needs gradient_as_bucket_view=False on this device: gradients in a "
                "bucket would lose their memory with it. What that option saves, they save anyway"
            )
        if not self.memory.stays_readable and self._may_leave_out():
            raise ConfigError(
                "release_gradients=True is not for find_unused_parameters=True or static_graph=True on this "
                "device: DDP would write zeros into a bucket whose memory is given back. Leave one of them "
                "out"
            )
        owned = self._owned()
        for parameter in averaged:
            if parameter.requires_grad and parameter not in owned:
                raise ConfigError(
                    "release_gradients=True takes all gradients away, and no overlapped optimizer has the "
                    f"parameter of shape {tuple(parameter.shape)}: give its optimizer to overlap_optimizer "
                    "too, freeze it, or leave release_gradients out"
                )

    def wait_for(self, places: threading.Semaphore, device: torch.device) -> None:
        """Wait until there is room for another bucket. After a wait that timed out, return at once."""
        timeout = group_timeout(self._process_group, device) or default_group_timeout()
        if self._limited and not places.acquire(timeout=timeout.total_seconds()):
            # A slower average would fail anyway, and DDP would wait forever if the hook got no more buckets.
            self._limited = False
            warnings.warn(
                f"a bucket was not averaged within {timeout}: the communication hook seems to wait for later "
                "ones, so that release_gradients=True saves little. backward() no longer waits for it",
                RuntimeWarning,
                stacklevel=2,
            )


class ReleasedPass:
    """Takes away the gradients of a bucket after its step, and frees the bucket's memory.

    Until ``backward()`` ends, ``.grad`` is the bucket's own memory, freed or not: DDP finds the averages
    where it would copy them to, so it copies nothing.

    Args:
        release: How to free memory.
    """

    def __init__(self, release: GradientRelease) -> None:
        self._release = release
        self._places = threading.Semaphore(_IN_FLIGHT)
        self._events: deque[Any] = deque()
        self._handed_over: list[torch.Tensor] = []
        """Parameters whose gradients are removed at the end of the pass."""
        self._only_bucket = False
        """Whether there is only one bucket, for example before DDP has rebuilt them."""
        self._over = False
        """Whether the pass has ended, with or without an error."""

    def hand_over(self, gradients: Gradients, used: Sequence[bool], *, last: bool) -> None:
        """Drop the gradients that DDP has copied into a bucket; other gradients may still be needed.

        Args:
            gradients: The bucket.
            used: Which of its parameters got a gradient on this rank.
            last: Whether it is the last bucket of the pass.
        """
        self._only_bucket = last and not self._handed_over
        self._handed_over += gradients.parameters
        if not gradients.buffer.is_sparse:
            for parameter, view, is_used in zip(gradients.parameters, gradients.views, used, strict=True):
                if is_used:
                    parameter.grad = view

    def limit_backward(self, done: torch.futures.Future[Any], device: torch.device) -> None:
        """Let ``backward()`` go on once few enough buckets are in progress.

        Args:
            done: Completes when the bucket that was just handed over is stepped or has failed.
            device: The device of the bucket.
        """
        places = self._places
        if done.done():  # on an accelerator a callback would take a stream
            places.release()
        else:
            done.add_done_callback(lambda _: places.release())
        self._release.wait_for(places, device)
        while len(self._events) > _IN_FLIGHT:
            self._events.popleft().synchronize()

    def parts(self, gradients: Gradients) -> Iterator[list[torch.Tensor]]:
        """Yield a bucket's parameters in parts, to be stepped one by one; frees each part after its step.

        New optimizer states of a part are allocated after the gradients of earlier parts are freed.
        """
        parameters, views = gradients.parameters, gradients.views
        begin = size = 0
        for place, view in enumerate(views):
            size += 0 if view.is_sparse else view.nbytes
            if size >= _PART_BYTES or place == len(views) - 1:
                yield parameters[begin : place + 1]
                if not gradients.buffer.is_sparse and place < len(views) - 1:
                    self._release.memory.give_back_part(views[begin : place + 1])
                begin, size = place + 1, 0

    def give_back(self, gradients: Gradients, averaged: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Free the memory of a bucket that was stepped.

        Args:
            gradients: The bucket.
            averaged: The gradients of the step; they differ from the bucket's where no rank used a parameter.

        Returns:
            The tensor that DDP is to take for the average.
        """
        if gradients.buffer.is_sparse:
            return gradients.buffer
        value, views = self._release.memory.give_back(gradients, alone=self._only_bucket)
        for parameter, view, used, instead in zip(
            gradients.parameters, gradients.views, averaged, views, strict=True
        ):
            if used is view:
                parameter.grad = None if self._over else instead
        if value.device.type != "cpu":
            stream = torch.get_device_module(value.device).current_stream(value.device)
            self._events.append(stream.record_event())
        return value

    def end(self) -> None:
        """End the pass, with or without an error, when nothing steps: remove all gradients handed over."""
        self._over = True
        for parameter in self._handed_over:
            parameter.grad = None
