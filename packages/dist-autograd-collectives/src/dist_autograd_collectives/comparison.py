"""Ranks compare their calls before they communicate, if they were asked to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from dist_autograd_collectives.backend import CollectiveError
from dist_autograd_collectives.maps import Members, members
from dist_autograd_collectives.plans import Call
from dist_autograd_collectives.transforms import outside_transforms
from dist_utils import AgreementError, TensorMismatchError, resolve_group
from dist_utils.process_groups import TensorClaim, all_gather_plain, require_same_tensors
from dist_utils.torch_compat import transformed_as

_compares: ContextVar[bool] = ContextVar(
    "compares", default=os.environ.get("DIST_AUTOGRAD_CHECK", "") not in ("", "0")
)


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
        One all-gather of 33 bytes for each call.

    Example:
        >>> with compare_calls():  # doctest: +SKIP
        ...     total = all_reduce(tensor)
    """
    token = _compares.set(enabled)
    try:
        yield
    finally:
        _compares.reset(token)


def compares() -> bool:
    """Return whether calls of this thread are compared."""
    return not torch.compiler.is_compiling() and _compares.get()


def compare(call: Call[Any]) -> None:
    """Raise on every rank unless all ranks make the same call."""
    if call.is_recorded:
        return
    plan = call.plan
    # If one of them does, backward runs, for all of them.
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    described = [
        _description(tensor, shape, needs) for tensor, shape in zip(call.tensors, plan.shapes, strict=False)
    ]
    _require_same(plan.who, TensorClaim([("", one) for one in described], f"{plan.title}{plan.terms}"))
    if plan.splits is not None:
        _compare_splits(plan.who, *plan.splits)


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
        _require_same(who, TensorClaim([]), problem)


def _description(tensor: torch.Tensor, shape: tuple[int, ...], needs_gradient: bool) -> str:
    lengths = ", ".join("any" if length < 0 else str(length) for length in shape)
    needs = "a gradient" if needs_gradient else "no gradient"
    what = f"shape ({lengths}), {tensor.dtype} on {tensor.device.type}, which needs {needs}"
    transformed = transformed_as(tensor)
    return f"{what}, {transformed}" if transformed else what


def _require_same(who: Members, claim: TensorClaim, problem: Exception | None = None) -> None:
    """Raise on every rank if the ranks claim something else, or one of them has a problem."""
    with outside_transforms():
        try:
            require_same_tensors(resolve_group(who.group), claim, problem)
        except RuntimeError as error:
            if error is problem or isinstance(error, AgreementError):
                raise
            raise CollectiveError(
                f"the comparison of calls failed on rank {who.rank} of {who.size} in the group of "
                f"{claim.arguments or 'a call with wrong arguments'}: {error} - Do all ranks come to it?"
            ) from error


def _compare_splits(who: Members, outgoing: Any, incoming: Any) -> None:
    """Raise on every rank unless each rank expects from every other as much as that one sends."""
    with outside_transforms():
        everyone = all_gather_plain(who.group, [list(outgoing), list(incoming)])
    for sender, (sent, _) in enumerate(everyone):
        for receiver, (_, expected) in enumerate(everyone):
            if sent[receiver] != expected[sender]:
                raise TensorMismatchError(
                    f"rank {sender} of the group sends {sent[receiver]} to rank {receiver}, which expects "
                    f"{expected[sender]}"
                )
