"""Send residuals between ranks in the format of ``torch.save``; they are read like a file of unknown origin.

``torch.distributed``'s collectives of objects unpickle what a peer has sent, which may run any code.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups import all_gather_plain, collective_device, group_rank, start_messages

__all__ = ["gather", "scatter", "written"]

_TAG = 1 << 20
"""The tag of all messages here. They are sent in the user's own group, where other messages are unlikely to
have it."""

_MOST_BYTES = 1 << 40
"""The most bytes of one rank's residuals. A length beyond it, or below one, is invalid."""


def gather(group: dist.ProcessGroup, own: dict[str, Any], dst: int) -> list[Any] | None:
    """Return what every rank of a group has saved on ``dst``, a rank in WORLD; elsewhere ``None``.

    Raises:
        ValueError: A rank has sent data that are not saved residuals (raised on ``dst``) or of a wrong length
            (on all).
    """
    me, at = group.rank(), group_rank(group, dst)
    others = [rank for rank in range(group.size()) if rank != me]
    data = _written(own, group)
    lengths = _lengths(all_gather_plain(group, data.numel()), group)
    if me != at:
        _exchange(group, sends=[(at, data)])
        return None
    rooms = {rank: torch.empty(lengths[rank], dtype=torch.uint8, device=data.device) for rank in others}
    _exchange(group, receives=rooms.items())
    ranks = dist.get_process_group_ranks(group)
    return [own if rank == me else _read(rooms[rank], ranks[rank]) for rank in range(group.size())]


def written(parts: Sequence[Any], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return what :func:`scatter` sends.

    Raises:
        ValueError: A part cannot be saved.
    """
    try:
        return [_written(part, group) for part in parts]
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"these are not residuals that state_dict() returned: {error!r:.200}") from error


def scatter(group: dist.ProcessGroup, data: Sequence[torch.Tensor], src: int) -> Any:
    """Return this rank's part of what ``src``, a rank in WORLD, has :func:`written`: its ``data``.

    Raises:
        ValueError: ``src`` has sent data that are not saved residuals.
    """
    me, source = group.rank(), group_rank(group, src)
    lengths = _lengths(all_gather_plain(group, [one.numel() for one in data])[source], group)
    if me == source:
        _exchange(group, sends=[(rank, one) for rank, one in enumerate(data) if rank != me])
        return _read(data[me], src)
    room = torch.empty(lengths[me], dtype=torch.uint8, device=collective_device(group))
    _exchange(group, receives=[(source, room)])
    return _read(room, src)


def _exchange(
    group: dist.ProcessGroup,
    *,
    receives: Iterable[tuple[int, torch.Tensor]] = (),
    sends: Iterable[tuple[int, torch.Tensor]] = (),
) -> None:
    for arrival in start_messages(group, receives=receives, sends=sends, tag=_TAG):
        arrival.wait()


def _written(part: Any, group: dist.ProcessGroup) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(part, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(collective_device(group))


def _lengths(sent: Any, group: dist.ProcessGroup) -> list[int]:
    """Return how many bytes go to or come from each rank, as a peer has announced them."""
    if not isinstance(sent, list) or len(sent) != group.size():
        raise ValueError(f"a rank announced the lengths of residuals as {sent!r:.200}")
    for length in sent:
        if type(length) is not int or not 0 < length <= _MOST_BYTES:
            raise ValueError(f"a rank announced residuals of {length!r:.200} bytes")
    return sent


def _read(room: torch.Tensor, rank: int) -> Any:
    on_host = room.cpu()
    try:
        return torch.load(
            io.BytesIO(ctypes.string_at(on_host.data_ptr(), on_host.numel())), weights_only=True
        )
    except Exception as error:  # forged bytes may raise nearly anything, even struct.error
        raise ValueError(f"rank {rank} sent data that are not saved residuals: {error!r:.200}") from error
