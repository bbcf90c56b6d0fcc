"""How one bucket is averaged: decided on the caller's thread, in the same order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks.exact_parameters import gradients_of_small_parameters
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.residuals import BucketResiduals, Residuals
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.tensor_buckets import AnyBucket, TensorBucket, values_of
from ddp_quant_hooks.values import Values

__all__ = ["Decision", "Decisions"]


@dataclass(frozen=True)
class Decision:
    """How one bucket is averaged, the same way on every rank.

    Attributes:
        quantized: Whether it is sent in few bits. If not, it is averaged without compression, and the rest
            has no meaning.
        values: The values of the bucket; ``None`` for a sparse one.
        label: See :meth:`ddp_quant_hooks.routes.Route.average`.
        exact: Parts of the bucket to average without compression.
        kept: Its residuals.
        sampled: Whether its error is measured.
    """

    quantized: bool
    values: Values | None
    exact: list[torch.Tensor] = field(default_factory=list)
    kept: BucketResiduals = field(default_factory=BucketResiduals)
    sampled: bool = False
    label: int = 0


class Decisions:
    """Decides, bucket by bucket.

    Args:
        options: The options of the state.
        route: The route of its values.
        residuals: The residuals of its buckets.
    """

    def __init__(self, options: Options, route: Route, residuals: Residuals) -> None:
        self._options, self._route, self._residuals = options, route, residuals
        self._quantized = 0

    def decide(self, group: dist.ProcessGroup, running: BackwardPass, bucket: AnyBucket) -> Decision:
        """Decide on a bucket that is not empty.

        Args:
            group: The process group whose ranks average.
            running: The backward pass that the bucket belongs to.
            bucket: The bucket.
        """
        options, values = self._options, values_of(bucket)
        least = options.least_bytes(group.size())
        plain = values is None or values.dtype not in VALUE_DTYPES or values.nbytes < least
        exact = gradients_of_small_parameters(bucket) if options.exact_1d and not plain else []
        if values is None or plain or (exact and len(exact) == len(bucket.parameters())):
            if options.error_feedback != "none":
                running.unused_part(bucket.parameters())  # this rank's only gradients may be here
                if values is not None:
                    self._residuals.plain_bucket(bucket.parameters(), _position(running, bucket))
            return Decision(quantized=False, values=values)
        kept = BucketResiduals()
        if options.error_feedback != "none":
            kept = self._residuals_of(group, running, bucket, values)
        sampled = options.sample_every > 0 and self._quantized % options.sample_every == 0
        self._quantized += 1
        label = bucket.label if isinstance(bucket, TensorBucket) else 0
        return Decision(True, values, exact, kept, sampled, label)

    def start_over(self) -> None:
        """Sample the next quantized bucket: at an error, ranks may have been at different buckets."""
        self._quantized = 0

    def _residuals_of(
        self, group: dist.ProcessGroup, running: BackwardPass, bucket: AnyBucket, values: Values
    ) -> BucketResiduals:
        count, device, parameters = values.count, values.device, bucket.parameters()
        own, shard, _ = self._route.lengths(group, count, device)
        kept = self._residuals.of_bucket(
            parameters, _position(running, bucket), own=own, shard=shard, device=device
        )
        running.kept.append(kept)
        unused = running.unused_part(parameters)
        if unused:
            running.at_end.append(partial(kept.keep, unused, *self._route.spans(group, count, device)))
        return kept


def _position(running: BackwardPass, bucket: AnyBucket) -> int:
    return bucket.index() if running.held is not None else running.position
