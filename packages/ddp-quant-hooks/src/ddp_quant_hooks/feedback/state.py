"""A state with error feedback, as users see it: bound to its model, in steps, saved and loaded."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.feedback import checkpoint
from ddp_quant_hooks.feedback.checkpoint import Saved, on_every_rank
from ddp_quant_hooks.feedback.names import ModelNames
from ddp_quant_hooks.feedback.residuals import Key
from ddp_quant_hooks.feedback.store import Feedback
from dist_utils import GroupLike, group_rank
from dist_utils.comm_hooks import HookState
from dist_utils.torch_compat import inside_backward

if TYPE_CHECKING:
    from typing_extensions import Self


_bound: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many states of each class have been bound to models of a group."""


class FeedbackState(HookState):
    """The part of a hook's state that keeps residuals, and saves and loads them.

    Args:
        process_group: As for :class:`dist_utils.comm_hooks.HookState`.
        kept: The names of the slots that are kept, as for :class:`Feedback`.
    """

    coordinates: list[str] | None = None
    """Those of the shards that residuals belong to, if a model under ``fully_shard`` has used the state."""

    def __init__(self, process_group: GroupLike = None, *, kept: Collection[str]) -> None:
        super().__init__(process_group)
        self.feedback = Feedback(kept, wait=self.wait)
        self.names = ModelNames()
        self._number = 0
        self._numbered_in: weakref.ref[dist.ProcessGroup] | None = None

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Bind this state to its model, so that no other call needs the model.

        A state without a process group takes the model's. The model is not kept alive. All ranks must bind
        the states of a group in the same order: before their first buckets the ranks compare the names of the
        parameters and the numbers of the states, so that no two models are taken for each other.

        From now on ``optimizer.step()`` raises if it would use gradients of the model that were not averaged,
        and warns if the hook is not registered with this module, perhaps because a framework ignored it; see
        :class:`dist_utils.comm_hooks.BucketWatch`.

        Args:
            ddp: The ``DistributedDataParallel`` module whose gradients are averaged.

        Returns:
            The state itself.

        Raises:
            TypeError: ``ddp`` is not a ``DistributedDataParallel`` module.
            ValueError: It averages over other ranks than this state.

        Example:
            >>> ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)  # doctest: +SKIP
        """
        super().bind(ddp)
        self.names.bind(ddp)
        group = self.process_group
        if self._numbered_in is None or self._numbered_in() is not group:
            numbers, name = _bound.setdefault(group, Counter()), type(self).__name__
            numbers[name] += 1
            self._number, self._numbered_in = numbers[name], weakref.ref(group)
        return self

    def terms(self) -> Mapping[str, object]:
        """Return what must be equal on all ranks, by name."""
        return {
            "parameters of the bound model": self.names.digest,
            "number of the bound state": self._number,
            "loaded residuals": self.feedback.origin,
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make all collectives on plain tensors in a ``with`` block one step.

        With error feedback, a step's rounding errors are added to the values of the same keys in the next
        step. A step counts if the block ends without an error, every call succeeds with finite values, and
        :meth:`discard_step` is not called before the next step begins. Otherwise residuals are what they were
        before the step.

        A call outside of any such block is a step of its own; or, inside ``backward()``, all calls of that
        pass are one.

        Raises:
            RuntimeError: Inside of another ``step()``; or a ``backward()`` inside averages a model's buckets
                with error feedback.
            ValueError: This state averages the buckets of a model with error feedback; raised by the first
                call inside.

        Example:
            >>> with state.step():  # doctest: +SKIP
            ...     for name, change in changes.items():
            ...         all_reduce(change, dist.ReduceOp.AVG, state, key=name)
        """
        step = self.feedback.begin_step()
        try:
            with step.outcome:
                yield
        finally:
            step.end_part()

    def discard_step(self) -> None:
        """Declare that no optimizer step will use the gradients of the last ``backward()``.

        The residuals become what they were before that pass. Call this, on every rank, where the loop skips
        ``optimizer.step()``, or where something raises between ``backward()`` and it, and nowhere else: if
        no pass has averaged gradients since the last ``optimizer.step()``, as where ``forward()`` has raised
        or after ``no_sync()``, it would undo a pass that was used. A step with a value that is not finite,
        which ``GradScaler`` skips, and a ``backward()`` that raises, need no call. Of several passes whose
        gradients were added up without ``no_sync()``, only the last is undone.

        Raises:
            RuntimeError: Inside ``backward()``.
        """
        _refuse_inside_backward("discard_step()")
        self.feedback.discard()

    def state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return this rank's residuals and what they depend on, for :meth:`load_state_dict`.

        Every rank has its own: save one file for each, or see :meth:`gather_state_dict`. They are those that
        the last successful ``backward()`` left. Call it between steps, not in a thread beside training.

        Args:
            model: The model whose gradients were averaged, with or without its ``DistributedDataParallel``
                wrapper. Residuals are saved by the names of its parameters. ``None`` after :meth:`bind`, and
                for residuals of plain tensors, which are saved by their keys.

        Returns:
            Tensors on the CPU, numbers and strings in dicts, lists and tuples, which ``torch.load`` reads
            with ``weights_only=True``.

        Raises:
            ValueError: There are residuals of a model, but no model is known, or it lacks a parameter.

        Cost:
            Waits for the buckets that are being averaged; not in a fork of this process, so fork after
            ``backward()``. A copy of the residuals.
        """
        self.wait()
        kept, names = [*self.feedback.snapshot()], dict[int, str]()
        of_tensors = all(isinstance(owner, Key) for owner, _ in kept) and not self.names.digest
        if model is not None or not of_tensors:
            known = self.names.parameters(model, "state_dict")
            names = {id(parameter): name for name, parameter in known.items()}
        parameters, keys = dict[str, Any](), dict[str, Any]()
        for owner, residuals in kept:
            entry = checkpoint.entry_of(owner, residuals)
            if isinstance(owner, Key):
                keys[owner.name] = entry
            elif id(owner) in names:
                parameters[names[id(owner)]] = entry
            else:
                raise ValueError(
                    f"there are residuals of a parameter {self.names.name_of(owner)}, which the model does "
                    "not have: give the model whose gradients were averaged, and each model its own state"
                )
        return {
            "version": checkpoint.VERSION,
            **self.identity(),
            "steps": self.feedback.steps,
            "coordinates": self.coordinates,
            "parameters": parameters,
            "keys": keys,
        }

    def load_state_dict(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        """Load the residuals that another run, or this one, has saved. Call it on every rank.

        Training continues bitwise as in the run that was saved if the model's buckets are the same. A new
        ``DistributedDataParallel`` has its final buckets after one forward and backward pass, two with
        ``static_graph=True``: make these first, with any data, then load the model, the optimizer and the
        residuals. In other buckets the residuals of a rank's own gradients follow the parameters, and those
        of means where this rank computes the same ones; the rest is dropped with a line in the log.

        Ends the private group, as :meth:`close` does.

        Args:
            state: What :meth:`state_dict` returned on this rank.
            model: As for :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: They are of another rank, number of ranks or option, of a parameter that ``model``
                does not have, or of another length or memory format than here; nothing is changed.
            RuntimeError: Inside ``backward()`` or :meth:`step`.
        """
        self._take_over(self._read(state, model))

    def gather_state_dict(
        self, model: torch.nn.Module | None = None, *, dst: int = 0
    ) -> dict[str, Any] | None:
        """Return the residuals of all ranks on one of them, for a checkpoint that one rank writes.

        Args:
            model: As for :meth:`state_dict`.
            dst: The rank that gets them, in WORLD.

        Returns:
            On ``dst`` what :meth:`scatter_state_dict` takes; ``None`` elsewhere.

        Raises:
            ValueError: As :meth:`state_dict`, or ``dst`` is not in the group. Where another rank cannot go
                on, :class:`dist_utils.TensorMismatchError` says why.

        Cost:
            Collective: every rank of the group must call it. Sends all residuals to ``dst``, one rank after
            another.
        """
        group, call = self.process_group, f"gather_state_dict(dst={dst})"
        with on_every_rank(group, call):
            me, target = group.rank(), group_rank(group, dst)
            own = self.state_dict(model)
            files = {} if me == target else {target: checkpoint.file_bytes(own)}
        arrived = checkpoint.exchange(group, files, call)
        if me != target:
            return None
        everyone = [own if rank == me else arrived[rank] for rank in range(group.size())]
        return {"version": checkpoint.VERSION, "world_size": group.size(), "ranks": everyone}

    def scatter_state_dict(
        self, gathered: dict[str, Any] | None, model: torch.nn.Module | None = None, *, src: int = 0
    ) -> None:
        """Load on every rank its part of what :meth:`gather_state_dict` returned.

        See :meth:`load_state_dict`.

        Args:
            gathered: What was gathered, on ``src``. Ignored on other ranks.
            model: As for :meth:`state_dict`.
            src: The rank that has it, in WORLD.

        Raises:
            TypeError, ValueError, RuntimeError: As :meth:`load_state_dict`, or ``gathered`` is of another
                world size; on the rank that sees it. The others raise
                :class:`dist_utils.TensorMismatchError`, and no rank changes anything.

        Cost:
            Collective: every rank of the group must call it. ``src`` sends all residuals, to one rank after
            another.
        """
        group, call = self.process_group, f"scatter_state_dict(src={src})"
        with on_every_rank(group, call):
            me, source = group.rank(), group_rank(group, src)
            parts = self._parts(gathered) if me == source else []
            files = {rank: checkpoint.file_bytes(part) for rank, part in enumerate(parts) if rank != me}
        arrived = checkpoint.exchange(group, files, call)
        with on_every_rank(group, call):
            saved = self._read(parts[me] if me == source else arrived[source], model)
        self._take_over(saved)

    def _parts(self, gathered: object) -> list[Any]:
        """Return the part of each rank of what was gathered, for :meth:`scatter_state_dict`.

        Raises:
            TypeError: It is something else.
            ValueError: It is of another number of ranks.
        """
        saved, ranks = checkpoint.ranks_of(gathered), self.process_group.size()
        if len(saved) != ranks:
            raise ValueError(f"these are the residuals of {len(saved)} ranks, but the group has {ranks}")
        return saved

    def rescale(self, factor: float) -> None:
        """Multiply all residuals by a factor: those of losses that are scaled, when the scale changes.

        Residuals are in the unit of the gradients that left them. Call this on every rank where
        ``GradScaler.update()`` has changed the scale, with the new scale divided by the old one; without it,
        what one step has left out counts as much too little, or too much, once. A power of two, as scales
        are, loses nothing.

        Args:
            factor: A positive number.

        Raises:
            TypeError: ``factor`` is not a number.
            ValueError: It is not positive, or not finite.
            RuntimeError: Inside ``backward()``.

        Example:
            >>> before = scaler.get_scale()  # doctest: +SKIP
            >>> scaler.update()  # doctest: +SKIP
            >>> state.rescale(scaler.get_scale() / before)  # doctest: +SKIP
        """
        _refuse_inside_backward("rescale()")
        if not isinstance(factor, (int, float)):
            raise TypeError(f"factor must be a number, got {type(factor).__name__}")
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be positive and finite, got {factor!r}")
        if factor != 1:
            self.wait()
            self.feedback.multiply(factor)

    def _read(self, state: dict[str, Any], model: torch.nn.Module | None) -> Saved:
        """Return what :meth:`load_state_dict` would take over. Raises what that raises; changes nothing."""
        _refuse_inside_backward("load_state_dict()")
        if self.feedback.step_is_open:
            raise RuntimeError("load_state_dict() inside step(): call it between two steps")
        if not isinstance(state, dict):
            raise TypeError(
                f"residuals are loaded from what state_dict() returned, got a {type(state).__name__}"
            )
        known = self.names.parameters(model, "load_state_dict") if state.get("parameters") else {}
        return checkpoint.read(state, known, self.identity(), self.coordinates, self.process_group.rank())

    def _take_over(self, saved: Saved) -> None:
        """Continue from what :meth:`_read` returned."""
        self.wait()
        self.feedback.load(saved.residuals, saved.steps)
        self.coordinates = saved.coordinates or self.coordinates
        self.close()  # the ranks compare what they have loaded when they make the next private group


def _refuse_inside_backward(call: str) -> None:
    if inside_backward():
        raise RuntimeError(f"{call} inside backward(): call it between two steps")
