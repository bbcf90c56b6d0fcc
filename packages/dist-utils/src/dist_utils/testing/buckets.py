"""Buckets as ``DistributedDataParallel`` hands them to communication hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_utils import torch_compat

__all__ = ["grad_bucket"]


class _Gradients(torch.nn.Module):
    """Parameters that get the given gradients."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        products = [
            value * given.conj()
            for value, given in zip(self.values.parameters(), self.gradients, strict=True)
        ]
        return torch.stack([product.sum() for product in products]).sum().real


def grad_bucket(gradients: Sequence[torch.Tensor]) -> torch_compat.GradBucket:
    """Return a bucket as ``DistributedDataParallel`` hands it to a communication hook.

    For tests and benchmarks of hooks; torch has no other way to make buckets. ``set_buffer`` puts other
    values into it.

    Args:
        gradients: The gradients in the bucket, one for each parameter, in this order. Dense, of one dtype. (A
            bucket of complex ones is complex until torch 2.9, and later real and twice as long; Gloo takes
            none in torch 2.6.)

    Cost:
        Collective: makes a DDP model on all ranks and runs one backward pass.
    """
    size = sum(gradient.nbytes for gradient in gradients)
    ddp = DistributedDataParallel(
        _Gradients(gradients), bucket_cap_mb=max(25, size / 2**19), gradient_as_bucket_view=True
    )
    buckets: list[torch_compat.GradBucket] = []

    def capture(_: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def] # noqa: ANN001
        buckets.append(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    capture.__annotations__.clear()  # strings here, which register_comm_hook refuses
    ddp.register_comm_hook(None, capture)
    ddp().backward()
    (bucket,) = buckets
    return bucket
