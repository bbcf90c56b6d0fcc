"""Hooks that make their engine at the first bucket, when they learn which ranks train together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks.compiled import is_pair
from ddp_optim_overlap.engine import Engine
from dist_utils import resolve_group
from dist_utils.torch_compat import GradBucket

__all__ = ["EngineAtFirstBucket"]


class EngineAtFirstBucket:
    """Takes buckets for an engine that is made with the first one.

    Args:
        make: Makes the engine for a process group and the state that the hook was registered with.
    """

    def __init__(self, make: Callable[[dist.ProcessGroup, object], Engine]) -> None:
        self._make = make
        self.engine: Engine | None = None

    def take(self, hook_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Be the communication hook for one bucket."""
        if self.engine is None:
            self.engine = self._make(_group_of(hook_state), hook_state)
        if not is_pair(bucket):
            self.engine.observe(bucket.parameters())
        return self.engine.take(bucket)


def _group_of(hook_state: Any) -> dist.ProcessGroup:
    """Return the group that a hook's state is, or has; WORLD if it does not say."""
    named = hook_state() if isinstance(hook_state, weakref.ref) else hook_state
    if isinstance(named, (dist.ProcessGroup, DeviceMesh)):
        return resolve_group(named)
    if isinstance(named, DistributedDataParallel):
        return named.process_group
    return resolve_group(getattr(named, "process_group", None))
