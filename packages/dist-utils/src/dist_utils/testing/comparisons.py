"""Bitwise comparisons: of two values on one rank, and of one value on all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dist_utils import AgreementError, GroupLike, require_same_on_all_ranks
from dist_utils.module_state.fingerprint import octets
from dist_utils.module_state.replicas import Entry, entries


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are bitwise equal: tensors, or containers of them.

    Tensors must have one dtype, shape and layout, and the same bits, those of NaN and of negative zero
    included; their strides and devices may differ. Containers must have the same contents under the same
    names or keys, in one order; their classes may differ.

    Args:
        left: What :func:`dist_utils.require_same_on_all_ranks` takes.
        right: Likewise.

    Raises:
        TypeError: A part cannot be compared: an iterator, or a tensor of a class that handles its memory
            itself, such as a ``DTensor``.

    Example:
        >>> same_bits({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])})
        True
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    nothing = Entry("", "")
    pairs = itertools.zip_longest(entries(left), entries(right), fillvalue=nothing)
    return all(one[:2] == other[:2] and _have_same_bits(one, other) for one, other in pairs)


def _have_same_bits(one: Entry, other: Entry) -> bool:
    if one.values is None or other.values is None:
        return one.values is other.values
    return torch.equal(octets(one.values.cpu()), octets(other.values.cpu()))


def same_on_all_ranks(values: Any, group: GroupLike = None) -> bool:
    """Return whether all ranks hold bitwise identical values; all ranks get the same answer.

    Args:
        values: As for :func:`dist_utils.require_same_on_all_ranks`, which says what differs.
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.

    Raises:
        TypeError: As :func:`same_bits`, on a rank that has such a part; the others get ``False``.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        As :func:`dist_utils.require_same_on_all_ranks`.

    Example:
        >>> assert same_on_all_ranks(model.state_dict())  # doctest: +SKIP
    """
    try:
        require_same_on_all_ranks(values, group)
    except AgreementError:
        return False
    return True
