"""What keeps backward from waiting for a rank that never comes."""

from __future__ import annotations

import torch

__all__ = ["connect", "zeros_after"]


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


def zeros_after(received: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return zeros that are made from what a collective gave this rank, though no element of it is used.

    So its backward, which the other ranks wait for, runs on this rank, and no compiler leaves it out.
    """
    zeros = torch.zeros_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    return zeros + received.flatten()[:0].sum().to(like.dtype)
