"""A state with error feedback: bound to its model, saved and loaded, on every rank or through one of them."""

from __future__ import annotations

import io
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.feedback.names import ModelNames
from ddp_quant_hooks.feedback.store import (
    RESIDUAL_DTYPE,
    Feedback,
    Key,
    Owner,
    OwnerResiduals,
    Piece,
    owner_length,
)
from dist_utils import GroupLike, group_rank, start_messages
from dist_utils.comm_hooks import HookState
from dist_utils.process_groups import TensorClaim, all_gather_plain, collective_device, require_same_tensors
from dist_utils.torch_compat import inside_backward

if TYPE_CHECKING:
    from typing_extensions import Self


VERSION = 4
"""Version of the format: with one entry for each parameter or key. Earlier ones had several tables."""

_TAG = 1 << 20
"""The tag of messages with residuals. They are sent in the user's own group, where other messages are
unlikely to have it."""

_bound: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many states of each class have been bound to models of a group."""


@dataclass(frozen=True)
class Saved:
    """Residuals from a file that fit this state.

    Attributes:
        residuals: Of parameters, or of keys.
        steps: How many steps were made.
        places: The shards of FSDP that they belong to.
    """

    residuals: list[tuple[Owner, OwnerResiduals]]
    steps: int
    places: list[str] | None


class FeedbackState(HookState):
    """The part of a hook's state that keeps residuals, and saves and loads them.

    Args:
        process_group: As for :class:`dist_utils.comm_hooks.HookState`.
        own: As for :class:`Feedback`.
        shard: Likewise.
    """

    places: list[str] | None = None
    """The shards that the residuals belong to, if a model under ``fully_shard`` has used the state."""

    def __init__(self, process_group: GroupLike = None, *, own: bool, shard: bool) -> None:
        super().__init__(process_group)
        self.feedback = Feedback(own=own, shard=shard, wait=self.wait)
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

        If two backward passes of the model end and the state's hook has received no bucket, a warning says
        so: the hook is not registered with this module, perhaps because a framework ignored it.

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
            RuntimeError: Inside of another ``step()``.
            ValueError: This state averages the buckets of a model with error feedback; raised by the first
                call or ``backward()`` inside.

        Example:
            >>> with state.step():  # doctest: +SKIP
            ...     for name, change in changes.items():
            ...         all_reduce(change, dist.ReduceOp.AVG, state, key=name)
        """
        step = self.feedback.begin_step()
        try:
            with step.outcome.watch():
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
        the last successful ``backward()`` left.

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
        saved: dict[str, dict[str, Any]] = {"parameters": {}, "keys": {}}
        for owner, residuals in kept:
            entry: dict[str, Any] = {
                kind: [(*place, values.cpu().clone()) for *place, values in pieces]
                for kind, pieces in residuals._asdict().items()
            }
            entry["length"] = owner_length(owner)
            if isinstance(owner, Key):
                saved["keys"][owner.name] = entry
            elif id(owner) in names:
                saved["parameters"][names[id(owner)]] = {**entry, "strides": _strides(owner)}
            else:
                raise ValueError(
                    f"there are residuals of a parameter {self.names.name_of(owner)}, which the model does "
                    "not have: give the model whose gradients were averaged, and each model its own state"
                )
        return {
            "version": VERSION,
            **self.identity(),
            "steps": self.feedback.steps,
            "places": self.places,
            **saved,
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
        self.take_over(self.residuals_of(state, model))

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
        group = self.process_group
        with self._on_every_rank(f"gather_state_dict(dst={dst})"):
            me, at = group.rank(), group_rank(group, dst)
            own = self.state_dict(model)
            files = {} if me == at else {at: _file_bytes(own)}
        arrived = _exchange(group, files)
        if me != at:
            return None
        everyone = [own if rank == me else arrived[rank] for rank in range(group.size())]
        return {"version": VERSION, "world_size": group.size(), "ranks": everyone}

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
        group = self.process_group
        with self._on_every_rank(f"scatter_state_dict(src={src})"):
            me, source = group.rank(), group_rank(group, src)
            parts = _parts(gathered, group.size()) if me == source else []
            files = {rank: _file_bytes(part) for rank, part in enumerate(parts) if rank != me}
        with self._on_every_rank(""):
            arrived = _exchange(group, files)
            checked = self.residuals_of(parts[me] if me == source else arrived[source], model)
        self.take_over(checked)

    def residuals_of(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> Saved:
        """Return what :meth:`load_state_dict` would take over. Raises what that raises; changes nothing."""
        _refuse_inside_backward("load_state_dict()")
        if self.feedback.step_is_open:
            raise RuntimeError("load_state_dict() inside step(): call it between two steps")
        if not isinstance(state, dict):
            raise TypeError(
                f"residuals are loaded from what state_dict() returned, got a {type(state).__name__}"
            )
        known = self.names.parameters(model, "load_state_dict") if state.get("parameters") else {}
        try:
            return self._read(state, known)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"these are not residuals that state_dict() returned: {error!r:.200}") from error

    def _read(self, state: dict[str, Any], known: Mapping[str, torch.Tensor]) -> Saved:
        """Return what was saved, of parameters with known names or of keys, if it fits this state."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"the residuals are of version {state.get('version')!r:.200} of the format, and this release "
                f"reads version {VERSION} only: go on without them"
            )
        for name, value in self.identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the residuals are of {name} {state.get(name)!r:.200}, but here it is {value!r}, on "
                    f"rank {self.process_group.rank()}"
                )
        places = state["places"]
        if None not in (self.places, places) and places != self.places:
            raise ValueError(
                f"the residuals are of shards {places!r:.200}, but this rank has {self.places!r}"
            )
        residuals: list[tuple[Owner, OwnerResiduals]] = []
        for name, entry in state["parameters"].items():
            residuals.append((_parameter(name, entry, known), _residuals(name, entry)))
        for name, entry in state["keys"].items():
            residuals.append((Key(name, [_count(entry["length"])]), _residuals(name, entry)))
        return Saved(residuals, _count(state["steps"]), places)

    def take_over(self, checked: Saved) -> None:
        """Continue from what :meth:`residuals_of` returned."""
        self.wait()
        self.feedback.load(checked.residuals, checked.steps)
        self.places = checked.places or self.places
        self.close()  # the ranks compare what they have loaded when they make the next private group

    @contextmanager
    def _on_every_rank(self, call: str) -> Iterator[None]:
        """Go on after the block only if no rank has raised an error in it; else raise on every rank."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            problem = error
        require_same_tensors(self.process_group, TensorClaim([], call), problem)


def _refuse_inside_backward(call: str) -> None:
    if inside_backward():
        raise RuntimeError(f"{call} inside backward(): call it between two steps")


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the order of a parameter's values in a bucket: the strides of its gradient."""
    return torch.empty_like(parameter, device="meta").stride()


def _count(number: object) -> int:
    """Return a count from a file; raises ``TypeError`` if it is none."""
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} is not a count")
    return number


