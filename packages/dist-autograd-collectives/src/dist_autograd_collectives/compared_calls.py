"""Compare the ranks' calls before a collective, if the caller asks for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import torch

from dist_autograd_collectives.calls import Members
from dist_autograd_collectives.transforms import outside_function_transforms
from dist_utils import GroupLike, TensorMismatchError, resolve_group
from dist_utils.process_groups import TensorClaim, collective_device, require_same_tensors
from dist_utils.torch_compat import all_gather_single, transformed_as

__all__ = ["agree", "agree_on_splits", "is_wanted", "report_problems"]

_VARIABLE = "DIST_AUTOGRAD_CHECK"


class _Progress(threading.local):
    """Whether this thread's call has reached the comparison."""

    compared = True


_progress = _Progress()


def agree(
    check: bool | None,
    who: Members,
    arguments: str,
    tensors: Sequence[torch.Tensor],
    *,
    uneven_dim: int | None = None,
    shapes: bool = True,
) -> None:
    """Raise on every rank if the ranks' calls or their tensors differ in more than values.

    Args:
        check: Whether to compare; ``None`` for what the environment variable says.
        who: The ranks.
        arguments: The function, and every argument besides tensors that must be equal.
        tensors: This rank's tensors.
        uneven_dim: A dimension whose length may differ.
        shapes: Whether shapes must be equal.
    """
    if not is_wanted(check):
        return
    _progress.compared = True
    described = [
        ("", _description(tensor if shapes else tensor.flatten()[:0], uneven_dim)) for tensor in tensors
    ]
    claim = TensorClaim(described, arguments)
    with outside_function_transforms():
        require_same_tensors(resolve_group(who.group), claim)


@contextlib.contextmanager
def report_problems(group: GroupLike) -> Iterator[None]:
    """If the body raises before :func:`agree`, tell the ranks that would wait for this one there."""
    _progress.compared = False
    try:
        yield
    except Exception as problem:
        if not _progress.compared:
            _report(problem, group)
        raise


def _report(problem: Exception, group: GroupLike) -> None:
    try:
        resolved = resolve_group(group)
    except (RuntimeError, TypeError, ValueError):  # nobody waits for a rank outside the group
        return
    # It raises the problem itself, as the caller does.
    with contextlib.suppress(TensorMismatchError, type(problem)), outside_function_transforms():
        require_same_tensors(resolved, TensorClaim([]), problem)


def agree_on_splits(
    check: bool | None, who: Members, outgoing: Sequence[int], incoming: Sequence[int]
) -> None:
    """Raise on every rank unless each rank expects from every other as much as that one sends."""
    if not is_wanted(check) or who.size == 1:
        return
    group = resolve_group(who.group)
    with outside_function_transforms():
        own = torch.tensor([*outgoing, *incoming], dtype=torch.int64, device=collective_device(group))
        everyone = own.new_empty(who.size * own.numel())
        all_gather_single(everyone, own, group)
        matrices = everyone.view(who.size, 2, who.size)
        sent, expected = matrices[:, 0], matrices[:, 1].T
        for sender, receiver in (sent != expected).nonzero().tolist():
            raise TensorMismatchError(
                f"rank {sender} of the group sends {int(sent[sender, receiver])} to rank {receiver}, which "
                f"expects {int(expected[sender, receiver])}"
            )


def is_wanted(check: bool | None) -> bool:
    """Return whether ranks compare their calls: as the caller says, else the environment variable."""
    if check is False:
        return False
    if torch.compiler.is_compiling():
        return False
    return os.environ.get(_VARIABLE, "") not in ("", "0") if check is None else check


def _description(tensor: torch.Tensor, uneven_dim: int | None) -> str:
    shape = ["any" if dim == uneven_dim else str(length) for dim, length in enumerate(tensor.shape)]
    needs = "needs a gradient" if tensor.requires_grad and torch.is_grad_enabled() else "needs no gradient"
    what = f"shape ({', '.join(shape)}), {tensor.dtype} on {tensor.device.type}, which {needs}"
    transformed = transformed_as(tensor)
    return f"{what}, {transformed}" if transformed else what
