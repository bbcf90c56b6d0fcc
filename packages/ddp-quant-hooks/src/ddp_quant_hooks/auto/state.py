"""The state that chooses, and its hook: one bucket, from ``backward()`` to the candidate that averages it."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.auto.candidates import Candidate, check_candidates, default_candidates
from ddp_quant_hooks.auto.trial import Choice, Trial, TrialPass, largest_of_ranks
from ddp_quant_hooks.averaging import is_captured
from ddp_quant_hooks.feedback.step import Kind, Step
from ddp_quant_hooks.hook import check_buffer
from dist_utils import GroupLike, OrderedWorker, torch_compat
from dist_utils.comm_hooks import Bucket, HookState, Mark, buckets_only, completed_future, failed_future
from dist_utils.torch_compat import GradBucket

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_VERSION = 2

_MAX_ERROR = 0.03


class CandidateError(RuntimeError):
    """A candidate has raised during the trial; its error is the cause."""


class AutoState(HookState):
    """Chooses between communication hooks by trying them in the first steps of training. One for each model.

    Candidates take turns of a few backward passes each, in four rounds. What counts is how long whole
    steps take with each, from the first bucket of a pass to that of the next, on the slowest rank: a short
    exchange may slow the computation by more than it saves on the wire. All ranks choose the same, in the
    same step. A candidate that sends fewer bytes than an earlier one must be faster than that by 2 %.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD; looked up
            when used.
        candidates: Pairs of a state and a hook by name, as ``register_comm_hook`` takes them, the most exact
            one first; no state is used elsewhere. ``None``: fp32, bf16, 8 and 4 bits of this project.
        max_error: Candidates whose averages have a larger relative error, in the L2 norm, are not chosen.
            Measured on buckets of the trial, with one exact all-reduce for each sample. ``None``: not
            measured, any may be chosen. The default, 0.03, admits 8 bits, which show 0.007 for Gaussian
            gradients, and excludes 4 bits, which show 0.09: those are not even tried below 0.045, nor 8 bits
            below 0.0035. Set a larger number to accept 4 bits.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no candidate, or ``max_error`` is out of range.

    All ranks must have the same candidates and options: they are compared before the first bucket.

    When candidates change, and when one is chosen, the residuals of those concerned are dropped: what these
    passes have lost is then not fed back. Low rank is tried as it goes on after its first steps, though with
    new factors, and begins with these steps when it is chosen. The first rank logs the choice at ``INFO``.

    One candidate averages all buckets, and the choice stays. To try again, for a network whose speed changes,
    load on every rank what :meth:`state_dict` returned before the first step.

    Without a process group of more than one rank there is nothing to choose, and nothing is done.

    Cost:
        In the trial some steps with each candidate, one exact all-reduce of a bucket for each turn, and
        one of some numbers for each round of turns. After it, only the chosen hook; the other states are
        closed.

    Example:
        >>> ddp.register_comm_hook(AutoState(), auto_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        candidates: Mapping[str, tuple[Any, Callable[..., Any]]] | None = None,
        max_error: float | None = _MAX_ERROR,
    ) -> None:
        super().__init__(process_group)
        self.max_error = _check_limit(max_error)
        self._given = candidates
        self.candidates: Mapping[str, Candidate] = (
            default_candidates(process_group) if candidates is None else check_candidates(candidates)
        )
        """The candidates, by name."""
        self._agreed: weakref.ref[dist.ProcessGroup] | None = None
        self._loaded: str | None = None
        self._running: Step | None = None
        self._now: Trial | Choice
        self._turn: TrialPass
        self._begin_trial()

    @property
    def choice(self) -> Choice | None:
        """The choice and its reasons; ``None`` before."""
        return self._now if isinstance(self._now, Choice) else None

    @property
    def trying(self) -> bool:
        """Whether candidates are being tried."""
        return isinstance(self._now, Trial)

    @property
    def _in_use(self) -> Candidate:
        return self.candidates[self._turn.candidate]

    def bind(self, ddp: DistributedDataParallel) -> "Self":
        """Bind this state and those of its candidates to a model; see :meth:`HookState.bind`."""
        super().bind(ddp)
        for candidate in self.candidates.values():
            if candidate.bound is not None:
                candidate.bound.bind(ddp)
        return self

    def terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name.

        The options of candidates are not among them: their own states compare those.

        Raises:
            ValueError: A candidate averages over other ranks than this state.
        """
        ranks = dist.get_process_group_ranks(self.process_group)
        for name, candidate in self.candidates.items():
            if (own := candidate.ranks()) not in (None, ranks):
                raise ValueError(f"candidate {name!r} averages over ranks {own}, not over {ranks}")
        return {
            "candidates": [(name, *candidate.terms()) for name, candidate in self.candidates.items()],
            "max_error": self.max_error,
            "candidates left out": self._known_errors(),
            "loaded choice": self._loaded,
        }

    def open_bucket(self, title: str, bucket: Bucket) -> None:
        """Begin a bucket; in a trial the first one of a pass begins that.

        Raises:
            RuntimeError: The ranks do not agree.
            ValueError: A candidate averages over other ranks.
        """
        self._agree()
        self.measure_wait(bucket.buffer().device)
        if not isinstance(self._now, Trial):
            self.bucket_came()  # the chosen candidate's own state compares it
            return
        self.begin_bucket(title, bucket)
        task, index = torch_compat.graph_task_id(), bucket.index()
        if self._running is None or not self._running.includes_bucket(task, index):
            self._running = Step(Kind.BACKWARD)
            self._begin_pass(self._now, bucket.buffer().device)
        self._running.add_bucket(task, bucket)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Average the bucket that was just begun with the candidate that was chosen or whose turn it is.

        Raises:
            CandidateError: The candidate raises, during the trial.
        """
        candidate = self._in_use
        if not self.trying:
            return candidate.hook(candidate.state, bucket)
        call = partial(_try, self._turn.candidate, candidate, bucket, self.worker)
        return self._turn.average(self.worker, bucket.buffer(), call)

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's candidate forever.

        Raises:
            RuntimeError: It is, and there is no choice yet.
        """
        if self.trying and is_captured(buffer.device):
            raise RuntimeError(
                "a CUDA graph cannot hold a trial, which changes from step to step: capture after the choice"
            )

    def discard_step(self) -> None:
        """Declare that no optimizer step will use the gradients of the last ``backward()``.

        See :meth:`QuantizedAllreduceState.discard_step`.
        """
        if (state := self._in_use.averaging) is not None:
            state.discard_step()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals of all candidates by a factor, when the scale of losses changes.

        See :meth:`QuantizedAllreduceState.rescale`.
        """
        for candidate in self.candidates.values():
            if candidate.averaging is not None:
                candidate.averaging.rescale(factor)

    def close(self) -> None:
        """End the threads and private groups of this state and its candidates; a later bucket makes new ones.

        After an error in communication this is how every rank makes a fresh start. An unfinished trial starts
        over, and so does one that was not over on every rank; a choice of all ranks stays.
        """
        self._end_groups()
        if self.trying:
            self._begin_trial()

    def _end_groups(self) -> None:
        super().close()
        for candidate in self.candidates.values():
            candidate.close()
        self._agreed = self._running = None

    def state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return the choice and the residuals of this rank that go with it, for :meth:`load_state_dict`.

        Every rank has its own: save one file for each. During a trial, only the fact that one is running is
        saved. For candidates from other projects only the name is saved; save the contents of their states
        yourself.

        Args:
            model: The model whose gradients were averaged, with or without its ``DistributedDataParallel``
                wrapper; ``None`` after :meth:`bind`.

        Returns:
            Tensors on the CPU, numbers and strings in dicts, lists and tuples, which ``torch.load`` reads
            with ``weights_only=True``.

        Raises:
            ValueError: The chosen candidate has residuals, and no model is known, or it lacks a parameter.

        Cost:
            Waits for the buckets that are being averaged. A copy of the residuals.
        """
        chosen = None if self.choice is None else self.candidates[self.choice.candidate].averaging
        return {
            "version": _VERSION,
            "candidates": list(self.candidates),
            "choice": None if self.choice is None else asdict(self.choice),
            "residuals": None if chosen is None else chosen.state_dict(model),
        }

    def load_state_dict(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        """Load the choice that another run, or this one, has saved. Call it on every rank.

        Training continues bitwise as in the saved run, if the chosen candidate belongs to this project, and
        one backward pass was made before loading, as :meth:`QuantizedAllreduceState.load_state_dict` says. A
        run that was saved during a trial tries again from the beginning.

        Ends threads and private groups, as :meth:`close` does.

        Args:
            state: What :meth:`state_dict` returned on this rank.
            model: As for :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: It is of other candidates, or the residuals are of another rank or number of ranks, or
                do not fit the model; nothing is changed.
            RuntimeError: Inside ``backward()``.
        """
        if torch_compat.inside_backward():
            raise RuntimeError("load_state_dict() inside backward(): call it between two steps")
        choice = self._saved_choice(state)
        if choice is not None and (chosen := self.candidates[choice.candidate].averaging) is not None:
            chosen.load_state_dict(state["residuals"], model)
        self._end_groups()
        self._loaded = None if choice is None else choice.candidate
        if choice is None:
            self._begin_trial()
        else:
            self._choose(choice)

    def _saved_choice(self, state: object) -> Choice | None:
        """Return a saved choice, or raise as :meth:`load_state_dict`."""
        if not isinstance(state, dict):
            raise TypeError(
                f"a choice is loaded from what state_dict() returned, got a {type(state).__name__}"
            )
        here = _VERSION, list(self.candidates)
        there = state.get("version"), state.get("candidates")
        if repr(there) != repr(here):  # as text: values from a file may be anything
            raise ValueError(f"the choice is of (version, candidates) {there!r:.500}, but here it is {here}")
        try:
            choice = None if state["choice"] is None else Choice(**state["choice"])
            chosen = None if choice is None else self.candidates[choice.candidate].averaging
            if (state["residuals"] is None) != (chosen is None):
                raise ValueError("either the saved candidate or this one has no residuals")
        except (LookupError, TypeError) as error:
            raise ValueError(f"this is not a choice that state_dict() returned: {error!r}") from error
        return choice

    def _known_errors(self) -> dict[str, str]:
        """Return why some candidates are not tried, by name, as far as it is known before."""
        limit = math.inf if self.max_error is None else self.max_error
        return {
            name: f"its error is hardly below {error:.2g}, and max_error is {limit:.2g}"
            for name, candidate in self.candidates.items()
            if (error := candidate.least_error) > limit
        }

    def _agree(self) -> None:
        """Compare the ranks, once: their terms, and whether all have a choice."""
        group = self.process_group
        if self._agreed is not None:
            if self._agreed() is group:
                return
            self.close()  # the process groups were destroyed and made again
        self.worker.agree()
        if self._loaded is None:  # else all have the same choice
            (largest,) = largest_of_ranks(self.worker, {"trying": self.trying})
            if largest["trying"]:
                self._begin_trial()
        self._agreed = weakref.ref(group)

    def _begin_pass(self, trial: Trial, device: torch.device) -> None:
        found = trial.next_pass(Mark(device), self.worker)
        before, after = self._in_use, self.candidates[found.candidate]
        # A sample measures the error of one pass, without residuals of earlier ones.
        anew = isinstance(found, Choice) or found.sampled is not None
        for candidate in (before, after) if anew or before is not after else ():
            if candidate.averaging is not None:
                candidate.averaging.wait()
                # Residuals would be of a gradient from long ago.
                candidate.averaging.feedback.forget()
                candidate.averaging.average.skips_first_steps = isinstance(found, TrialPass)
        if isinstance(found, TrialPass):
            self._turn = found
            return
        self._choose(found)
        if self.process_group.rank() == 0:
            _log.info("AutoState: %s", found.why)

    def _begin_trial(self) -> None:
        self._now = Trial(list(self.candidates), self.max_error, self._known_errors())
        self._turn = TrialPass(next(iter(self.candidates)))

    def _choose(self, choice: Choice) -> None:
        self._now, self._turn = choice, TrialPass(choice.candidate)
        super().close()
        chosen = self._in_use
        for candidate in self.candidates.values():
            if candidate.state is not chosen.state:
                candidate.close()

    def __reduce__(self) -> Any:
        warnings.warn(
            f"a {type(self).__name__} pickles its options only: the copy uses WORLD and tries again",
            stacklevel=2,
        )
        return _new_state, (type(self), self._given, self.max_error)


@buckets_only
def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the candidate that was chosen or, during the trial, whose turn it is.

    Args:
        state: Candidates and choice; one state for each model.
        bucket: From DDP, of a dtype and layout that the candidates accept.

    Returns:
        The candidate's future, or one with its value. At world size 1 it is complete.

    Raises:
        TypeError: ``state`` is not an :class:`AutoState`, the bucket is not of a floating-point dtype, or the
            model is compiled with DDP's Python reducer, which hands over no buckets.
        CandidateError: A candidate raises, during the trial.
        ValueError: This rank is not in the group.
        RuntimeError: A peer failed, ranks have other candidates or options, or a candidate averages over
            other ranks; raised by ``backward()``.

    Example:
        >>> ddp.register_comm_hook(AutoState(), auto_hook)  # doctest: +SKIP
    """
    if not isinstance(state, AutoState):
        raise TypeError(f"auto_hook needs an AutoState as its state, got {type(state).__name__}")
    buffer = check_buffer("auto_hook", bucket)
    if state.process_group.size() == 1:
        return completed_future(buffer)
    state.refuse_capture(buffer)
    try:
        state.open_bucket("auto_hook", bucket)
    except Exception as error:  # noqa: BLE001 - raised here, any would leave DDP in the middle of a pass
        state.fail(error)
        return failed_future(error.with_traceback(None), buffer)
    try:
        return state.average(bucket)
    except Exception as error:
        state.fail(error)  # the peers hear of it
        raise