def _parameter(name: str, entry: Any, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameter of this name, if it has as many values in the same order."""
    if name not in known or owner_length(known[name]) != entry["length"]:
        here = "not there" if name not in known else f"{owner_length(known[name])} long here"
        raise ValueError(
            f"the residuals are of a parameter {name!r:.200} of {entry['length']!r:.200} values, {here}"
        )
    if entry["strides"] != _strides(known[name]):
        raise ValueError(
            f"the residuals of {name!r:.200} were saved in another memory format: with strides "
            f"{entry['strides']!r:.200}, here {_strides(known[name])}. Give the parameter that format before "
            "DistributedDataParallel"
        )
    return known[name]


def _residuals(name: str, entry: Any) -> OwnerResiduals:
    """Return the residuals of one owner from a file, if they are numbers to add to its values."""
    kinds = (entry[kind] for kind in OwnerResiduals._fields)
    return OwnerResiduals(*([_piece(name, entry["length"], *piece) for piece in pieces] for pieces in kinds))


def _piece(name: str, count: int, start: int, weight: float, values: torch.Tensor) -> Piece:
    """Return a piece from a file, in the dtype of residuals."""
    if values.dim() != 1 or _count(start) + values.numel() > count:
        raise ValueError(
            f"the residual {name!r:.200} has a piece of shape {tuple(values.shape)} at {start}, but only "
            f"{count} values"
        )
    kept = values.detach().to("cpu", RESIDUAL_DTYPE)
    # A value that is not finite would make every later gradient NaN.
    if not kept.isfinite().all():
        raise ValueError(f"the residual {name!r:.200} has values that are not finite in {RESIDUAL_DTYPE}")
    return Piece(start, weight, kept)


def _parts(gathered: object, world_size: int) -> list[Any]:
    """Return the residuals of each rank."""
    ranks = gathered.get("ranks") if isinstance(gathered, dict) else None
    if not isinstance(ranks, list):
        raise TypeError(
            f"scatter_state_dict() takes what gather_state_dict() returned, got a {type(gathered).__name__}"
        )
    if len(ranks) != world_size:
        raise ValueError(f"these are the residuals of {len(ranks)} ranks, but the group has {world_size}")
    return ranks


def _file_bytes(part: Any) -> torch.Tensor:
    """Return a rank's residuals as ``torch.save`` writes them, as bytes on the CPU.

    ``torch.distributed``'s collectives of objects unpickle what a peer has sent, which may run any code.
    """
    file = io.BytesIO()
    torch.save(part, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _exchange(group: dist.ProcessGroup, files: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    """Send files to other ranks, one after another; return what they have sent this one, by rank."""
    device, me = collective_device(group), str(group.rank())
    announced = all_gather_plain(group, {str(rank): file.numel() for rank, file in files.items()})
    for rank, file in files.items():
        for sent in start_messages(group, receives=[], sends=[(rank, file.to(device))], tag=_TAG):
            sent.wait()
    return {rank: _receive(group, to[me], rank) for rank, to in enumerate(announced) if me in to}


def _receive(group: dist.ProcessGroup, length: Any, rank: int) -> Any:
    """Return what a rank has sent, read like a file of unknown origin, on the CPU."""
    if type(length) is not int or length <= 0:
        raise ValueError(f"rank {rank} announced residuals of {length!r:.200} bytes")
    data = bytearray(length)
    on_host = torch.frombuffer(data, dtype=torch.uint8)
    room = on_host.to(collective_device(group))
    for arrival in start_messages(group, receives=[(rank, room)], sends=[], tag=_TAG):
        arrival.wait()
    on_host.copy_(room)
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # forged bytes may raise nearly anything, even struct.error
        raise ValueError(f"rank {rank} sent data that are not saved residuals: {error!r:.200}") from error
