"""Plain data between ranks, as JSON: what arrives is read as text, and nothing of it is executed.

``torch.distributed``'s collectives of objects unpickle what a peer has sent, which may run any code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group
from dist_utils.process_groups.terms import AgreementError
from dist_utils.torch_compat import all_gather_single

__all__ = ["all_gather_plain"]

_MOST_BYTES = 1 << 30
"""The most bytes of one rank's text. A length beyond it, or below zero, is invalid."""


def all_gather_plain(process_group: GroupLike, value: Any) -> list[Any]:
    """Return every rank's ``value``, in rank order.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        value: ``None``, booleans, numbers, strings, and lists, tuples and dicts (with string keys) of these.
            Tuples arrive as lists.

    Returns:
        The values; this rank's own is returned as the others receive it. The caller must check that they are
        of the expected kinds: a peer may send anything.

    Raises:
        TypeError, ValueError: ``value`` cannot be written as JSON; on this rank, before any communication.
        AgreementError: What a rank sent is not JSON; on every rank, which all get the same bytes.
        RuntimeError: A peer is gone; and as :func:`dist_utils.resolve_group`.

    Cost:
        Two all-gathers: of 8 bytes a rank, then of the length of the longest text.

    Example:
        >>> all_gather_plain(None, {"rank": dist.get_rank()})  # doctest: +SKIP
        [{'rank': 0}, {'rank': 1}]
    """
    group = resolve_group(process_group)
    text = json.dumps(value).encode()
    if group.size() == 1:
        return [json.loads(text)]
    device = collective_device(group)
    lengths = _gathered(group, torch.tensor([len(text)], device=device)).flatten().tolist()
    ranks = dist.get_process_group_ranks(group)
    for rank, length in zip(ranks, lengths, strict=True):
        if not 0 < length <= _MOST_BYTES:
            raise AgreementError(f"rank {rank} announced {length} bytes of data, an invalid length")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")  # not the default device
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = _gathered(group, padded.to(device)).cpu()
    return [
        _read(rank, bytes(row[:length].tolist()))
        for rank, row, length in zip(ranks, rows, lengths, strict=True)
    ]


def _gathered(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    everyone = own.new_empty(group.size() * own.numel())
    all_gather_single(everyone, own, group)
    return everyone.view(group.size(), -1)


def _read(rank: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise AgreementError(f"rank {rank} sent data that is not JSON: {error}") from error
