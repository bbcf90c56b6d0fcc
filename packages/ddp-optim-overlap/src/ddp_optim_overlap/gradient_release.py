"""Free gradients when their bucket is stepped, so that they never take the size of the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from ddp_optim_overlap.bucket_memory import BucketMemory
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.partial_steps import PartialSteps
from dist_utils.torch_compat import default_group_timeout, group_timeout

__all__ = ["GradientRelease", "require_owned", "require_readable"]


class GradientRelease:
    """Frees the gradients of all buckets, pass by pass: see :class:`ReleasedPass`.

    Args:
        memory: How to free memory.
        process_group: Its timeout limits every wait.
        steps: Knows the parameters that are stepped.
        may_leave_out: Returns whether parameters may get no gradient in a pass.

    Attributes:
        memory: As given.
    """

    def __init__(
        self,
        memory: BucketMemory,
        process_group: dist.ProcessGroup,
        *,
        steps: PartialSteps,
        may_leave_out: Callable[[], bool],
    ) -> None:
        self.memory = memory
        self._process_group = process_group
        self._steps, self._may_leave_out = steps, may_leave_out
        self._limited = True

    def require_possible(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if the gradients of a backward pass that begins cannot be freed.

        Args:
            averaged: The parameters that have been in a bucket before.

        Raises:
            ConfigError: Gradients would be lost, or DDP would touch freed memory.
        """
        require_owned(averaged, self._steps.parameters)
        require_readable(self.memory, may_leave_out=self._may_leave_out())

    def wait_for(self, places: threading.Semaphore, device: torch.device) -> None:
        """Wait until there is room for another bucket. After a wait that timed out, return at once."""
        timeout = group_timeout(self._process_group, device) or default_group_timeout()
        if self._limited and not places.acquire(timeout=timeout.total_seconds()):
            # A slower average would fail anyway, and DDP would wait forever if the hook got no more buckets.
            self._limited = False
            warnings.warn(
                f"a bucket was not averaged within {timeout}: the communication hook seems to wait for later "
                "ones, so that release_gradients=True saves little. backward() no longer waits for it",
                RuntimeWarning,
                stacklevel=2,
            )


def require_owned(averaged: Collection[torch.Tensor], owned: Collection[torch.Tensor]) -> None:
    """Raise if a parameter would lose its gradient without being stepped.

    Raises:
        ConfigError: There is such a parameter.
    """
    for parameter in averaged:
        if parameter.requires_grad and parameter not in owned:
            raise ConfigError(
                "release_gradients=True takes all gradients away, and no overlapped optimizer has the "
                f"parameter of shape {tuple(parameter.shape)}: give its optimizer to overlap_optimizer too, "
                "freeze it, or leave release_gradients out"
            )


def require_readable(memory: BucketMemory, *, may_leave_out: bool, as_view: bool = False) -> None:
    """Raise if DDP would touch a bucket whose memory is freed.

    Raises:
        ConfigError: It would.
    """
    if memory.stays_readable:
        return
    if as_view:
        raise ConfigError(
            "release_gradients=True needs gradient_as_bucket_view=False on this device: gradients in a "
            "bucket would lose their memory with it. What that option saves, they save anyway"
        )
    if may_leave_out:
        raise ConfigError(
            "release_gradients=True is not for find_unused_parameters=True or static_graph=True on this "
            "device: DDP would write zeros into a bucket whose memory is given back. Leave one of them out"
        )
