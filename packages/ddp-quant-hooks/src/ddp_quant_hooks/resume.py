"""Average the first passes after loading residuals in the buckets of the saved run.

A new DistributedDataParallel makes other buckets in its first pass (the first two, with a static graph) than
the saved run had. Their blocks and shards end elsewhere, so the results would have other bits, and the
residuals of shards would belong to nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ddp_quant_hooks.passes import gradient_parts
from dist_utils import torch_compat

__all__ = ["Bucket", "HeldPass", "Resumption"]

_log = logging.getLogger(__name__)

_PASSES_BEFORE_REBUILD = 2
"""After this many passes DDP has rebuilt its buckets: after one, or two with a static graph."""


class Bucket(Protocol):
    """What the hook needs of a bucket: a ``GradBucket``, or one that is assembled here."""

    def index(self) -> int:
        """Return its place among the buckets."""

    def buffer(self) -> torch.Tensor:
        """Return the gradients, one after another."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""

    def is_last(self) -> bool:
        """Return whether no bucket follows in this pass."""


Average = Callable[[Bucket], torch.futures.Future[torch.Tensor]]


class Resumption:
    """Decides, in the same way on all ranks, which passes are averaged in saved buckets.

    Args:
        layout: The parameters of each bucket of the saved run, in order.
    """

    def __init__(self, layout: Sequence[Sequence[torch.Tensor]]) -> None:
        self._layout = layout
        self._passes = 0
        self._first_bucket: list[torch.Tensor] = []
        self.over = not layout

    def ended(self, held: HeldPass) -> None:
        """Note that a held pass has ended well."""
        self._passes += 1
        self._first_bucket = held.first_bucket
        self.over = held.came_as_saved or self._passes == _PASSES_BEFORE_REBUILD

    def next_pass(self, bucket: Bucket, average: Average) -> HeldPass | None:
        """Return what holds the pass that ``bucket`` begins, if it is to be held."""
        rebuilt = self._passes > 0 and not _same(bucket.parameters(), self._first_bucket)
        static_graph = torch_compat.in_final_callback()
        if static_graph and not all(parameter.requires_grad for part in self._layout for parameter in part):
            # DDP waits for its buckets at once, and nothing tells which of them is the last.
            _log.info("the pass is averaged in other buckets than the saved run's: parameters are frozen now")
            rebuilt = True
        self.over = self.over or rebuilt
        return None if self.over else HeldPass(self._layout, average, all_come=static_graph)


class HeldPass:
    """Holds the buckets of a pass until all have arrived, then averages their gradients in saved buckets.

    One after another, so that the largest one determines the memory needed. The communication of this pass
    does not overlap with its computation.

    Args:
        layout: The parameters of each saved bucket.
        average: Averages a bucket as the hook does.
        all_come: Whether all parameters of every saved bucket will arrive; it is then not known which bucket
            is the last.
    """

    def __init__(self, layout: Sequence[Sequence[torch.Tensor]], average: Average, *, all_come: bool) -> None:
        self._layout = layout
        self._average = average
        self._missing = {id(parameter) for part in layout for parameter in part} if all_come else None
        self._taken: list[tuple[Bucket, torch.futures.Future[torch.Tensor]]] = []
        self._done = False
        self.came_as_saved = False
        self.first_bucket: list[torch.Tensor] = []

    def take(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the hook for this bucket: return a future of its averaged buffer."""
        if self._done:
            return self._average(bucket)
        self.first_bucket = self.first_bucket or bucket.parameters()
        # A sparse gradient has a bucket of its own in any run.
        averaged = self._average(bucket) if bucket.buffer().is_sparse else self._hold(bucket)
        if self._missing is not None:
            self._missing -= {id(parameter) for parameter in bucket.parameters()}
            last = not self._missing
        else:
            last = bucket.is_last()
            if torch_compat.inside_backward() and not last:
                # The last one never arrives if no rank uses its parameters. DDP waits for its buckets in a
                # callback that it queues later.
                torch_compat.before_end_of_backward(self._no_more_come)
        if last:
            self._finish()
        return averaged

    def _hold(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        device = bucket.buffer().device
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        self._taken.append((bucket, averaged))
        return averaged.then(_value)

    def _no_more_come(self) -> None:
        if not (self._done or torch_compat.inside_nested_backward()):
            self._finish()

    def _finish(self) -> None:
        self._done = True
        try:
            self._average_all()
        except Exception as error:  # noqa: BLE001 - backward() raises it where DDP waits for its buckets
            # A future holds its error: if the error's frames held the future, neither would ever be garbage.
            trace = error.__traceback__
            while self._taken:
                self._taken.pop()[1].set_exception(error)  # type: ignore[arg-type] # torch's annotation
            error.__traceback__ = trace
        else:
            for bucket, averaged in self._taken:
                averaged.set_result(bucket.buffer())
        self._taken.clear()

    def _average_all(self) -> None:
        came = {
            id(parameter): gradient
            for bucket, _ in self._taken
            for parameter, gradient in zip(bucket.parameters(), gradient_parts(bucket), strict=True)
        }
        saved: list[_SavedBucket] = []
        for position, parameters in enumerate(self._layout):
            if all(id(parameter) in came for parameter in parameters):
                gradients = [came[id(parameter)] for parameter in parameters]
                saved.append(_SavedBucket(position, parameters, gradients))
        in_order = [bucket.parameters() for bucket in saved]
        self.came_as_saved = len(in_order) == len(self._taken) and all(
            _same(bucket.parameters(), parameters)
            for (bucket, _), parameters in zip(self._taken, in_order, strict=True)
        )
        alike = sum(map(len, in_order)) == len(came) and all(bucket.is_uniform() for bucket in saved)
        if self.came_as_saved or not alike:
            if not alike:
                _log.info(
                    "the pass is averaged in other buckets than the saved run's: %d parameters have come, %d "
                    "of them in %d whole buckets of that run, or their data types or devices differ",
                    len(came),
                    sum(map(len, in_order)),
                    len(saved),
                )
            for bucket, _ in self._taken:
                self._average(bucket).wait()
            return
        for joined in saved:
            joined.gather()
            self._average(joined).wait()
            joined.scatter()


class _SavedBucket:
    """A bucket of the saved run, made of gradients from other buckets."""

    def __init__(
        self, index: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._elsewhere = gradients
        self._buffer = torch.empty(0)

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return False

    def is_uniform(self) -> bool:
        """Return whether the gradients can be in one tensor."""
        return len({(gradient.dtype, gradient.device) for gradient in self._elsewhere}) == 1

    def gather(self) -> None:
        """Copy the gradients from where they are."""
        self._buffer = torch.cat(list(self._elsewhere))

    def scatter(self) -> None:
        """Copy the averages to where the gradients are, and free the memory."""
        for gradient, average in zip(self._elsewhere, gradient_parts(self), strict=True):
            gradient.copy_(average)
        self._buffer = torch.empty(0)


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _value(averaged: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    # An error raised in a callback is also seen by C++ waiters such as DDP's reducer.
    return averaged.value()
