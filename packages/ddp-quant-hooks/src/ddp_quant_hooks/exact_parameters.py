"""Parameters whose gradients are averaged without compression, apart from the rest of their bucket."""

from __future__ import annotations

import torch

from ddp_quant_hooks.passes import gradient_parts
from ddp_quant_hooks.tensor_buckets import AnyBucket, TensorBucket, small_parts

__all__ = ["gradients_of_small_parameters", "put_back", "set_apart"]


def gradients_of_small_parameters(bucket: AnyBucket) -> list[torch.Tensor]:
    """Return the gradients of parameters of at most one dimension, as parts of a dense bucket."""
    if isinstance(bucket, TensorBucket):
        return list(small_parts(bucket))
    both = zip(bucket.parameters(), gradient_parts(bucket), strict=True)
    return [gradient for parameter, gradient in both if parameter.dim() <= 1]


def set_apart(gradients: list[torch.Tensor], world_size: int) -> torch.Tensor:
    """Take a rank's shares of gradients' means out of the bucket, for an all-reduce.

    Zeros are left there, which do not widen the range of their blocks.
    """
    apart = torch.cat([gradient.flatten() for gradient in gradients])
    for gradient in gradients:
        gradient.zero_()
    return apart.to(torch.promote_types(apart.dtype, torch.float32)).div_(world_size)


def put_back(gradients: list[torch.Tensor], averaged: torch.Tensor) -> None:
    """Copy averages to where :func:`set_apart` took the gradients from."""
    parts = torch.split(averaged, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
