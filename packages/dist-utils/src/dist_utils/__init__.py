"""The plumbing under torch.distributed tools: process groups, ordered communication, multi-rank tests."""

from dist_utils.ordered_worker import OrderedWorker
from dist_utils.process_groups import GroupLike, global_rank, group_rank, resolve_group

__all__ = ["GroupLike", "OrderedWorker", "global_rank", "group_rank", "resolve_group"]

__version__ = "0.1.0"
