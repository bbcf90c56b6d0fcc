"""The mean of a sparse gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_utils.process_groups.messages import gather_rows


@torch.no_grad()
def sparse_mean(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    """Average a sparse gradient over the ranks; on CPUs with the bits of DDP without a hook.

    Gathers indices and values, because no backend's all-reduce of sparse tensors can be relied on. NCCL has
    none. Gloo's may corrupt the memory of the process if another collective of the group ends at the same
    moment, as the average of another bucket may: both threads of the group then assign the name of their
    collective to one C++ string, without a lock. That of an all-gather, or of a dense all-reduce, is short
    enough for the string to hold it without memory of its own. Seen with torch 2.9, 2.13 and 2.15, not with
    2.6. And complex values are not averaged at all by torch 2.13 and 2.15.

    Args:
        group: The ranks. All of them call this at the same point of their collectives.
        gradient: In COO layout, coalesced or not; with the same shape and number of sparse dimensions on all
            ranks. It is only read: an embedding's gradient may share memory with the gradient that flows on
            to other layers.

    Returns:
        A new tensor, which is coalesced and has no graph.

    Raises:
        RuntimeError: A peer is gone. A hook should return a failed future of it, as DDP is in the middle of a
            pass: see :func:`dist_utils.comm_hooks.failed_future`.

    Cost:
        Waits for the other ranks. Three all-gathers: of 8 bytes a rank, and of as many indices and values a
        rank as the rank with the most of them has.

    Example:
        >>> mean = sparse_mean(group, bucket.buffer())  # doctest: +SKIP
    """
    share = (gradient / group.size()).coalesce()
    indices, values = share.indices().t(), share.values()
    count = torch.tensor([len(values)], device=values.device)
    counts: list[int] = gather_rows(group, count).flatten().tolist()
    places, parts = (_gather(group, rows, counts) for rows in (indices, values))
    shares = [
        torch.sparse_coo_tensor(place.t(), part, share.shape, device=part.device, check_invariants=False)
        for place, part in zip(places, parts, strict=True)
    ]
    total = shares[0]
    for other in shares[1:]:  # in the order of ranks, as Gloo does
        total += other
    return total.coalesce()


def _gather(group: dist.ProcessGroup, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of every rank, which has so many of them."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    everyone = gather_rows(group, padded) if padded.numel() else [padded for _ in counts]
    return [own.view_as(padded)[:count] for own, count in zip(everyone, counts, strict=True)]
