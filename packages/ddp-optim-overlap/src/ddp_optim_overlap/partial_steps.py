"""Step a part of an optimizer's parameters, with everything else of the optimizer as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dist_utils.torch_compat import without_step_hooks

__all__ = ["PartialSteps", "parameters_of", "stand_in"]


class PartialSteps:
    """Call the ``step`` of optimizers on some of their parameters.

    A step runs on a stand-in: an object of the optimizer's class that shares its state and its options,
    and whose groups have only those parameters. The optimizer itself is never changed, so schedulers,
    ``state_dict`` and ``load_state_dict`` work as always. Options are read at every step. What was
    registered with ``register_step_post_hook`` does not run: the step is not over.

    Args:
        optimizers: Which step, in this order.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._members: list[list[list[int]]] = []
        self._owners: dict[torch.Tensor, list[tuple[int, int]]] = {}
        self._states_in_order = [0] * len(optimizers)
        self.refresh()

    def refresh(self) -> None:
        """Take notice of parameters that were added, or moved to other groups, since."""
        members = [
            [list(map(id, group["params"])) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        if members == self._members:
            return
        self._members = members
        self._owners = {}
        for place, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._owners.setdefault(parameter, []).append((place, number))

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the optimizers."""
        return list(self._owners)

    def begin(self) -> None:
        """A step begins: its parts may make new states, in the order of the parts."""
        self.refresh()
        self._states_in_order = [len(optimizer.state) for optimizer in self._optimizers]

    def finish(self) -> None:
        """Put new states into the order in which one step makes them, which ``state_dict`` shows."""
        for optimizer, known in zip(self._optimizers, self._states_in_order, strict=True):
            state = optimizer.state
            new = list(state)[known:]
            if new:
                place = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
                for parameter in sorted(new, key=lambda key: place.get(key, len(place))):
                    state[parameter] = state.pop(parameter)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that an optimizer has, with their ``.grad``."""
        parts: dict[int, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
        for parameter in parameters:
            for place, number in self._owners.get(parameter, ()):
                parts[place][number].append(parameter)
        for place in sorted(parts):
            optimizer = self._optimizers[place]
            groups = [
                {**optimizer.param_groups[number], "params": part}
                for number, part in sorted(parts[place].items())
            ]
            stand_in(optimizer, groups).step()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an object of the optimizer's class with its attributes, other groups and no step hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__ = without_step_hooks(optimizer.__dict__)
    # A scheduler replaces ``step`` on the instance by a function that steps that instance.
    other.__dict__.pop("step", None)
    other.param_groups = groups
    return other
