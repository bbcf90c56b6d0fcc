"""Free the gradients of a bucket as soon as it is stepped, until the next pass needs the memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.model import averaged_parameters, may_leave_out
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps
from ddp_optim_overlap.passes.bucket import Bucket
from dist_utils.process_groups import record_use
from dist_utils.torch_compat import group_timeout

IN_FLIGHT = 2
"""Buckets that may be averaged or stepped while backward() continues. With the bucket that fills up and the
gradient that is copied into it, four exist at a time; with 3 here, five. Gloo averages two at a time."""

_MORE_SECONDS = 2.0
"""How much longer than an average may take backward() waits for one: that one's own error comes first."""

_PART_BYTES = 2**25
"""Part of a bucket to step at once. DDP's buckets have 25 MiB, but its first pass has one large bucket."""


class PageMemory:
    """Returns whole pages to the system, which supplies zeros when they are used next.

    The tensor keeps its addresses, so nothing has to be restored.

    Attributes:
        stays_readable: Whether DDP may read and write a bucket whose memory was freed.
    """

    stays_readable = True

    @staticmethod
    def works() -> bool:
        """Whether the system takes pages back. Linux does, unless the process has locked its memory."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return False
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            page[0] = 1
            try:
                page.madvise(mmap.MADV_DONTNEED)
            except OSError:
                return False
            return page[0] == 0

    def give_back_part(self, views: Sequence[torch.Tensor]) -> None:
        """Free the pages that lie wholly inside these gradients."""
        ranges = [(view.data_ptr(), view.nbytes) for view in views if view.nbytes]  # empty ones are at 0
        begin = min((address for address, _ in ranges), default=0)
        end = max((address + size for address, size in ranges), default=0)
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            return
        address, size = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        if _libc().madvise(address, size, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def give_back(self, bucket: Bucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Free a dense bucket, once nobody reads its gradients any more.

        Returns:
            The tensor that DDP may take for the average, and the gradients in it. If these are the ``.grad``
            of the parameters, DDP copies nothing at the end of the backward pass.
        """
        self.give_back_part([bucket.buffer])
        return bucket.buffer, bucket.views

    def restore(self, parameter: torch.Tensor | None = None) -> None:
        """Do nothing."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # each call makes a new class


class StorageMemory:
    """Frees a bucket's storage and allocates it again.

    DDP must not touch a bucket in between. Meanwhile DDP takes a scratch tensor for the average, which it
    never reads; all buckets on a device share its memory.
    """

    stays_readable = False

    def __init__(self) -> None:
        # DDP owns its buckets, and may replace them.
        self._given: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._scratch: dict[torch.device, torch.UntypedStorage] = {}

    def give_back_part(self, views: Sequence[torch.Tensor]) -> None:
        """Do nothing: a storage is freed as a whole."""

    def give_back(self, bucket: Bucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Free a dense bucket once the current stream has reached this point; returns the same."""
        buffer, size = bucket.buffer, bucket.buffer.untyped_storage().nbytes()
        scratch = self._scratch.get(buffer.device)
        if scratch is None or scratch.nbytes() < size:
            scratch = torch.empty(size, dtype=torch.uint8, device=buffer.device).untyped_storage()
            self._scratch[buffer.device] = scratch
        record_use(buffer)
        for parameter in bucket.parameters:
            self._given[parameter] = weakref.ref(buffer), size
        instead, *views = (_same_place(one, scratch) for one in (buffer, *bucket.views))
        buffer.untyped_storage().resize_(0)
        return instead, views

    def restore(self, parameter: torch.Tensor | None = None) -> None:
        """Allocate a parameter's bucket again (``None``: all buckets); its contents are undefined."""
        if parameter is None:
            self._scratch.clear()
        for one in [parameter] if parameter is not None else list(self._given):
            given = self._given.pop(one, None)
            buffer = None if given is None else given[0]()
            if given is not None and buffer is not None and not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(given[1])


