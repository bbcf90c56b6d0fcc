"""Numbers that are identical on all ranks, so that all make the same decisions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_utils.process_groups import collective_device

__all__ = ["largest_of_ranks"]


def largest_of_ranks(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks: for times, the slowest rank's.

    Args:
        group: The process group whose ranks all call this, with the same number of values.
        values: The values of this rank.

    Cost:
        One small all-reduce.
    """
    numbers = torch.tensor(values, dtype=torch.float64, device=collective_device(group))
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    found: list[float] = numbers.tolist()
    return found
