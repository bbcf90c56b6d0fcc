"""Which gradients a step has used up, and whether anybody has touched them since."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ddp_optim_overlap.errors import DoubleBackwardError
from dist_utils.torch_compat import tensor_version

__all__ = ["SteppedGradients"]


class SteppedGradients:
    """Remember gradients as they were when the backward pass that stepped with them had ended.

    No copies and no references are kept, so that setting them to ``None`` frees them: only where each one
    lies in memory, and its version, which every write in place raises.
    """

    def __init__(self) -> None:
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}

    def remember(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these as used up."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._seen[parameter] = _mark(parameter.grad)

    def forget(self) -> None:
        """Take none as used up."""
        self._seen.clear()

    def require_new(self, parameter: torch.Tensor) -> None:
        """Raise if a gradient that is about to be added to was used up; to be called before it is.

        Raises:
            DoubleBackwardError: It was, and is unchanged since.
        """
        mark = self._seen.pop(parameter, None)
        if mark is not None and parameter.grad is not None and _mark(parameter.grad) == mark:
            raise DoubleBackwardError(
                "backward() adds to gradients that a step has already used: call zero_grad() after each "
                "step, and accumulate with no_sync() or pause()"
            )

    def changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tell whether somebody has written into one of these since, other than by taking it away."""
        return any(
            parameter.grad is not None
            and parameter in self._seen
            and _mark(parameter.grad) != self._seen[parameter]
            for parameter in parameters
        )


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return tensor_version(gradient), 0 if gradient.is_sparse else gradient.data_ptr()
