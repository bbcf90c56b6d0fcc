"""How a rank takes part in the backward pass of a collective that would otherwise leave it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dist_autograd_collectives.arguments import check_tensor
from dist_autograd_collectives.transforms import is_traced


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
    loss = check_tensor("loss", loss)
    tensors: list[torch.Tensor] = []
    for output in outputs:
        tensors.extend(output if isinstance(output, (tuple, list)) else [cast("torch.Tensor", output)])
    for given in tensors:
        output = check_tensor("each output", given)
        # Empty, so that no infinity and no NaN in the output gets into the loss.
        nothing = output.flatten()[:0].sum()
        loss = loss + (nothing.real if output.is_complex() else nothing).to(loss.dtype)
    return loss


def anchored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for a collective in whose backward pass this rank is to take part in any case.

    If only some ranks' tensors need a gradient (that of the source of a broadcast, say), the others would
    never come to the backward of the collective, and those ranks would wait for them until their timeout.
    Call it on all ranks. ``torch.autograd.grad`` and ``backward(inputs=...)`` follow only what leads to their
    inputs: there use ``connect(tensor, input)`` instead.

    Args:
        tensor: What this rank is about to pass to a collective.

    Returns:
        The tensor itself if it needs a gradient, or can have none because of its dtype; else a tensor that
            needs one, with the same memory.

    Raises:
        TypeError: ``tensor`` is not a dense tensor.
        ValueError: ``torch.compile`` or ``torch.func`` traces the call.

    Example:
        >>> copied = broadcast(anchored(tensor), 0)  # doctest: +SKIP
    """
    tensor = check_tensor("tensor", tensor)
    if is_traced():  # refused on all ranks
        raise ValueError("anchored works neither under torch.compile nor under torch.func")
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_()
