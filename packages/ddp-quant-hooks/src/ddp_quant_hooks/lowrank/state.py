"""The state of :func:`low_rank_hook`: its options, and what it keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.feedback import checkpoint
from ddp_quant_hooks.lowrank.average import SLOTS, ExactNames, LowRank, LowRankOptions
from ddp_quant_hooks.lowrank.factors import RankRule
from ddp_quant_hooks.options import check_options, whole_number
from ddp_quant_hooks.states import AveragingState
from dist_utils import GroupLike

if TYPE_CHECKING:
    from typing_extensions import Self


class LowRankState(AveragingState):
    """Options of :func:`low_rank_hook`, and what it keeps between steps. One for each model.

    Args:
        process_group: As for :class:`QuantizedAllreduceState`.
        rank: The number of columns of each factor. Twice as many send twice as many bytes and halve what is
            lost of a training's loss; wide layers lose a little more at the same rank. ``"auto"``: by the
            shorter side of each matrix, 8 from 128 on, 12 from 256, 16 from 512 and so on.
        bits: Bits of a number in factors, and in what has no factors, 4 or 8.
        residual_bits: 1: what factors leave out is sent, too, as signs and the mean magnitude of 256 values
            (0.14 bytes a value), and only what that loses is left for the next step.
        warm_up_steps: So many steps send all values in few bits first, with error feedback: gradients change
            most in the first ones, and the factors of one step are where the next one begins.
        exact: Names of parameters, or keys of tensors, that are averaged without compression, in an
            all-reduce of their own: patterns as for files, in which ``*`` stands for any characters. Names
            need :meth:`bind`.
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

    Does not pickle: :meth:`state_dict` has what it keeps. Another number of ranks goes on from what
    :meth:`gather_state_dict` returned by :meth:`scatter_state_dict`: each with the mean of all residuals.

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
        rank: int | Literal["auto"] = 8,
        bits: Literal[8, 4] = 4,
        residual_bits: Literal[1] | None = None,
        warm_up_steps: int = 10,
        exact: Sequence[str] = (),
        min_bytes: int = 1 << 14,
        sample_every: int = 0,
        intra_node: Literal["auto", "full", "quantized", "flat"] | None = None,
        levels: Sequence[int] | None = None,
    ) -> None:
        self.rank: RankRule = "auto" if rank == "auto" else whole_number("rank", rank, at_least=1)
        """The number of columns of each factor, or ``"auto"``."""
        self.warm_up_steps = whole_number("warm_up_steps", warm_up_steps, at_least=0)
        """The number of steps without factors."""
        if bits not in (8, 4):
            raise ValueError(f"bits must be 8 or 4, got {bits!r}")
        if residual_bits is not None and whole_number("residual_bits", residual_bits, at_least=1) != 1:
            raise ValueError(f"residual_bits must be 1 or None, got {residual_bits!r}")
        self.residual_bits: Literal[1] | None = residual_bits
        """Bits of a value of what factors leave out; ``None``: it is not sent."""
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
        super().__init__(process_group, kept=SLOTS)
        names = ExactNames(exact, self.names)
        self._own = LowRankOptions(self.rank, self.residual_bits, self.warm_up_steps, names)
        self.average = LowRank(self.options, self._own, self.feedback, self.counter)

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Bind this state to its model, as every state.

        Raises:
            ValueError: Also if a pattern of ``exact`` fits no parameter of the model.
        """
        if self._own.exact.patterns:
            self._own.exact.require_matches(self.names.parameters(ddp, "bind"))
        return super().bind(ddp)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""
        group = self.process_group
        return {
            "state": type(self).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "rank of factors": self.rank,
        }

    def _parts(self, gathered: object) -> list[Any]:
        """Return the part of each rank of what was gathered, perhaps by another number of ranks.

        Then each rank goes on with the mean of all residuals: what is left to be sent is the same.
        """
        saved = checkpoint.ranks_of(gathered)
        ranks = self.process_group.size()
        return saved if len(saved) == ranks else divide(saved, ranks)

    def terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name."""
        return {**super().terms(), **self._own_terms()}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a state that averages like this one."""
        options = self.options.arguments()
        names = ("bits", "min_bytes", "sample_every", "intra_node", "levels")
        return {name: options[name] for name in names} | self._own_terms()

    def _own_terms(self) -> dict[str, Any]:
        return {**vars(self._own), "exact": self._own.exact.patterns}


# ---- what another number of ranks has saved ----


def divide(saved: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return what each of so many ranks loads: the mean of all residuals, so that nothing is lost of it.

    Right factors are equal on all ranks, so each goes on with them.

    Args:
        saved: What each rank has saved.
        world_size: The number of ranks that go on.

    Raises:
        ValueError: These are not what ranks save.
    """
    try:
        kinds = {kind: _means(saved, kind, world_size) for kind in ("parameters", "keys")}
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"these are not residuals that gather_state_dict() returned: {error!r:.200}"
        ) from error
    return [{**saved[0], "rank": rank, "world_size": world_size, **kinds} for rank in range(world_size)]


def _means(saved: Sequence[Mapping[str, Any]], kind: str, world_size: int) -> dict[str, Any]:
    return {
        name: {
            **entry,
            "slots": {
                "own": _mean([rank[kind][name]["slots"] for rank in saved], entry["length"], world_size),
                **{slot: kept for slot, kept in entry["slots"].items() if slot == "factor"},
            },
        }
        for name, entry in saved[0][kind].items()
    }


def _mean(slots: Sequence[Mapping[str, Any]], length: int, world_size: int) -> dict[str, Any]:
    """Return the mean of all that ranks have left of an owner's values, as each rank's own.

    Errors of means of rests are among them: other ranks compute other means.
    """
    total = torch.zeros(length, dtype=torch.float32, device="cpu")  # not the default ones
    for of_rank in slots:
        for name in filter(of_rank.__contains__, ("own", "rest")):
            for start, weight, values in of_rank[name]["pieces"]:
                total[start : start + len(values)] += weight * values.float()
    return {"length": length, "pieces": [(0, 1.0 / world_size, total.bfloat16())]}
