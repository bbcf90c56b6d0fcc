"""How ranks that would leave a collective out take part in it, and compare their calls before they do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from dist_autograd_collectives.arguments import check_tensor
from dist_autograd_collectives.backend import CollectiveError
from dist_autograd_collectives.linear import is_traced, outside_transforms
from dist_autograd_collectives.maps import Members, Splits, Tensors, members
from dist_utils import AgreementError, TensorMismatchError, resolve_group
from dist_utils.process_groups import TensorClaim, all_gather_plain, require_same_tensors
from dist_utils.torch_compat import transformed_as


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
    for output in outputs:
        for given in output if isinstance(output, (tuple, list)) else (output,):
            tensor = check_tensor("each output", given)
            # Empty, so that no infinity and no NaN in the output gets into the loss.
            nothing = tensor.flatten()[:0].sum()
            loss = loss + (nothing.real if tensor.is_complex() else nothing).to(loss.dtype)
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


compares: ContextVar[bool] = ContextVar(
    "compares", default=os.environ.get("DIST_AUTOGRAD_CHECK", "") not in ("", "0")
)
"""Whether calls of this thread are compared."""


@contextlib.contextmanager
def compare_calls(enabled: bool = True) -> Iterator[None]:
    """Return a context in which all ranks compare each call of a collective before it communicates.

    What differs between the ranks, or is wrong on one of them, is an error on every rank within seconds. To
    switch it on for a whole job, set the environment variable ``DIST_AUTOGRAD_CHECK=1``, which is read when
    the package is imported.

    Calls are compared: functions, operations, shapes, dtypes, devices, other arguments, and whether a tensor
    needs a gradient or has a tangent. Backward passes are not: if a rank leaves one out, its peers raise at
    the group's timeout and the rank itself never. Neither are a call's graphs: ranks of which only some take
    derivatives of derivatives. Nothing is compared under ``torch.compile`` and ``make_fx``.

    Args:
        enabled: Whether calls of this thread are compared, on all ranks of their groups.

    Raises:
        TensorMismatchError: From the call: what differs, on every rank.
        CollectiveError: From the call: a rank did not come to it before the group's timeout.

    Cost:
        One all-gather of 40 bytes for each call.

    Example:
        >>> with compare_calls():  # doctest: +SKIP
        ...     total = all_reduce(tensor)
    """
    token = compares.set(enabled)
    try:
        yield
    finally:
        compares.reset(token)


def compare(
    who: Members, called: str, tensors: Tensors, shapes: Sequence[Sequence[int]], splits: Splits | None
) -> None:
    """Raise on every rank unless all ranks make the same call with such tensors.

    With ``splits``, what this rank sends to each rank and expects from it, also unless each rank expects from
    every other as much as that one sends.
    """
    # If one of them needs a gradient, backward runs, for all of them.
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    described = [_description(tensor, shape, needs) for tensor, shape in zip(tensors, shapes, strict=False)]
    claim = TensorClaim([("", one) for one in described], called)
    with outside_transforms():
        try:
            require_same_tensors(resolve_group(who.group), claim)
            everyone = all_gather_plain(who.group, [list(one.lengths) for one in splits]) if splits else []
        except AgreementError:
            raise
        except RuntimeError as error:
            raise CollectiveError(
                f"the comparison of calls failed on rank {who.rank} of {who.size} in the group of {called}: "
                f"{error} - Do all ranks come to it?"
            ) from error
    for sender, (sent, _) in enumerate(everyone):
        for receiver, (_, expected) in enumerate(everyone):
            if sent[receiver] != expected[sender]:
                raise TensorMismatchError(
                    f"rank {sender} of the group sends {sent[receiver]} to rank {receiver}, which expects "
                    f"{expected[sender]}"
                )


def tell(problem: Exception, group: Any) -> None:
    """Tell the other ranks, which compare their calls now, what is wrong on this one.

    Args:
        problem: What is wrong, unless all ranks know it from a comparison.
        group: What the caller gave as the group; WORLD was meant if it is none.
    """
    if isinstance(problem, (TensorMismatchError, CollectiveError, AgreementError)):
        return
    # The comparison raises the problem, as the caller does; nobody waits for a rank outside the group.
    with contextlib.suppress(RuntimeError, ValueError, TensorMismatchError, type(problem)):
        try:
            who = members(group)
        except TypeError:
            who = members(None)
        with outside_transforms():
            require_same_tensors(resolve_group(who.group), TensorClaim([]), problem)


def _description(tensor: torch.Tensor, shape: Sequence[int], needs_gradient: bool) -> str:
    lengths = ", ".join("any" if length < 0 else str(length) for length in shape)
    needs = "a gradient" if needs_gradient else "no gradient"
    what = f"shape ({lengths}), {tensor.dtype} on {tensor.device.type}, which needs {needs}"
    return ", ".join(filter(None, [what, transformed_as(tensor)]))
