"""A state that chooses the hook: it tries several in the first steps of training."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.auto_checkpoints import AutoCheckpoints
from ddp_quant_hooks.auto_choice import Assignment, Choice
from ddp_quant_hooks.auto_passes import AutoPasses, RunningPass, bucket_bytes, close_states
from ddp_quant_hooks.auto_times import Arriving, Mark
from ddp_quant_hooks.auto_trial import PASSES_BEFORE_CHOICE, Trial, least_passes
from ddp_quant_hooks.candidates import Candidate, default_candidates
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.resume import Bucket
from ddp_quant_hooks.wire_format import is_integer
from dist_utils import GroupLike, OrderedWorker, require_same_terms, resolve_group
from dist_utils.process_groups import collective_device
from dist_utils.torch_compat import GradBucket

__all__ = ["AutoState", "CandidateError"]

_log = logging.getLogger(__name__)

_MAX_ERROR = 0.03
_DEFAULT_COUNT = 4
"""Of candidates, if none are given."""


class CandidateError(RuntimeError):
    """A candidate has raised during the trial; its error is the cause."""


class AutoState(AutoCheckpoints):
    """Chooses between communication hooks by trying them in the first steps of training. One for each model.

    Candidates have turns of a few backward passes each. What counts is how long whole steps take with each,
    from the first bucket of a pass to that of the next one, by the slowest rank's times: an exchange that is
    short by itself may take from the computation what it saves on the wire. How long the exchanges of single
    buckets take makes one more contender where sizes differ in what is best for them: a candidate for each
    size. All ranks choose the same, in the same step. A candidate behind another one in the order, of fewer
    bytes, must be faster than that by more than the noise.

    Args:
        process_group: As in :func:`dist_utils.resolve_group`; ``None`` is WORLD, looked up when used.
        candidates: Pairs of a state and a hook by name, as ``register_comm_hook`` takes them, the most exact
            one first; each state for this alone. ``None``: fp32, bf16, 8 and 4 bits of this project.
        max_error: Candidates whose averages have a larger relative error, in the L2 norm, are not chosen.
            Measured on buckets of the trial, with one exact all-reduce for each sample. ``None``: not
            measured, any may be chosen. The default, 0.03, admits 8 bits, which show 0.007 for Gaussian
            gradients and 0.018 for heavy tails, and leaves out 4 bits, which show 0.09: who accepts those
            gives more.
        look_again_every: Try again after so many backward passes with a choice, for a network that changes.
            0: never.
        most_passes: How many backward passes the trial may take.

    Attributes:
        choice: What was chosen and why, a :class:`Choice`; ``None`` before. While the candidates are tried
            again it is still the former one.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no candidate; a number is out of range; or ``most_passes`` are too few for a turn
            of each candidate.

    All ranks must have the same candidates and options: they are compared before the first bucket.

    At a change of candidates, and when one is chosen, the residuals of those concerned are dropped: what
    quantization has lost in one pass is lost then. The first rank logs the choice at ``INFO``.

    Without a process group of more than one rank there is nothing to choose, and nothing is done.

    Cost:
        In the trial some steps with each candidate, one exact all-reduce of a bucket for each turn, and
        one of some numbers for each round of turns. After it, nothing beside the chosen hooks; the other
        states are closed, or wait without residuals for the next trial.

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
        self._given = None if candidates is None else _checked_candidates(candidates)
        count = _DEFAULT_COUNT if self._given is None else len(self._given)
        _require_numbers(max_error, look_again_every, most_passes, count)
        self.max_error, self.look_again_every, self.most_passes = max_error, look_again_every, most_passes
        self.choice: Choice | None = None
        self._group = None if process_group is None else resolve_group(process_group)
        self._candidates: dict[str, Candidate] | None = None
        self._passes: AutoPasses | None = None
        self._worker: OrderedWorker | None = None
        self._agreed = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that averages."""
        return resolve_group(self._group)

    @property
    def candidates(self) -> Mapping[str, Candidate]:
        """What is chosen from, by name."""
        if self._candidates is None:
            self._candidates = self._given or default_candidates(self.process_group)
        return self._candidates

    @property
    def passes(self) -> AutoPasses:
        """Which candidate has which backward pass."""
        if self._passes is None:
            self._passes = AutoPasses(
                self.candidates, self._make_trial, self._chosen, self._idle, self.look_again_every
            )
        return self._passes

    @property
    def trying(self) -> bool:
        """Whether candidates are being tried."""
        return self.passes.trying

    @property
    def worker(self) -> OrderedWorker:
        """Where ranks exchange times and exact means; made at first use."""
        group = self.process_group
        if self._worker is None or self._worker.process_group is not group:
            self._worker = OrderedWorker(group, name=type(self).__name__, terms=self._terms)
        return self._worker

    def remember(self, ddp: DistributedDataParallel) -> None:
        """Know a model, here and in the candidates' states."""
        super().remember(ddp)
        for candidate in self.candidates.values():
            if isinstance(candidate.state, ResidualCheckpoints):
                candidate.state.remember(ddp)

    def begin_bucket(self, bucket: Bucket) -> RunningPass:
        """Return the backward pass of a bucket that has come.

        Raises:
            RuntimeError: The ranks have not agreed.
        """
        if not self._agreed:
            self.worker.agree()
            self._agreed = True
        return self.passes.begin_bucket(bucket, self.average)

    def average(self, running: RunningPass, bucket: Bucket) -> torch.futures.Future[Any]:
        """Average a bucket with the candidate whose turn it is.

        Raises:
            CandidateError: The candidate raises, during a trial.
        """
        buffer = bucket.buffer()
        size = bucket_bytes(buffer)
        name = self.passes.assignment.of(size)
        state, hook = self.candidates[name]
        trial = running.trial
        if trial is None:
            return hook(state, cast("GradBucket", bucket))

        def call() -> torch.futures.Future[Any]:
            try:
                averaged = hook(state, cast("GradBucket", bucket))
            except Exception as error:
                raise CandidateError(f"candidate {name!r} of {type(self).__name__}: {error}") from error
            if not hasattr(averaged, "then"):  # futures of C++ are of another class than torch.futures.Future
                raise CandidateError(f"candidate {name!r} returned a {type(averaged).__name__}, no future")
            return averaged

        if trial.sampled == len(running.layout) - 1 and not buffer.is_sparse:
            return trial.error.average(self.worker, buffer, call)
        if not trial.timed:
            return call()
        handed_over = Mark(buffer.device)
        return trial.times.watch(size, handed_over, buffer.device, call())

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's candidates for ever.

        Raises:
            RuntimeError: It is, and there is something to choose.
        """
        captured = buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured and (self.trying or self.look_again_every):
            raise RuntimeError(
                "a CUDA graph cannot hold what changes from step to step: capture when the choice is made, "
                "with look_again_every=0"
            )

    def discard_step(self) -> None:
        """Say that the gradients of the last ``backward()`` will not be stepped with.

        See :meth:`QuantizedAllreduceState.discard_step`.
        """
        for _, state in self._states_in_use():
            state.discard_step()

    def close(self) -> None:
        """End the threads and private groups of this state and its candidates; a later bucket makes new ones.

        After an error in communication this is how every rank makes a fresh start. A trial that was not over
        begins anew; a choice stays.
        """
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._agreed = False
        if self._candidates is not None:
            close_states(list(self._candidates.values()))
        if self._passes is not None:
            self._passes.start_over()

    def agreed_sizes(self) -> Sequence[int]:
        """Return the bytes of the buckets of a pass, when all ranks have the same. For the trial."""
        sizes = self.passes.sizes
        require_same_terms(self.process_group, f"{type(self).__name__}'s trial", {"bytes of buckets": sizes})
        return sizes

    def largest(self, values: Sequence[float]) -> _Largest:
        """Begin to compare numbers with those of the other ranks. For the trial."""
        return _Largest(self.worker, values)

    def _make_trial(self, meanwhile: Assignment) -> Trial:
        return Trial(list(self.candidates), meanwhile, self.max_error, self.most_passes, self)

    def _chosen(self, choice: Choice) -> None:
        self.choice = choice
        if self.process_group.rank() == 0:
            _log.info("%s: %s", type(self).__name__, choice.why)

    def _idle(self) -> None:
        """Free what only the trial has needed."""
        used = [self.candidates[name] for name in self.passes.assignment.names]
        close_states([one for one in self.candidates.values() if one not in used], but=used)
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _states_in_use(self) -> list[tuple[str, ResidualCheckpoints]]:
        in_use = ((name, self.candidates[name].state) for name in sorted(self.passes.assignment.names))
        return [(name, state) for name, state in in_use if isinstance(state, ResidualCheckpoints)]

    def _terms(self) -> dict[str, object]:
        ranks = dist.get_process_group_ranks(self.process_group)
        for name, (state, _) in self.candidates.items():
            own = _ranks_of(state)
            if own is not None and own != ranks:
                raise ValueError(f"candidate {name!r} averages over ranks {own}, not over {ranks}")
        hooks = [(name, _told(state, hook)) for name, (state, hook) in self.candidates.items()]
        return {
            "candidates": hooks,
            "max_error": self.max_error,
            "look_again_every": self.look_again_every,
            "most_passes": self.most_passes,
            "choice": None if self.passes.trying else self.passes.assignment,
            "passes since the choice": self.passes.since_choice,
        }

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(
            f"a {type(self).__name__} pickles its options only: the copy uses WORLD and tries again",
            stacklevel=2,
        )
        return {
            "candidates": self._given,
            "max_error": self.max_error,
            "look_again_every": self.look_again_every,
            "most_passes": self.most_passes,
        }

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(None, **options)  # type: ignore[misc] # as copy and pickle make objects


class _Largest:
    """Numbers on their way to all ranks and back: of each, the largest."""

    def __init__(self, worker: OrderedWorker, values: Sequence[float]) -> None:
        device = collective_device(worker.process_group)
        own = torch.tensor(values, dtype=torch.float64, pin_memory=device.type != "cpu")

        arrived: list[Arriving] = []

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            there = own.to(device, non_blocking=True)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
            arrived.append(Arriving(there))
            return there

        self._own, self._arrived = own, arrived  # alive until they are there
        self._done = worker.submit(job, device=device, name="auto_hook:slowest_rank")

    def read(self) -> list[float]:
        """Return the numbers, when they have come."""
        self._done.wait()
        return self._arrived[0].read()


def _require_numbers(max_error: object, look_again_every: object, most_passes: object, count: int) -> None:
    if max_error is not None:
        if not isinstance(max_error, (int, float)) or isinstance(max_error, bool):
            raise TypeError(f"max_error must be a number or None, got {max_error!r}")
        if not 0 <= max_error < math.inf:
            raise ValueError(f"max_error must be at least 0 and finite, or None, got {max_error!r}")
    least = least_passes(count) if count > 1 else 0
    for name, number, lowest in (
        ("look_again_every", look_again_every, 0),
        (f"most_passes (for a turn of each of {count} candidates)", most_passes, least),
    ):
        if not is_integer(number):
            raise TypeError(f"{name} must be an integer, got {number!r}")
        if cast("int", number) < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {number}")


def _checked_candidates(candidates: object) -> dict[str, Candidate]:
    if not isinstance(candidates, Mapping):
        raise TypeError(f"candidates must be a mapping of names, got {type(candidates).__name__}")
    if not candidates:
        raise ValueError("candidates must have at least one hook")
    checked = {}
    for name, pair in candidates.items():
        if not isinstance(name, str):
            raise TypeError(f"candidates must have strings as names, got {name!r}")
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[1]):
            raise TypeError(f"candidate {name!r} must be a pair of a state and a hook, got {pair!r}")
        checked[name] = Candidate(*pair)
    return checked


def _ranks_of(state: object) -> list[int] | None:
    """Return over which ranks a candidate averages, as far as its state tells."""
    group = getattr(state, "process_group", state)
    if group is None or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        ranks: list[int] = dist.get_process_group_ranks(resolve_group(group))
        return ranks
    return None


def _told(state: object, hook: Callable[..., Any]) -> str:
    options = getattr(state, "options", "")
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{name}({type(state).__name__} {options})".replace(" )", ")")
