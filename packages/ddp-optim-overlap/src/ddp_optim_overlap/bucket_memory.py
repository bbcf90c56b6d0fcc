"""Free the memory of a bucket after its step, and allocate it again for the next pass."""

from __future__ import annotations

import abc
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from ddp_optim_overlap.errors import ConfigError
from dist_utils.process_groups import record_use

__all__ = ["BucketMemory", "Gradients", "PageMemory", "StorageMemory", "memory_of"]


class Gradients(Protocol):
    """The gradients of a bucket.

    Attributes:
        parameters: The bucket's parameters.
        buffer: The bucket's memory.
        views: The gradient of each parameter in it.
    """

    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    views: list[torch.Tensor]


class BucketMemory(abc.ABC):
    """A way to free the memory of buckets.

    Attributes:
        stays_readable: Whether DDP may read and write a bucket whose memory was freed.
    """

    stays_readable = True

    def give_back_part(self, views: Sequence[torch.Tensor]) -> None:  # noqa: B027 - optional
        """Free the memory that only these neighboring gradients of a bucket occupy."""

    @abc.abstractmethod
    def give_back(self, gradients: Gradients, *, alone: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Free a whole bucket, once nobody reads its gradients any more.

        Args:
            gradients: The gradients of a dense bucket.
            alone: Whether the backward pass has no other bucket.

        Returns:
            The tensor that DDP may take for the average, and the gradients in it. If these are the ``.grad``
            of the parameters, DDP copies nothing at the end of the backward pass.
        """

    def restore(self, parameter: torch.Tensor | None = None) -> None:  # noqa: B027 - optional
        """Allocate a parameter's bucket again (``None``: all buckets); its contents are undefined."""


class PageMemory(BucketMemory):
    """Returns whole pages to the system, which supplies zeros when they are used next.

    The tensor keeps its addresses, so nothing has to be restored.
    """

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
        begin = min(view.data_ptr() for view in views)
        end = max(view.data_ptr() + view.nbytes for view in views)
        _give_back_pages(views[0].untyped_storage(), begin, end)

    def give_back(self, gradients: Gradients, *, alone: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Free the pages that lie wholly inside the bucket."""
        del alone
        storage = gradients.buffer.untyped_storage()
        _give_back_pages(storage, storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return gradients.buffer, gradients.views


def _give_back_pages(storage: torch.UntypedStorage, begin: int, end: int) -> None:
    """Return the whole pages of a storage between two addresses to the system.

    Raises:
        ConfigError: The pages are not private to this process.
        OSError: The system does not take them.
    """
    if storage.is_shared() or getattr(storage, "filename", None) is not None:
        raise ConfigError(
            "a bucket lies in shared memory or a file, which cannot be given back: leave release_gradients "
            "out"
        )
    begin = max(begin, storage.data_ptr())
    end = min(end, storage.data_ptr() + storage.nbytes())
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    if libc.madvise(address, size, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class StorageMemory(BucketMemory):
    """Frees a bucket's storage and allocates it again.

    DDP must not touch a bucket in between. Meanwhile DDP takes a scratch tensor for the average, which it
    never reads; all buckets on a device share its memory.
    """

    stays_readable = False

    def __init__(self) -> None:
        # DDP owns its buckets, and may replace them.
        self._given: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._scratch: dict[torch.device, torch.UntypedStorage] = {}

    def give_back(self, gradients: Gradients, *, alone: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Free the bucket once the current stream has reached this point."""
        buffer, size = gradients.buffer, gradients.buffer.untyped_storage().nbytes()
        if alone:  # before DDP has rebuilt its buckets, say: the scratch would be just as large
            return buffer, gradients.views
        if not buffer.untyped_storage().resizable():
            raise ConfigError(
                f"the memory of a bucket on {buffer.device} cannot be given back: leave release_gradients out"
            )
        scratch = self._scratch.get(buffer.device)
        if scratch is None or scratch.nbytes() < size:
            scratch = torch.empty(size, dtype=torch.uint8, device=buffer.device).untyped_storage()
            self._scratch[buffer.device] = scratch
        record_use(buffer)
        for parameter in gradients.parameters:
            self._given[parameter] = weakref.ref(buffer), size
        instead, *views = (_same_place(one, scratch) for one in (buffer, *gradients.views))
        buffer.untyped_storage().resize_(0)
        return instead, views

    def restore(self, parameter: torch.Tensor | None = None) -> None:
        """Allocate the storage again."""
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


def memory_of(parameters: Sequence[torch.Tensor]) -> BucketMemory:
    """Return how to free the buckets of these parameters."""
    on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    return PageMemory() if on_host and PageMemory.works() else StorageMemory()
