"""Messages between ranks: tensors between two of them, many at once, and plain data of all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group, runs_on_host
from dist_utils.torch_compat import all_gather_single

_SHORT_BYTES = 64 << 10
"""On Gloo, messages are sent before receives are posted if none of them is longer.

A receive tells the sender to begin, which then writes the message on the thread that sends, under a lock of
the connection. If that thread loses its core to Gloo's own thread, which spins for the lock, both lose a time
slice of 4 ms. With sends first, Gloo's thread writes. With busy cores, 1 to 64 KiB between two ranks on
loopback took half the time (2 instead of 4 ms), and a bucket of 64 KiB in 8 bits among four ranks 0.89 of it
(benchmarks/results/message_order.json).
"""


class Arrival(Protocol):
    """What to wait for: a ``dist.Work``, or the copy of received tensors from the host."""

    def wait(self) -> Any:
        """Return when the tensors may be used. Raises what the backend raises."""


def start_messages(
    group: dist.ProcessGroup,
    *,
    receives: Iterable[tuple[int, torch.Tensor]],
    sends: Iterable[tuple[int, torch.Tensor]],
    tag: int = 0,
) -> Sequence[Arrival]:
    """Start receiving from and sending to several ranks of a group, as one batch.

    The receives are posted first if a message is long: on Gloo a message that arrives before its receive was
    posted waits for it, and a link that could carry both directions at once carries one after the other (half
    the speed, measured on 1 Gbit/s). On two ranks and more such messages were faster there than
    ``all_to_all`` and ``all_gather`` (19 against 29 ms for both, with 12.5 MiB on four loopback ranks), and
    they may be of unequal length.

    Gloo sends only CPU tensors between two ranks: those of an accelerator go through pinned memory of the
    host, and the caller waits here until the current stream has computed them.

    Args:
        group: The process group of the ranks.
        receives: Pairs of a rank in the group and the contiguous tensor to fill.
        sends: Pairs of a rank in the group and the contiguous tensor to send, which must not change until
            the work is done. All tensors are on one device.
        tag: The tag of all these messages. Messages of one tag and length between two ranks arrive in order.

    Returns:
        What to wait for, in any order. Empty tensors are not sent, so both sides must agree on which tensors
        are empty, and on how long the others are. On Gloo a message is not received by a tensor of another
        length (except by chance, once in 2^30), and both sides wait until the group's timeout. Both sides
        must use this function; ``dist.recv`` does not receive what it sends.

    Raises:
        ValueError: A rank is out of range or this one itself, this one is not in the group, or the group was
            destroyed.
        RuntimeError: A peer is gone; from here or from the works' ``wait``.
    """
    if not isinstance(group, dist.ProcessGroup):  # what new_group returns on ranks outside the group
        raise ValueError(f"this rank is not in the group: start_messages got {group!r}")  # noqa: TRY004
    incoming, outgoing = (
        [(rank, tensor) for rank, tensor in some if tensor.numel()] for some in (receives, sends)
    )
    device = next((tensor.device for _, tensor in incoming + outgoing), None)
    if device is None:
        return []
    on_host = device.type == "cpu"
    if not on_host and runs_on_host(group, device):
        return _through_host(group, incoming, outgoing, tag, device)
    return _start(group, incoming, outgoing, tag, on_host=on_host)


def _start(
    group: dist.ProcessGroup,
    incoming: list[tuple[int, torch.Tensor]],
    outgoing: list[tuple[int, torch.Tensor]],
    tag: int,
    *,
    on_host: bool,
) -> list[dist.Work]:
    dist.get_global_rank(group, 0)  # raises for a destroyed group; per peer, each call would search all
    size, me = group.size(), group.rank()
    for rank, _ in incoming + outgoing:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is out of range for a group of {size} ranks")
        if rank == me:  # Gloo would fail with another error, after posting earlier messages
            raise ValueError(f"rank {rank} is this one: messages are for other ranks")
    lengths = {tensor.nbytes for _, tensor in incoming + outgoing}
    tags = {nbytes: _tag(tag, nbytes) for nbytes in lengths}
    if on_host:
        # No CPU backend batches them, and a P2POp for each costs as much as sending it.
        receives = [(group.recv, rank, tensor) for rank, tensor in incoming]
        sends = [(group.send, rank, tensor) for rank, tensor in outgoing]
        messages = receives + sends if max(lengths) > _SHORT_BYTES else sends + receives
        return [start([tensor], rank, tags[tensor.nbytes]) for start, rank, tensor in messages]
    ranks = dist.get_process_group_ranks(group)
    operations = [
        dist.P2POp(operation, tensor, ranks[rank], group, tags[tensor.nbytes])
        for operation, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
        for rank, tensor in messages
    ]
    return dist.batch_isend_irecv(operations)


def _tag(tag: int, nbytes: int) -> int:
    """Return a tag that depends on the length, identical in every process.

    Gloo would silently fill the front of a tensor with a shorter message, and end the process at a longer
    one.
    """
    return hash((tag, nbytes)) % (1 << 30)


def _through_host(
    group: dist.ProcessGroup,
    incoming: list[tuple[int, torch.Tensor]],
    outgoing: list[tuple[int, torch.Tensor]],
    tag: int,
    device: torch.device,
) -> list[_FromHost]:
    sent = [(rank, _on_host(tensor).copy_(tensor, non_blocking=True)) for rank, tensor in outgoing]
    received = [(rank, _on_host(tensor)) for rank, tensor in incoming]
    torch.get_device_module(device).current_stream(device).synchronize()
    both = [(on_host, tensor) for (_, on_host), (_, tensor) in zip(received, incoming, strict=True)]
    works = _start(group, received, sent, tag, on_host=True)
    return [_FromHost(works, both, [on_host for _, on_host in sent])]


class _FromHost:
    """Messages that go on to an accelerator when they have arrived on the host."""

    def __init__(
        self,
        works: list[dist.Work],
        tensors: list[tuple[torch.Tensor, torch.Tensor]],
        sent: list[torch.Tensor],
    ) -> None:
        self._works, self._tensors = works, tensors
        self._sent = sent  # keeps them alive until they are sent

    def wait(self) -> None:
        """Return when the host has received everything and the copies are queued on the current stream."""
        for work in self._works:
            work.wait()
        for on_host, tensor in self._tensors:
            tensor.copy_(on_host, non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate memory on the host for a tensor: pinned, so that copies do not block."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def all_gather_plain(process_group: GroupLike, value: Any) -> list[Any]:
    """Return every rank's ``value``, in rank order.

    It travels as JSON, of which nothing is executed: ``torch.distributed``'s collectives of objects unpickle
    what a peer has sent, which may run any code.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        value: ``None``, booleans, numbers, strings, and lists, tuples and dicts (with string keys) of these.
            Tuples arrive as lists.

    Returns:
        The values; this rank's own is returned as the others receive it.

    Raises:
        TypeError, ValueError: ``value`` cannot be written as JSON; on this rank, before any communication.
        RuntimeError: A peer is gone; and as :func:`dist_utils.resolve_group`.

    Cost:
        Two all-gathers: of 8 bytes a rank, then of the length of the longest text.

    Example:
        >>> all_gather_plain(None, {"rank": dist.get_rank()})  # doctest: +SKIP
        [{'rank': 0}, {'rank': 1}]
    """
    group = resolve_group(process_group)
    text = json.dumps(value).encode()
    device = collective_device(group)
    lengths = gather_rows(group, torch.tensor([len(text)], device=device)).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")  # not the default device
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gather_rows(group, padded.to(device)).tolist()
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def gather_rows(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks, one row for each."""
    everyone = own.new_empty(group.size() * own.numel())
    all_gather_single(everyone, own.flatten(), group)
    return everyone.view(group.size(), -1)
