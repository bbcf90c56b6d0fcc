"""A state that chooses the hook: it tries several in the first steps of training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.auto_checkpoints import AutoCheckpoints
from ddp_quant_hooks.auto_choice import Choice
from ddp_quant_hooks.auto_options import AutoOptions, checked_candidates, described_candidates
from ddp_quant_hooks.auto_passes import AutoPasses, RunningPass, close_states
from ddp_quant_hooks.auto_ranks import AutoRanks
from ddp_quant_hooks.auto_trial import PASSES_BEFORE_CHOICE
from ddp_quant_hooks.candidates import Candidate, default_candidates
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.resume import Bucket
from dist_utils import GroupLike, resolve_group

__all__ = ["AutoState"]

_log = logging.getLogger(__name__)

_MAX_ERROR = 0.03


class AutoState(AutoCheckpoints):
    """Chooses between communication hooks by trying them in the first steps of training. One for each model.

    Candidates take turns of a few backward passes each. What counts is how long whole steps take with each,
    from the first bucket of a pass to that of the next, on the slowest rank: a short exchange may slow the
    computation by more than it saves on the wire. Where the best candidate depends on the size of the bucket,
    the combination of the best for each size takes part too. All ranks choose the same, in the same step. A
    candidate that sends fewer bytes than an earlier one must be faster than that by more than the noise.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD; looked up
            when used.
        candidates: Pairs of a state and a hook by name, as ``register_comm_hook`` takes them, the most exact
            one first; no state is used elsewhere. ``None``: fp32, bf16, 8 and 4 bits of this project.
        max_error: Candidates whose averages have a larger relative error, in the L2 norm, are not chosen.
            Measured on buckets of the trial, with one exact all-reduce for each sample. ``None``: not
            measured, any may be chosen. The default, 0.03, admits 8 bits, which show 0.007 for Gaussian
            gradients and 0.018 for heavy tails, and excludes 4 bits, which show 0.09; set a larger number to
            accept those.
        look_again_every: Repeat the trial after this many backward passes with a choice, for a network that
            changes. 0: never.
        most_passes: How many backward passes the trial may take.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no candidate; a number is out of range; or ``most_passes`` are too few for a turn
            of each candidate.

    All ranks must have the same candidates and options: they are compared before the first bucket.

    When candidates change, and when one is chosen, the residuals of those concerned are dropped: the
    quantization error of one pass is then not fed back. The first rank logs the choice at ``INFO``.

    Without a process group of more than one rank there is nothing to choose, and nothing is done.

    Cost:
        In the trial some steps with each candidate, one exact all-reduce of a bucket for each turn, and
        one of some numbers for each round of turns. After it, only the chosen hooks and a count of passes,
        some 30 microseconds of Python for each bucket; the other states are closed, or wait without residuals
        for the next trial.

    Example:
        >>> ddp.register_comm_hook(AutoState(), auto_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        candidates: Mapping[str, tuple[Any, Callable[..., Any]]] | None = None,
        max_error: float | None = _MAX_ERROR,
        look_again_every: int = 0,
        most_passes: int = PASSES_BEFORE_CHOICE,
    ) -> None:
        super().__init__()
        self._given = None if candidates is None else checked_candidates(candidates)
        self.options = AutoOptions(max_error, look_again_every, most_passes)
        self.options.require_fit(self._given)
        self._group = None if process_group is None else resolve_group(process_group)
        self._candidates: dict[str, Candidate] | None = None
        self._passes: AutoPasses | None = None
        self._ranks: AutoRanks | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that averages."""
        return resolve_group(self._group)

    @property
    def candidates(self) -> Mapping[str, Candidate]:
        """The candidates, by name."""
        if self._candidates is None:
            self._candidates = self._given or default_candidates(self._group)
        return self._candidates

    @property
    def choice(self) -> Choice | None:
        """The latest choice and its reasons; ``None`` before the first one."""
        return None if self._passes is None else self._passes.choice

    @property
    def trying(self) -> bool:
        """Whether candidates are being tried."""
        return self.passes.trying

    @property
    def passes(self) -> AutoPasses:
        """The backward passes, each with its candidate; made at first use."""
        if self._passes is None:
            self._passes = AutoPasses(self.candidates, self.ranks, self.options)
        return self._passes

    @property
    def ranks(self) -> AutoRanks:
        """The communication between the ranks; made at first use."""
        if self._ranks is None:
            self._ranks = AutoRanks(self._group, type(self).__name__)
        return self._ranks

    def remember(self, ddp: DistributedDataParallel) -> None:
        """Remember a model, here and in the candidates' states."""
        of_all_ranks = self._group is None
        super().remember(ddp)
        if of_all_ranks and self.process_group is not resolve_group(None):
            self._passes = self._ranks = None  # they were made for WORLD
            self._candidates = None
        for candidate in self.candidates.values():
            if isinstance(candidate.state, ResidualCheckpoints):
                candidate.state.remember(ddp)

    def begin_bucket(self, bucket: Bucket) -> RunningPass:
        """Return the backward pass that a new bucket belongs to.

        Raises:
            RuntimeError: The ranks have not agreed.
        """
        if self.ranks.moved:  # the process groups were destroyed and made again
            self.close()
        self.ranks.agree(self._terms, self._try_again if self.passes.began else None)
        return self.passes.begin_bucket(bucket)

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's candidates forever.

        Raises:
            RuntimeError: It is, and there is something to choose.
        """
        captured = buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured and (self.trying or self.options.look_again_every):
            raise RuntimeError(
                "a CUDA graph cannot hold what changes from step to step: capture when the choice is made, "
                "with look_again_every=0"
            )

    def discard_step(self) -> None:
        """Declare that no optimizer step will use the gradients of the last ``backward()``.

        See :meth:`QuantizedAllreduceState.discard_step`.
        """
        for _, state in self._states_in_use():
            state.discard_step()

    def close(self) -> None:
        """End the threads and private groups of this state and its candidates; a later bucket makes new ones.

        After an error in communication this is how every rank makes a fresh start. An unfinished trial starts
        over; a choice stays.
        """
        if self._passes is not None:
            close_states(list(self.candidates.values()))
            self._passes.start_over()
        if self._ranks is not None:
            self._ranks.close()

    def _states_in_use(self) -> list[tuple[str, ResidualCheckpoints]]:
        return [
            (name, state) for name, (state, _) in self.passes.used if isinstance(state, ResidualCheckpoints)
        ]

    def _try_again(self) -> None:
        _log.info("AutoState: the ranks stopped at different passes, some with a choice: all try again")
        self.passes.try_again()

    def _terms(self) -> dict[str, object]:
        return {
            "candidates": described_candidates(self.candidates, self.process_group),
            **asdict(self.options),
            "choice": None if self.choice is None else self.choice.assignment,
            "trying": self.trying,
            "passes since the choice": self.passes.since_choice,
        }

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(
            f"a {type(self).__name__} pickles its options only: the copy uses WORLD and tries again",
            stacklevel=2,
        )
        return {"candidates": self._given, **asdict(self.options)}

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(None, **options)  # type: ignore[misc] # as copy and pickle make objects
