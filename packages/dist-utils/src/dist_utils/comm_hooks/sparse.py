"""The mean of a sparse gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_utils.comm_hooks.buckets import completed_future, failed_future
from dist_utils.process_groups.messages import gather_rows


def sparse_mean(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse gradient over the ranks, to the bits of DDP without a hook.

    Gathers indices and values, because no backend's all-reduce of sparse tensors can be relied on. NCCL has
    none. Gloo's may corrupt the memory of the process if another collective of the group ends at the same
    moment, as the average of another bucket may: both threads of the group then assign the name of their
    collective to one C++ string, without a lock. All other names are short enough for the string to hold them
    without memory of its own. Seen with torch 2.9, 2.13 and 2.15, not with 2.6. And complex values are not
    averaged at all by torch 2.13 and 2.15.

    Args:
        group: The ranks. All of them call this at the same point of their collectives.
        gradient: In COO layout, coalesced or not; of the same shape on all ranks. It is only read: an
            embedding's gradient may share memory with the gradient that flows on to other layers.

    Returns:
        A complete future of a new tensor, which is coalesced; or of the error, as a peer is gone.

    Cost:
        Waits for the other ranks. Three all-gathers: of 8 bytes a rank, and of as many indices and values a
        rank as the rank with the most of them has.

    Example:
        >>> return sparse_mean(group, bucket.buffer())  # doctest: +SKIP
    """
    try:
        mean = _sum(group, (gradient / group.size()).coalesce())
    except Exception as error:  # noqa: BLE001 - raised in a hook, it would leave DDP in the middle of a pass
        return failed_future(error, gradient)
    return completed_future(mean)


def _sum(group: dist.ProcessGroup, share: torch.Tensor) -> torch.Tensor:
    """Add the shares of the ranks in their order, as Gloo does."""
    indices, values = share.indices().t(), share.values()
    count = torch.tensor([len(values)], device=values.device)
    counts: list[int] = gather_rows(group, count).flatten().tolist()
    shares = [
        torch.sparse_coo_tensor(places.t(), parts, share.shape, check_invariants=False)
        for places, parts in zip(_gather(group, indices, counts), _gather(group, values, counts), strict=True)
    ]
    total = shares[0]
    for other in shares[1:]:
        total += other
    return total.coalesce()


def _gather(group: dist.ProcessGroup, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of every rank, which has so many of them."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    if padded.numel() == 0:
        return [padded for _ in counts]
    everyone = gather_rows(group, padded)
    return [own.view_as(padded)[:count] for own, count in zip(everyone, counts, strict=True)]
