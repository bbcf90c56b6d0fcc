"""What keeps backward from waiting for a rank that never comes."""

from __future__ import annotations

import torch

__all__ = ["connect"]


def connect(loss: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """Return the loss, with outputs of collectives tied to it that it may not depend on.

    The backward of a collective is a collective: a rank that does not use an output never takes part, and
    the others wait for it until their timeout. A connected output gets a cotangent of zeros.

    Args:
        loss: Any tensor; its value does not change.
        outputs: Of collectives, floating-point or complex.

    Source:
        ``JoinDummies`` of mpi4torch.

    Example:
        >>> loss = connect(loss_of(mine), theirs)  # doctest: +SKIP
    """
    for output in outputs:
        # Empty, so that no infinity and no NaN in the output gets into the loss.
        nothing = output.flatten()[:0].sum()
        loss = loss + (nothing.real if output.is_complex() else nothing).to(loss.dtype)
    return loss