def _same_place(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor with the same layout in another storage."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


class GradientRelease:
    """Takes away the gradients of a bucket after its step, and frees the bucket's memory, pass by pass.

    Until ``backward()`` ends, ``.grad`` is the bucket's own memory, freed or not: DDP finds the averages
    where it would copy them to, so it copies nothing.

    Args:
        ddp: The model, which is not kept alive. The timeout of its group limits every wait.
        parts: Have the parameters that are stepped.

    Attributes:
        memory: How memory is freed.
        seconds_to_wait: How long ``backward()`` waits for an average before it goes on: the communication
            hook may wait for later buckets.

    Raises:
        ConfigError: Gradients would be lost, or DDP would touch freed memory.
    """

    def __init__(self, ddp: DistributedDataParallel, parts: Sequence[PartialSteps]) -> None:
        on_host = all(parameter.device.type == "cpu" for parameter in ddp.parameters())
        pages = on_host and PageMemory.works()
        self.memory: PageMemory | StorageMemory = PageMemory() if pages else StorageMemory()
        timeout = group_timeout(ddp.process_group, torch.device("cpu"))
        self.seconds_to_wait = timeout.total_seconds() + _MORE_SECONDS
        self._model = weakref.ref(ddp)
        self._parts = parts
        self._events: deque[Any] = deque()
        self._parameters: list[torch.Tensor] = []
        """Parameters whose gradients are removed at the end of the pass."""
        self._only_bucket = False
        """Whether there is only one bucket, for example before DDP has rebuilt them."""
        self.require_possible(averaged_parameters(ddp))

    def require_possible(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if the gradients of a backward pass that begins cannot be freed.

        Args:
            averaged: The parameters that have been in a bucket before.

        Raises:
            ConfigError: Gradients would be lost, or DDP would touch freed memory.
        """
        model = self._model()
        touched = model is not None and (model.gradient_as_bucket_view or may_leave_out(model))
        if touched and not self.memory.stays_readable:
            raise ConfigError(
                "release_gradients=True is not for gradient_as_bucket_view=True, find_unused_parameters=True "
                "or static_graph=True on this device: DDP would touch a bucket whose memory is given back. "
                "Leave one of them out"
            )
        for parameter in averaged:
            if parameter.requires_grad and not any(id(parameter) in one.places for one in self._parts):
                raise ConfigError(
                    "release_gradients=True takes all gradients away, and no overlapped optimizer has the "
                    f"parameter of shape {tuple(parameter.shape)}: give its optimizer to overlap_optimizer "
                    "too, freeze it, or leave release_gradients out"
                )

    def begin(self, bucket: Bucket, used: Sequence[bool], *, last: bool) -> None:
        """Drop the gradients that DDP has copied into a bucket; other gradients may still be needed.

        Args:
            bucket: The bucket.
            used: Which of its parameters got a gradient on this rank.
            last: Whether it is the last bucket of the pass.
        """
        self._only_bucket = last and not self._parameters
        self._parameters += bucket.parameters
        if not bucket.buffer.is_sparse:
            for parameter, view, is_used in zip(bucket.parameters, bucket.views, used, strict=True):
                if is_used:
                    parameter.grad = view

    def limit_device(self) -> None:
        """Let the host go on once an accelerator has stepped all but a few of the enqueued buckets."""
        while len(self._events) > IN_FLIGHT:
            self._events.popleft().synchronize()

    def parts(self, bucket: Bucket) -> Iterator[list[torch.Tensor]]:
        """Yield a bucket's parameters in parts, to be stepped one by one; frees each part after its step.

        New optimizer states of a part are allocated after the gradients of earlier parts are freed.
        """
        parameters, views = bucket.parameters, bucket.views
        begin = size = 0
        for place, view in enumerate(views):
            size += 0 if view.is_sparse else view.nbytes
            if size >= _PART_BYTES or place == len(views) - 1:
                yield parameters[begin : place + 1]
                if not bucket.buffer.is_sparse and place < len(views) - 1:
                    self.memory.give_back_part(views[begin : place + 1])
                begin, size = place + 1, 0

    def give_back(self, bucket: Bucket, averaged: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Free the memory of a bucket that was stepped.

        Args:
            bucket: The bucket.
            averaged: The gradients of the step; they differ from the bucket's where no rank used a parameter.

        Returns:
            The tensor that DDP is to take for the average.
        """
        if bucket.buffer.is_sparse:
            return bucket.buffer
        if self._only_bucket and not self.memory.stays_readable:  # what DDP takes instead would be as large
            value, views = bucket.buffer, bucket.views
        else:
            value, views = self.memory.give_back(bucket)
        for parameter, view, used, instead in zip(
            bucket.parameters, bucket.views, averaged, views, strict=True
        ):
            if used is view:
                parameter.grad = instead
        if value.device.type != "cpu":
            stream = torch.get_device_module(value.device).current_stream(value.device)
            self._events.append(stream.record_event())
        return value

    def end(self) -> None:
        """End the pass, with or without an error: remove all its buckets' gradients."""
        while self._parameters:
            self._parameters.pop().grad = None
