"""The memory behind a tensor, freed and allocated again while the tensor object lives on."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch


def alloc_storage(tensor: torch.Tensor, size: Sequence[int]) -> bool:
    """Allocate memory for a tensor whose storage was freed. Its contents are undefined.

    Enough for this tensor: others that share the storage, such as the base of a view, may need more and must
    then not be read.

    Args:
        tensor: A strided tensor of any device, after :func:`free_storage`.
        size: A shape; its number of elements is allocated. Usually ``tensor.shape``: with more elements,
            :func:`free_storage` refuses the tensor, and ``tensor.untyped_storage().resize_(0)`` frees it.

    Returns:
        ``True`` if memory was allocated, ``False`` if the storage had this size already. Under
        ``torch.compile`` always ``False``: nothing is done while tracing.

    Raises:
        ValueError: The tensor needs more elements than ``size`` has, or its storage is allocated with
            another size.
        TypeError: The tensor has no storage (a sparse one), or one that cannot be resized (NumPy's
            memory, memory shared between processes).

    Cost:
        One allocation. No communication.

    Source:
        ``torch.distributed.utils._alloc_storage``, which returns ``None`` and allocates too little.

    Example:
        >>> tensor = torch.ones(3)
        >>> free_storage(tensor), alloc_storage(tensor, (3,)), alloc_storage(tensor, (3,))
        (True, True, False)
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    storage = _resizable_storage(tensor)
    wanted = prod(size) * tensor.element_size()
    if storage.nbytes() == wanted:
        return False
    if storage.nbytes() != 0:
        raise ValueError(
            f"the storage of a tensor of shape {tuple(tensor.shape)} has {storage.nbytes()} bytes already; "
            f"free_storage before allocating {wanted} for size {tuple(size)}"
        )
    if wanted < _bytes_needed(tensor):
        raise ValueError(
            f"size {tuple(size)} gives {wanted} bytes, but a {tensor.dtype} tensor of shape "
            f"{tuple(tensor.shape)} and stride {tensor.stride()} needs {_bytes_needed(tensor)}"
        )
    storage.resize_(wanted)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Free the memory of a tensor; its shape, dtype and autograd history stay.

    Whatever else uses the same storage loses its memory too, so the tensor must cover all of it. A view that
    covers all of it cannot be told from its base and is accepted.

    Args:
        tensor: A strided tensor of any device.

    Returns:
        ``True`` if memory was freed, ``False`` if it was free already. Under ``torch.compile`` always
        ``False``: nothing is done while tracing.

    Raises:
        ValueError: The tensor is a view of a larger storage, or has gaps or overlaps in memory.
        TypeError: The tensor has no storage (a sparse one), or one that cannot be resized (NumPy's
            memory, memory shared between processes).

    Source:
        ``torch.distributed.utils._free_storage``, which returns ``None`` and frees the whole base under a
        view that begins where the base does.

    Example:
        >>> tensor = torch.ones(3)
        >>> free_storage(tensor), free_storage(tensor), tensor.shape
        (True, False, torch.Size([3]))
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    storage = _resizable_storage(tensor)
    if storage.nbytes() == 0:
        return False
    covered = tensor.numel() * tensor.element_size()
    if not covered == _bytes_needed(tensor) == storage.nbytes():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()} and offset "
            f"{tensor.storage_offset()} does not cover exactly its storage of {storage.nbytes()} bytes: "
            "freeing it could take the memory of other tensors"
        )
    storage.resize_(0)
    return True


def data_ptr_allocated(tensor: torch.Tensor) -> bool:
    """Return whether there is memory behind a tensor: not after :func:`free_storage`, not on meta.

    Args:
        tensor: A strided tensor of any device.

    Raises:
        TypeError: It is not a tensor, or has no storage (a sparse one).

    Source:
        ``torch.distributed.utils._data_ptr_allocated``.

    Example:
        >>> data_ptr_allocated(torch.ones(3)), data_ptr_allocated(torch.ones(3, device="meta"))
        (True, False)
    """
    return _storage(tensor).data_ptr() > 0


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else f"tensor with layout {tensor.layout}"
        raise TypeError(f"a {kind} has no storage of its own")
    return tensor.untyped_storage()


def _resizable_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    storage = _storage(tensor)
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        raise TypeError(
            f"the storage of a tensor of shape {tuple(tensor.shape)} cannot be resized: its memory belongs "
            "to something else, such as NumPy or another process"
        )
    return storage


def _bytes_needed(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    spans = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(spans) + 1) * tensor.element_size()
