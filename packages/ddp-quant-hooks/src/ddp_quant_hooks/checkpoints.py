"""Residuals in checkpoints: saved and loaded on every rank, or gathered on one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks import saved as saved_residuals
from ddp_quant_hooks import sent_residuals
from ddp_quant_hooks.bound_model import BoundModel
from ddp_quant_hooks.feedback import Feedback
from ddp_quant_hooks.plain_checks import alike
from ddp_quant_hooks.saved import SavedResiduals
from ddp_quant_hooks.tensor_buckets import StandIns
from dist_utils.process_groups import TensorClaim, collective_device, require_same_tensors
from dist_utils.torch_compat import inside_backward

__all__ = ["ResidualCheckpoints"]


class ResidualCheckpoints(BoundModel):
    """The part of a hook's state that saves residuals and loads them."""

    feedback: Feedback
    stand_ins: StandIns
    places: list[str] | None = None
    """The shards that the residuals belong to, if a model under ``fully_shard`` has used the state."""

    @abstractmethod
    def close(self) -> None:
        """End the thread and the private group."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""

    @abstractmethod
    def _lengths(self, count: int, device: torch.device) -> tuple[int, int, int]:
        """Return the lengths described at :data:`ddp_quant_hooks.saved.Lengths`."""

    @abstractmethod
    def wait_for_jobs(self) -> None:
        """Return when all jobs so far have run, with or without an error."""

    def discard_step(self) -> None:
        """Declare that no optimizer step will use the gradients of the last ``backward()``.

        The residuals become what they were before that pass. Call this, on every rank, where the loop skips
        ``optimizer.step()``, or where something raises between ``backward()`` and it. A step with a value
        that is not finite, which ``GradScaler`` skips, and a ``backward()`` that raises, need no call. Of
        several passes whose gradients were added up without ``no_sync()``, only the last is undone.

        Raises:
            RuntimeError: Inside ``backward()``.
        """
        self._refuse_inside_backward("discard_step()")
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
            ValueError: No model is known, or it lacks a parameter that has residuals.

        Cost:
            Waits for the buckets that are being averaged. A copy of the residuals.
        """
        of_tensors = self.feedback.of_tensors
        known = self.stand_ins.named if of_tensors else self._parameters_of(model, "state_dict")
        self.wait_for_jobs()
        names = {self.feedback.residuals.number(parameter): name for name, parameter in known.items()}
        written = saved_residuals.write(self.feedback, names, self._lengths, self._name_of)
        keys = {name: stand_in.numel() for name, stand_in in known.items()} if of_tensors else None
        return {**self._identity(), **written, "keys": keys, "places": self.places}

    def load_state_dict(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        """Load the residuals that another run, or this one, has saved. Call it on every rank.

        Training continues bitwise as in the run that was saved. For that, the first pass after loading (the
        first two if the second has the same buckets) is averaged in the buckets of the saved run, one after
        another when all gradients are there, because a new ``DistributedDataParallel`` begins with other
        buckets. A run can be saved once it has reached its final buckets, in its second step (in its third
        with a static graph). If the buckets also differ later, because of another ``bucket_cap_mb``, a rank's
        own residuals follow the parameters; those of shards are dropped with a line in the log. Residuals in
        fp32, which releases up to 0.6 have saved, are rounded to bf16.

        Ends the private group, as :meth:`close` does.

        Args:
            state: What :meth:`state_dict` returned on this rank.
            model: As for :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: They are of another rank, number of ranks or option, of a parameter that ``model``
                does not have, or of another length than here; nothing is changed.
            RuntimeError: Inside ``backward()`` or :meth:`step`.
        """
        self.take_over(self.checked(state, model))

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
            Collective: every rank of the group must call it. Sends all residuals to ``dst``.
        """
        own: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            self._require_member("dst", dst)
            own = self.state_dict(model)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        self._agree(f"gather_state_dict(dst={dst})", problem)
        group = self.process_group
        everyone = sent_residuals.gather(group, own, dst)
        if everyone is None:
            return None
        return {"version": saved_residuals.VERSION, "world_size": group.size(), "ranks": everyone}

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
            Collective: every rank of the group must call it. ``src`` sends all residuals.
        """
        group = self.process_group
        data: list[torch.Tensor] = []
        problem: Exception | None = None
        try:
            self._require_member("src", src)
            if dist.get_rank() == src:
                data = sent_residuals.written(_parts(gathered, group.size()), group)
        except (TypeError, ValueError) as error:
            problem = error
        self._agree(f"scatter_state_dict(src={src})", problem)
        mine: Any = None
        checked: SavedResiduals | None = None
        try:
            mine = sent_residuals.scatter(group, data, src)
        except ValueError as error:
            problem = error
        try:
            checked = None if problem is not None else self.checked(mine, model)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        self._agree("", problem)
        assert checked is not None
        self.take_over(checked)

    def checked(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> SavedResiduals:
        """Return what :meth:`load_state_dict` would take over. Raises what that raises; changes nothing."""
        self._refuse_inside_backward("load_state_dict()")
        if self.feedback.step_is_open:
            raise RuntimeError("load_state_dict() inside step(): call it between two steps")
        saved_residuals.require_equal(state, self._identity())
        places = saved_residuals.places_of(state)
        if None not in (self.places, places) and places != self.places:
            raise ValueError(
                f"the residuals are of shards {places!r:.200}, but this rank has {self.places!r}"
            )
        keys = saved_residuals.keys_of(state)
        if keys is None:
            known = self._parameters_of(model, "load_state_dict")
        else:
            known = self.stand_ins.load(keys, collective_device(self.process_group))
        own_in_buckets = self.feedback.residuals.own_in_buckets
        read = saved_residuals.read(state, known, self._lengths, own_in_buckets=own_in_buckets)
        return replace(read, keys=None if keys is None else known, places=places)

    def take_over(self, checked: SavedResiduals, *, in_saved_buckets: bool = True) -> None:
        """Continue from what :meth:`checked` returned.

        Args:
            checked: Residuals that this state has checked.
            in_saved_buckets: See :meth:`ddp_quant_hooks.feedback.Feedback.load`.
        """
        self.wait_for_jobs()
        self.feedback.load(checked, in_saved_buckets=in_saved_buckets)
        if checked.keys is not None:
            self.stand_ins.named = dict(checked.keys)
            self.places = checked.places or self.places
        self.close()  # the ranks compare what they have loaded when they make the next private group

    def _agreement_terms(self) -> dict[str, str]:
        """Return what must be identical on all ranks about residuals when a private group is made."""
        loaded = self.feedback.loaded
        if loaded is None:
            return {"loaded residuals": "none"}
        return {"loaded residuals": f"of step {loaded.steps}, in buckets {loaded.digest}"}

    def _require_member(self, name: str, rank: int) -> None:
        ranks = dist.get_process_group_ranks(self.process_group)
        if rank not in ranks:
            raise ValueError(f"{name} must be one of the group's ranks {ranks}, got {rank!r}")

    def _agree(self, call: str, problem: Exception | None) -> None:
        require_same_tensors(self.process_group, TensorClaim([], call), problem)

    def _refuse_inside_backward(self, call: str) -> None:
        if inside_backward():
            raise RuntimeError(f"{call} inside backward(): call it between two steps")


def _parts(gathered: object, world_size: int) -> list[Any]:
    if not isinstance(gathered, dict):
        raise TypeError(
            f"scatter_state_dict() takes what gather_state_dict() returned, got a {type(gathered).__name__}"
        )
    ranks = gathered.get("ranks")
    if not alike(gathered.get("version"), saved_residuals.VERSION) or not isinstance(ranks, list):
        raise ValueError(
            f"these are not gathered residuals of version {saved_residuals.VERSION} of the format, but of "
            f"{gathered.get('version')!r:.200}"
        )
    if len(ranks) != world_size or not alike(gathered.get("world_size"), world_size):
        raise ValueError(f"these are the residuals of {len(ranks)} ranks, but the group has {world_size}")
    return ranks
