"""One backward pass: which buckets belong to it, whether it ended well, and whether its step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ddp_quant_hooks.chunks import Span
from ddp_quant_hooks.outcomes import Outcome
from dist_utils import torch_compat

if TYPE_CHECKING:
    from ddp_quant_hooks.residuals import BucketResiduals
    from ddp_quant_hooks.resume import Bucket, HeldPass

__all__ = ["BackwardPass", "UnusedPart", "gradient_parts", "value_count"]

UnusedPart: TypeAlias = tuple[torch.Tensor, Span]
"""A parameter without a gradient, and where it is in its bucket."""


def value_count(parameter: torch.Tensor) -> int:
    """Return how many real values a parameter's gradient has."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def gradient_parts(bucket: Bucket) -> list[torch.Tensor]:
    """Return each parameter's part of a dense bucket's buffer, flat and real.

    DDP's buckets of complex parameters are real and twice as long; ``bucket.gradients()`` does not know that.
    """
    buffer = bucket.buffer()
    if buffer.is_complex():
        parts = torch.split(buffer.view(-1), [parameter.numel() for parameter in bucket.parameters()])
        return [torch.view_as_real(part).view(-1) for part in parts]
    return list(torch.split(buffer.view(-1), [value_count(parameter) for parameter in bucket.parameters()]))


class BackwardPass:
    """A backward pass, as seen from its buckets.

    Autograd tells it when it ends well. A pass that is not told has failed: in the user's code, on a peer, or
    in communication. Jobs write only to the outcome of their pass, so that late jobs of a failed pass do not
    disturb the next one.

    Attributes:
        kept: The residuals of its buckets.
        outcome: The outcome of its exchanges.
        held: Holds its buckets, if it is averaged in other buckets than its own.
        discarded: Whether the user has said that no step will use its gradients.
        at_end: What to do when it has ended well and DDP has written the gradients.
    """

    def __init__(self) -> None:
        self.at_end: list[Callable[[], None]] = []
        self._used: torch.Tensor | None = None
        self.kept: list[BucketResiduals] = []
        self.held: HeldPass | None = None
        self.discarded = False
        self._buckets = 0
        self._last_index = -1
        # Reentrant checkpointing runs backward passes inside the pass; a bucket may arrive in any of them.
        self._ended_well: dict[int, bool] = {}
        self._surrounding_ended_well: bool | None = None  # None: not looked for yet
        self.outcome = Outcome()

    def includes(self, task: int, index: int) -> bool:
        """Return whether a bucket that arrives now, inside autograd's ``task``, belongs to this pass.

        The index alone does not tell: buckets that no rank uses are left out
        (``skip_all_reduce_unused_params``), and in the first pass of a static graph all have index 0.
        """
        outside = -1 in self._ended_well
        if task == -1 or outside:  # DDP's join(), or a hook that is called by hand
            return task == -1 and outside and index > self._last_index
        if task in self._ended_well or task < max(self._ended_well):
            return True  # this very task, or one around the tasks seen before
        return index > self._last_index and torch_compat.inside_nested_backward()

    def add_bucket(self, task: int, index: int) -> None:
        """Note a bucket that belongs to this pass."""
        self._last_index = index
        self._buckets += 1
        self.add_task(task)

    def add_task(self, task: int) -> None:
        """Note that this pass continues inside autograd's ``task``."""
        if task not in self._ended_well:
            self._ended_well[task] = task == -1
            if task != -1:
                torch_compat.after_backward(partial(self._end, task))
                if self._surrounding_ended_well is None:
                    surrounded = _after_surrounding_backward(self._end_surrounding)
                    self._surrounding_ended_well = not surrounded

    def unused_part(self, parameters: Sequence[torch.Tensor]) -> list[UnusedPart]:
        """Return the parameters of a bucket for which this rank has no gradient. Called for every bucket.

        If no rank has a gradient, DDP discards their averages (``find_unused_parameters``). That is not known
        before the end of the pass: they still have no gradient then.
        """
        if self.outside_of_backward or self._surrounding_ended_well is not True:
            return []  # join() gets no gradients; reentrant checkpoints support no unused parameters
        unused, start = [], 0
        for parameter in parameters:
            stop = start + value_count(parameter)
            if parameter.grad is None:
                unused.append((parameter, Span(start, stop)))
            elif self._used is None:
                self._used = parameter
            start = stop
        return unused

    @property
    def position(self) -> int:
        """The place of the latest bucket among all buckets of the model."""
        return max(self._last_index, self._buckets - 1)

    @property
    def complete(self) -> bool:
        """Whether it ended well, on this rank and, as far as its communication shows, on all others."""
        ended = all(self._ended_well.values()) and self._surrounding_ended_well is not False
        return ended and not self.outcome.broken

    @property
    def outside_of_backward(self) -> bool:
        """Whether its buckets come from outside of autograd, which then does not report its end."""
        return -1 in self._ended_well

    @property
    def counts(self) -> bool:
        """Whether a step may follow, as far as is known without asking an accelerator."""
        return self.complete and not self.discarded

    def _end(self, task: int) -> None:
        self._ended_well[task] = True
        # An optimizer inside backward() removes all gradients, which then show nothing.
        if self._used is not None and self._used.grad is not None:
            for finish in self.at_end:
                finish()
        self.at_end.clear()
        self._used = None

    def _end_surrounding(self) -> None:
        self._surrounding_ended_well = True


def _after_surrounding_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the outermost backward pass around this thread's has ended without an error.

    Like ``torch_compat.after_backward``, for the outermost pass, which continues when the passes inside it
    are over. It accepts callbacks only while its own nodes run, so the callback is queued by the next node
    after the function whose backward began the inner pass.

    Returns:
        Whether there is such a pass, one in which a Python function's backward called ``backward()``.
    """
    nodes = [node for node in torch_compat.surrounding_nodes() if node is not None]
    if not nodes:
        return False
    following = [node for node, _ in nodes[-1].next_functions if node is not None]
    if not following:
        return False

    def first_of_the_rest(_: Any) -> None:
        handle.remove()
        torch_compat.after_backward(callback)

    handle = following[0].register_prehook(first_of_the_rest)
    return True
