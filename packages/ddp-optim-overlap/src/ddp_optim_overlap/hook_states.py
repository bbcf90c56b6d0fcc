"""Hooks that make their engine late, once they know which ranks train together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.engine import Engine
from dist_utils import resolve_group
from dist_utils.comm_hooks import is_pair
from dist_utils.torch_compat import GradBucket

__all__ = ["EngineAtFirstBucket"]


class EngineAtFirstBucket:
    """Takes buckets for an engine that is made with the first one, unless started earlier.

    Args:
        make: Makes the engine from a process group, the state that the hook was registered with and, if
            known, the model.
    """

    def __init__(
        self, make: Callable[[dist.ProcessGroup, object, DistributedDataParallel | None], Engine]
    ) -> None:
        self._make = make
        self.engine: Engine | None = None

    def start(self, hook_state: object, model: DistributedDataParallel | None = None) -> Engine:
        """Return the engine, and make it if needed."""
        if self.engine is None:
            self.engine = self._make(_group_of(hook_state), hook_state, model)
        return self.engine

    def take(self, hook_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the communication hook for one bucket."""
        engine = self.start(hook_state)
        if not is_pair(bucket):
            engine.gradients.watch(bucket.parameters())
        return engine.take(bucket)


def _group_of(hook_state: Any) -> dist.ProcessGroup:
    """Return the group that a hook's state is or has; WORLD if it has none."""
    named = hook_state() if isinstance(hook_state, weakref.ref) else hook_state
    if isinstance(named, (dist.ProcessGroup, DeviceMesh)):
        return resolve_group(named)
    if isinstance(named, DistributedDataParallel):
        return named.process_group
    return resolve_group(getattr(named, "process_group", None))
