"""Save and load the choice, with the residuals of the chosen candidates."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ddp_quant_hooks.auto_choice import Choice
from ddp_quant_hooks.auto_passes import AutoPasses, BucketLayout
from ddp_quant_hooks.bound_model import BoundModel
from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.passes import value_count
from ddp_quant_hooks.plain_checks import alike, dict_of, list_of, named_lengths, whole_number
from dist_utils.torch_compat import inside_backward

__all__ = ["AutoCheckpoints"]

_VERSION = 1


class AutoCheckpoints(BoundModel):
    """The part of a state that saves its choice and loads it."""

    @property
    @abstractmethod
    def candidates(self) -> Mapping[str, Candidate]:
        """The candidates, by name."""

    @property
    @abstractmethod
    def passes(self) -> AutoPasses:
        """The backward passes, each with its candidate."""

    @abstractmethod
    def close(self) -> None:
        """End threads and private groups."""

    @abstractmethod
    def _states_in_use(self) -> list[tuple[str, ResidualCheckpoints]]:
        """Return the chosen candidates' states that have residuals to save."""

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
            ValueError: No model is known, or it lacks a parameter.

        Cost:
            Waits for the buckets that are being averaged. A copy of the residuals.
        """
        known = self._parameters_of(model, "state_dict")
        saved: dict[str, Any] = {**self._identity(), "choice": None}
        choice = self.passes.choice
        if self.passes.trying or choice is None:
            return saved
        model = model if model is not None or self._model is None else self._model()
        return {
            **saved,
            "choice": {**asdict(choice), "by_size": dict(choice.by_size)},
            "passes": self.passes.since_choice,
            "buckets": _written(self.passes.layout, known),
            "states": {name: state.state_dict(model) for name, state in self._states_in_use()},
        }

    def load_state_dict(self, state: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        """Load the choice that another run, or this one, has saved. Call it on every rank.

        Training continues bitwise as in the saved run, if the chosen candidates belong to this project. For
        that, the first pass after loading (the first two if the second has the same buckets) is averaged in
        the buckets of the saved run: see :meth:`QuantizedAllreduceState.load_state_dict`. A run that was
        saved during a trial tries again from the beginning.

        Ends threads and private groups, as :meth:`close` does.

        Args:
            state: What :meth:`state_dict` returned on this rank.
            model: As for :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: It is of another rank, number of ranks or list of candidates, or does not fit the
                model; nothing is changed.
            RuntimeError: Inside ``backward()``.
        """
        if inside_backward():
            raise RuntimeError("load_state_dict() inside backward(): call it between two steps")
        if not isinstance(state, dict):
            raise TypeError(
                f"a choice is loaded from what state_dict() returned, got a {type(state).__name__}"
            )
        for name, value in self._identity().items():
            if not alike(state.get(name), value):
                raise ValueError(
                    f"the choice is of {name} {state.get(name)!r:.200}, but here it is {value!r}, on rank "
                    f"{self.process_group.rank()}"
                )
        known = self._parameters_of(model, "load_state_dict")
        if "choice" in state and state["choice"] is None:
            self.close()
            self.passes.try_again()
            return
        model = model if model is not None or self._model is None else self._model()
        try:
            choice, since = _choice(state["choice"]), whole_number(state["passes"], "passes")
            rows = [list_of(row, object, "buckets") for row in list_of(state["buckets"], object, "buckets")]
            layout = [(whole_number(size, "size"), named_lengths(names, "buckets")) for size, names in rows]
            residuals = dict_of(state["states"], dict, "states")
            chosen = choice.assignment.names
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not a choice that state_dict() returned: {error!r}") from error
        states = {name: self.candidates[name].state for name in chosen & self.candidates.keys()}
        own = {name for name, inner in states.items() if isinstance(inner, ResidualCheckpoints)}
        if chosen != states.keys() or own != residuals.keys():
            raise ValueError(
                f"the choice is of candidates {sorted(chosen)} with residuals of {sorted(residuals)}, but "
                f"here there are {list(self.candidates)}, of which {sorted(own)} have residuals"
            )
        buckets = _read(layout, known)
        checked = {name: states[name].checked(residuals[name], model) for name in sorted(own)}
        self.close()
        for name, saved in checked.items():
            states[name].take_over(saved, in_saved_buckets=False)
        self.passes.go_on_with(choice, since, buckets)

    def _identity(self) -> dict[str, Any]:
        group = self.process_group
        return {
            "version": _VERSION,
            "state": type(self).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "candidates": list(self.candidates),
        }


def _choice(saved: Any) -> Choice:
    """Return a saved choice. Raises ``KeyError`` or ``TypeError`` if ``saved`` is something else."""
    saved = dict_of(saved, object, "choice")
    if not isinstance(saved["candidate"], str) or not isinstance(saved["why"], str):
        raise TypeError(f"candidate and why must be strings, got {saved!r:.200}")
    return Choice(
        saved["candidate"],
        dict_of(saved["by_size"], str, "by_size", keys=int),
        dict_of(saved["seconds"], (float, int), "seconds"),
        dict_of(saved["errors"], (float, int), "errors"),
        saved["why"],
    )


def _written(layout: BucketLayout, known: Mapping[str, torch.Tensor]) -> list[Any]:
    names = {id(parameter): name for name, parameter in known.items()}
    written = []
    for size, parameters in layout:
        row = []
        for reference in parameters:
            parameter = reference()
            if parameter is None or id(parameter) not in names:
                raise ValueError(
                    "a parameter of the last pass is not in the model: give the model that trains"
                )
            row.append((names[id(parameter)], value_count(parameter)))
        written.append((size, row))
    return written


def _read(layout: list[tuple[int, list[tuple[str, int]]]], known: Mapping[str, torch.Tensor]) -> BucketLayout:
    read: BucketLayout = []
    for size, row in layout:
        parameters = []
        for name, length in row:
            if name not in known or value_count(known[name]) != length:
                here = "not there" if name not in known else f"{value_count(known[name])} long here"
                raise ValueError(f"the choice is of a parameter {name!r} of {length} values, {here}")
            parameters.append(weakref.ref(known[name]))
        read.append((size, parameters))
    return read
