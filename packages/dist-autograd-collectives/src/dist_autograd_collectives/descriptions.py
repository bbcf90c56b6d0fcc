"""How the source of a scatter describes its tensors to ranks that do not know their shape."""

from __future__ import annotations

import torch

from dist_autograd_collectives.backend import CollectiveError
from dist_autograd_collectives.calls import Members
from dist_autograd_collectives.transforms import outside_function_transforms
from dist_utils import resolve_group
from dist_utils.process_groups import collective_device, device_types

# In an order that all ranks agree on.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_PLACES = {dtype: place for place, dtype in enumerate(_DTYPES)}

_HEADER = 32
"""Length of a description: dtype, device, number of dimensions, and up to 29 dimensions."""


def described(first: torch.Tensor | None, who: Members) -> torch.Tensor:
    """Return a tensor's description, or zeros to receive one; raises if it cannot be described."""
    group = resolve_group(who.group)
    header: list[int] = []
    if first is not None:
        types = device_types(group)
        if first.ndim > _HEADER - 3:
            raise ValueError(f"tensors of {first.ndim} dimensions need like= on every rank")
        if first.device.type not in types:
            raise ValueError(f"tensors on {first.device} cannot be sent: the group's backends serve {types}")
        header = [_PLACES[first.dtype], types.index(first.device.type), first.ndim, *first.shape]
    header += [0] * (_HEADER - len(header))
    with outside_function_transforms():  # it describes tensors; there is nothing to differentiate
        # On the device where every rank expects it.
        return torch.tensor(header, dtype=torch.int64, device=collective_device(group))


def stand_in(description: torch.Tensor, who: Members) -> torch.Tensor:
    """Return an uninitialized tensor as the source described it.

    Raises:
        CollectiveError: It is no description, or not of a tensor that this rank can have.
    """
    with outside_function_transforms():
        types = device_types(resolve_group(who.group))
        dtype, place, ndim, *shape = description.tolist()
        known = 0 <= dtype < len(_DTYPES) and 0 <= place < len(types) and 0 <= ndim <= len(shape)
        if not known or min(shape, default=0) < 0:
            raise CollectiveError(
                f"scatter: the source describes what it sends as {[dtype, place, ndim, *shape[:4]]} ..., "
                "which is no description: does it have the same version of this package?"
            )
        there = torch.device(types[place])
        try:
            if there.type != "cpu":
                there = torch.device(there.type, torch.get_device_module(there).current_device())
            return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=there)
        except (RuntimeError, AssertionError, AttributeError) as error:  # torch's, also for a missing device
            what = f"{_DTYPES[dtype]} of shape {tuple(shape[:ndim])} on {there.type}"
            raise CollectiveError(
                f"scatter: the source sends {what}, which this rank cannot hold: {error}"
            ) from error
