"""Cached results of a trial, valid until the optimizer changes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ddp_optim_overlap.fitness import require_step_per_parameter
from ddp_optim_overlap.option_kinds import kind_of
from ddp_optim_overlap.part_checks import PartChecks
from ddp_optim_overlap.partial_steps import is_torchs_own

__all__ = ["Tried"]


class Tried:
    """An optimizer that steps per parameter, as far as a trial can tell; its real steps are checked, too.

    Attributes:
        parallel: The names of its options that have one value per parameter.
        checks: Checks for its partial steps.

    Args:
        optimizer: The optimizer to try.
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
        """Repeat the trial if groups were added or options turned on or off since.

        Raises:
            UnsupportedOptimizerError: It no longer steps per parameter.
        """
        if is_torchs_own(self._optimizer):  # its options never couple parameters
            return
        kind = kind_of(self._optimizer)
        if kind != self._kind:
            found = require_step_per_parameter(self._optimizer, self._sparse)
            self.parallel, self.checks.written, self._kind = found.parallel, found.written, kind
