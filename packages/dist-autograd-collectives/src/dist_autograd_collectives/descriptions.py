"""What the source of a scatter tells ranks that do not know what they will get."""

from __future__ import annotations

import torch

from dist_autograd_collectives.calls import Call, Members
from dist_autograd_collectives.failures import CollectiveError
from dist_autograd_collectives.started import Handle
from dist_autograd_collectives.steps import Step
from dist_utils import resolve_group
from dist_utils.process_groups import collective_device, device_types

__all__ = ["describe", "described"]

# In an order that all ranks agree on.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)

_HEADER = 32
"""Numbers of a description: dtype, device, how many dimensions, and up to 29 of them."""


def described(first: torch.Tensor | None, who: Members) -> list[int]:
    """Return the description of one of the tensors, or room for one; raises if it cannot be described."""
    types = device_types(resolve_group(who.group))
    header = [0] * _HEADER
    if first is not None:
        if first.ndim > _HEADER - 3:
            raise ValueError(f"tensors of {first.ndim} dimensions need like= on every rank")
        if first.device.type not in types:
            raise ValueError(f"tensors on {first.device} cannot be sent: the group's backends serve {types}")
        header[:3] = _DTYPES.index(first.dtype), types.index(first.device.type), first.ndim
        header[3 : 3 + first.ndim] = first.shape
    return header


def describe(header: list[int], who: Members, root: int) -> Handle[torch.Tensor]:
    """Start to send what each rank will get; the result is an empty stand-in for it.

    Args:
        header: Of the root, from :func:`described`.
        who: The ranks.
        root: The source's rank in the group.
    """
    group = resolve_group(who.group)
    types = device_types(group)

    def stand_in(described: torch.Tensor) -> torch.Tensor:
        # Up to torch 2.9 tolist() does not see through torch.func.grad.
        dtype, place, ndim, *shape = (int(number) for number in described)
        known = 0 <= dtype < len(_DTYPES) and 0 <= place < len(types) and 0 <= ndim <= len(shape)
        if not known or min(shape, default=0) < 0:
            raise CollectiveError(
                f"scatter: the source describes what it sends as {[dtype, place, ndim, *shape[:4]]} ..., "
                "which is no description: does it have the same version of this package?"
            )
        there = torch.device(types[place])
        if there.type != "cpu":
            there = torch.device(there.type, torch.get_device_module(there).current_device())
        return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=there)

    # To a device that every rank expects it on.
    row = torch.tensor(header, dtype=torch.int64, device=collective_device(group))
    call = Call("scatter", who, "scatter (description)", root, separate_input=True)
    return Handle(Step((row,) * who.size, call, stand_in))
