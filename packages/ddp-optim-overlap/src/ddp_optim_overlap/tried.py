"""Cached results of a trial, for as long as they hold."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ddp_optim_overlap.fitness import require_step_per_parameter
from ddp_optim_overlap.option_kinds import kind_of
from ddp_optim_overlap.part_checks import PartChecks
from ddp_optim_overlap.partial_steps import is_torchs_own

__all__ = ["Tried"]


class Tried:
    """An optimizer that steps per parameter, as far as a trial can tell; the rest is looked for in its steps.

    Attributes:
        parallel: The names of its options that have one value for each parameter.
        checks: For the steps of its parts.

    Args:
        optimizer: Is tried.
        sparse: Those of its parameters that have sparse gradients.

    Raises:
        UnsupportedOptimizerError: It does not step per parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._sparse = sparse
        self._kind = kind_of(optimizer)
        found = require_step_per_parameter(optimizer, sparse)
        self.parallel = found.parallel
        self.checks = PartChecks(optimizer, found.written)

    def renew(self) -> None:
        """Try again if groups were added since, or options are turned on or off.

        Raises:
            UnsupportedOptimizerError: As it is now, it does not step per parameter.
        """
        if is_torchs_own(self._optimizer):  # whose options all keep to their parameter
            return
        kind = kind_of(self._optimizer)
        if kind != self._kind:
            found = require_step_per_parameter(self._optimizer, self._sparse)
            self.parallel, self.checks.written, self._kind = found.parallel, found.written, kind
