"""The state of :func:`low_rank_hook`: its options, and what it keeps between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from ddp_quant_hooks.averaging import is_captured
from ddp_quant_hooks.kernels.layout import WIRE_VERSION
from ddp_quant_hooks.lowrank.average import SLOTS, LowRank
from ddp_quant_hooks.options import check_options, whole_number
from ddp_quant_hooks.states import AveragingState
from dist_utils import GroupLike


class LowRankState(AveragingState):
    """Options of :func:`low_rank_hook`, and what it keeps between steps. One for each model.

    Args:
        process_group: As for :class:`QuantizedAllreduceState`.
        rank: The number of columns of each factor. Twice as many send twice as many bytes and halve what is
            lost of a training's loss; wide layers lose a little more at the same rank.
        bits: Bits of a number in factors, and in what has no factors, 4 or 8.
        warm_up_steps: So many steps send all values in few bits first, with error feedback: gradients change
            most in the first ones, and the factors of one step are where the next one begins.
        min_bytes: Smaller buckets are averaged without compression. On 0.1 Gbit/s the default takes about as
            long as the messages of two means.
        sample_every: As for :class:`QuantizedAllreduceState`. The error of one step says little here: what a
            step leaves out is sent in later ones.
        intra_node: Likewise. Factors are linear in gradients, so ranks of a host sum factors.
        levels: Likewise.

    Raises:
        TypeError: ``process_group`` is not a group, or an option is of another type.
        ValueError: This rank is not a member of the group, or an option has an unknown value.

    All ranks must have the same options: they are compared before the first bucket.

    Does not pickle: :meth:`state_dict` has what it keeps.

    Cost:
        4 bytes of memory a value, and 8 for each number of a right factor.

    Source:
        PowerSGD (Vogels, Karimireddy and Jaggi 2019) and
        ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``.

    Example:
        >>> state = LowRankState(rank=8)  # doctest: +SKIP
        >>> ddp.register_comm_hook(state.bind(ddp), low_rank_hook)  # doctest: +SKIP
    """

    least_error = 0.3
    """Of one step, as measured on small models; more of it on large ones."""

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        rank: int = 8,
        bits: Literal[8, 4] = 4,
        warm_up_steps: int = 10,
        min_bytes: int = 1 << 14,
        sample_every: int = 0,
        intra_node: Literal["auto", "full", "quantized", "flat"] | None = None,
        levels: Sequence[int] | None = None,
    ) -> None:
        self.rank = whole_number("rank", rank, at_least=1)
        """The number of columns of each factor."""
        self.warm_up_steps = whole_number("warm_up_steps", warm_up_steps, at_least=0)
        """The number of steps without factors."""
        self.options = check_options(
            bits=bits,
            block_size=32,
            gather=None,
            rotate=None,
            error_feedback="both",
            min_bytes=min_bytes,
            exact_1d=False,
            sample_every=sample_every,
            intra_node=intra_node,
            levels=levels,
        )
        """How factors are sent."""
        super().__init__(process_group, kept=SLOTS)
        self.average = LowRank(self.options, self.rank, self.warm_up_steps, self.feedback, self.counter)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""
        group = self.process_group
        return {
            "state": type(self).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "rank of factors": self.rank,
        }

    def terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name."""
        own = {"rank": self.rank, "warm_up_steps": self.warm_up_steps}
        return {**super().terms(), **vars(self.options), **own, "wire format": WIRE_VERSION}

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's decisions forever.

        Raises:
            RuntimeError: It is.
        """
        if is_captured(buffer.device):
            raise RuntimeError(
                "a CUDA graph cannot hold factors and residuals, which change from step to step"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a LowRankState does not pickle: make one with the same options, and load state_dict()"
        )
