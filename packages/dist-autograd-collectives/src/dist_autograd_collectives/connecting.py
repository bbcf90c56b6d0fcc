"""Tie unused outputs of collectives to the loss, so that no rank waits for another in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dist_autograd_collectives.storage_dtypes import wide_dtype
from dist_autograd_collectives.tensor_arguments import check_tensor

__all__ = ["connect", "zeros_after"]


def connect(loss: torch.Tensor, *outputs: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss, made to depend on outputs of collectives that it may not use.

    The backward of a collective is a collective: a rank that does not use an output never takes part, and
    the others wait for it until their timeout. A connected output gets a cotangent of zeros.

    Args:
        loss: Any tensor; its value does not change.
        outputs: Outputs of collectives, floating-point or complex: tensors, or tuples or lists of them.

    Raises:
        TypeError: Something is not a tensor.

    Source:
        ``JoinDummies`` of mpi4torch.

    Example:
        >>> loss = connect(loss_of(mine), theirs)  # doctest: +SKIP
    """
    check_tensor("loss", loss)
    tensors: list[torch.Tensor] = []
    for output in outputs:
        tensors.extend(output if isinstance(output, (tuple, list)) else [cast("torch.Tensor", output)])
    for output in tensors:
        check_tensor("each output", output)
        # Empty, so that no infinity and no NaN in the output gets into the loss.
        nothing = output.flatten()[:0].sum()
        loss = loss + (nothing.real if output.is_complex() else nothing).to(loss.dtype)
    return loss


def zeros_after(received: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return zeros that depend on what a collective gave this rank, though no element of it is used.

    So its backward, which the other ranks wait for, runs on this rank, and no compiler optimizes it away.
    """
    wide = wide_dtype(like.dtype)
    zeros = torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format, requires_grad=False)
    return (zeros + received.flatten()[:0].to(wide).sum(dtype=wide)).to(like.dtype)
