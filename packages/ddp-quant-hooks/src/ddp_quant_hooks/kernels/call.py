"""What a kernel gets: one call, checked before anything is written, whichever backend will run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from ddp_quant_hooks.kernels.layout import SCALE_BYTES, Layout, is_integer

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be encoded and decoded."""

RESIDUAL_DTYPES = (torch.bfloat16,)
"""fp16 lacks the range: rounding errors of small gradients would be zero."""

Uses: TypeAlias = list[tuple[str, torch.Tensor, bool]]
"""Tensors, each with its name in errors, and whether it is written."""


class Shard(NamedTuple):
    """How many consecutive values, and where they, their message and residuals are in memory; 0: nowhere."""

    values: int
    tensor: int
    message: int
    residual: int
    new_residual: int


class KernelCall(NamedTuple):
    """Values, or means of messages, become messages or values, shard by shard.

    Attributes:
        lengths: The number of values of each shard.
        values: Of all shards: the input if nothing is ``incoming``, the output if nothing is ``outgoing``.
        incoming: For each shard the messages whose mean it is.
        layout: Of the messages that come in, or else of those that go out.
        outgoing: For each shard the message to write.
        new_layout: Of the messages that go out, or else of those that come in; of the same block size.
        residual: Added to what is encoded; ``None``: nothing.
        new_residual: Gets the rounding error; ``None``: not needed.
    """

    lengths: Sequence[int]
    values: torch.Tensor | None
    incoming: Sequence[Sequence[torch.Tensor]]
    layout: Layout
    outgoing: Sequence[torch.Tensor]
    new_layout: Layout
    residual: torch.Tensor | None = None
    new_residual: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.outgoing[0].device if self.values is None else self.values.device

    @property
    def ranks(self) -> int:
        """The number of messages whose mean is computed; 0 if values are encoded."""
        return len(self.incoming[0]) if self.incoming else 0

    def shards(self) -> list[Shard]:
        """Return the addresses of all shards, without the time to make tensors of their parts."""
        pointers = map(_pointer, (self.values, self.residual, self.new_residual))
        (tensor, size), (before, kept), (after, lost) = pointers
        messages = [message.data_ptr() for message in self.outgoing] or [0] * len(self.lengths)
        starts = [0, *accumulate(self.lengths)][:-1]
        return [
            Shard(length, tensor + start * size, message, before + start * kept, after + start * lost)
            for length, start, message in zip(self.lengths, starts, messages, strict=True)
        ]

    def begin(self) -> None:
        """Raise unless a kernel can do this, and tell autograd of what it writes."""
        if not (self.incoming or self.outgoing) or not all(map(len, self.incoming)):
            raise ValueError("there must be at least one message")
        self._check_lengths()
        device, count, several = self.device, sum(self.lengths), len(self.lengths) > 1
        values, in_place = self.values, None
        incoming = [
            (f"messages[{shard}][{rank}]" if several else f"messages[{rank}]", message, length)
            for shard, (messages, length) in enumerate(zip(self.incoming, self.lengths, strict=False))
            for rank, message in enumerate(messages)
        ]
        outgoing = [
            (f"messages[{shard}]" if several else "message", message, length)
            for shard, (message, length) in enumerate(zip(self.outgoing, self.lengths, strict=False))
        ]
        uses: Uses = []
        if values is not None:
            check_tensor("values", values, VALUE_DTYPES, (count,), device)
            uses.append(("values", values, not outgoing))
        check_messages(incoming, self.layout, device)
        check_messages(outgoing, self.new_layout, device)
        for name, tensor in (("residual", self.residual), ("new_residual", self.new_residual)):
            if tensor is not None:
                check_tensor(name, tensor, RESIDUAL_DTYPES, (count,), device)
                uses.append((name, tensor, name == "new_residual"))
        if incoming and outgoing and self.layout == self.new_layout:  # a block is read before it is written
            in_place = self.outgoing[0].data_ptr()
        uses += [(name, each, True) for name, each, _ in outgoing]
        uses += [(name, each, False) for name, each, _ in incoming if each.data_ptr() != in_place]
        refuse_overlap(uses)
        mark_written(uses)

    def _check_lengths(self) -> None:
        lengths = self.lengths
        if not all(map(is_integer, lengths)):
            raise TypeError(f"lengths must be ints, got {lengths!r}")
        shards = len(self.incoming or self.outgoing)
        if shards != len(lengths):
            raise ValueError(f"each shard must have a length, got {len(lengths)} for {shards} shards")
        if any(len(messages) != self.ranks for messages in self.incoming):
            raise ValueError("all shards must have the same number of messages")
        if min(lengths) < 0 or (self.values is not None and sum(lengths) != self.values.numel()):
            raise ValueError(f"lengths must be at least 0 and sum to the number of values, got {lengths}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    alignment: int | None = None,
) -> None:
    """Raise unless ``tensor`` is of this shape, on the device, and in memory as kernels read it."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and of shape {shape}, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    alignment = alignment or tensor.element_size()
    # torch looks at the offset in the storage, other backends at the address.
    address, offset = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    if address % alignment or offset % alignment:
        raise ValueError(
            f"{name} must start at a multiple of {alignment} bytes in memory and in its storage, "
            f"not {address % alignment} and {offset % alignment} bytes behind one"
        )


def check_messages(
    messages: Sequence[tuple[str, torch.Tensor, int]], layout: Layout, device: torch.device
) -> None:
    """Raise unless each message has its number of values."""
    sizes = {length: layout.message_bytes(length) for length in {length for *_, length in messages}}
    for name, message, length in messages:
        check_tensor(name, message, (torch.uint8,), (sizes[length],), device, SCALE_BYTES)


def refuse_overlap(uses: Uses) -> None:
    """Raise if a kernel would write what it uses for something else, too.

    Args:
        uses: All tensors that it uses, contiguous.
    """
    spans = sorted(
        (start := tensor.data_ptr(), start + size, writes, name)
        for name, tensor, writes in uses
        if (size := tensor.nbytes)
    )
    end = written_end = 0  # of all spans so far
    for start, stop, writes, name in spans:
        if start < (end if writes else written_end):
            other = next(
                each[3] for each in spans if each[1] > start and each[3] != name and writes | each[2]
            )
            raise ValueError(f"{other} and {name} must not share memory: a kernel writes one of them")
        end = max(end, stop)
        if writes:
            written_end = max(written_end, stop)


def mark_written(uses: Uses) -> None:
    """Tell autograd of what a kernel writes, which it does not see; refuse leaves, as torch does."""
    written = [(name, tensor) for name, tensor, writes in uses if writes]
    for name, tensor in written:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"the kernels write in place and have no gradient, but {name}, which they would write, "
                "requires grad: detach it, or call them under torch.no_grad()"
            )
    # A tensor of inference mode has no version.
    torch.autograd.graph.increment_version([tensor for _, tensor in written if not tensor.is_inference()])


def _pointer(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return where a tensor starts and how long its elements are; twice 0 if there is none."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.element_size())