def _new_state(kind: type[AutoState], candidates: Any, max_error: float | None) -> AutoState:
    """Make a state, as copy and pickle do: from arguments that they have copied."""
    return kind(candidates=candidates, max_error=max_error)


def _try(
    name: str, candidate: Candidate, bucket: GradBucket, worker: OrderedWorker
) -> torch.futures.Future[Any]:
    try:
        averaged = candidate.hook(candidate.state, bucket)
    except Exception as error:
        raise CandidateError(f"candidate {name!r} of AutoState: {error}") from error
    if not hasattr(averaged, "then"):  # futures of C++ are of another class than torch.futures.Future
        raise CandidateError(f"candidate {name!r} returned a {type(averaged).__name__}, no future")
    if averaged.done():
        try:
            averaged.value()
        except Exception as error:  # noqa: BLE001 - as of a comparison that a lost peer did not come to
            worker.fail(error)  # or the next bucket would wait for it again
    return averaged


def _check_limit(max_error: object) -> float | None:
    if max_error is None:
        return None
    if not isinstance(max_error, (int, float)) or isinstance(max_error, bool):
        raise TypeError(f"max_error must be a number or None, got {max_error!r}")
    if not 0 <= max_error < math.inf:
        raise ValueError(f"max_error must be at least 0 and finite, or None, got {max_error!r}")
    return max_error
