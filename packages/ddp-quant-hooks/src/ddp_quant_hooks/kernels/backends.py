"""The interface of the kernels' backends. Their arguments have been checked; no shard is empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ddp_quant_hooks.wire_format import Layout

__all__ = ["Backend", "Outgoing"]


class Outgoing(NamedTuple):
    """The outputs of an encoding, and its residual.

    Attributes:
        message: The message.
        residual: Added to the values first; ``None``: nothing.
        new_residual: Gets the rounding error of the message; ``None``: not needed. Of the same dtype.
    """

    message: torch.Tensor
    residual: torch.Tensor | None = None
    new_residual: torch.Tensor | None = None

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """The dtype of both residuals; ``None`` if there is none."""
        either = self.new_residual if self.residual is None else self.residual
        return None if either is None else either.dtype

    def addresses(self) -> tuple[int, int, int]:
        """Return the addresses of the three, as compiled kernels take them; 0 for ``None``."""
        message, residual, new_residual = self
        return (
            message.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if new_residual is None else new_residual.data_ptr(),
        )


class Backend(Protocol):
    """Encode, reduce and decode flat tensors, with the same bits as every other backend."""

    def encode(self, shards: Sequence[tuple[torch.Tensor, Outgoing]], layout: Layout) -> None:
        """Write the message of each shard's values."""

    def reduce(
        self, messages: Sequence[torch.Tensor], layout: Layout, values: int, out: Outgoing, new_layout: Layout
    ) -> None:
        """Write the message, in ``new_layout``, of the mean of messages of ``values`` values."""

    def decode(self, shards: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], layout: Layout) -> None:
        """Write the mean of each shard's messages to its values."""
