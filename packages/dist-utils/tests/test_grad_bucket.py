"""Buckets for tests of hooks hold the given gradients."""

import pytest
import torch
import torch.distributed as dist

from dist_utils.testing import grad_bucket, run_ranks


def _buckets(rank):
    found = [grad_bucket([torch.full((2, 3), 1.5 + rank), torch.tensor([-2.0])]).buffer().tolist()]
    values = torch.tensor([1 + 2j, 3 - 4j])
    try:
        dist.broadcast(values.clone(), 0)
    except RuntimeError:
        return [*found, None]
    bucket = grad_bucket([values]).buffer()
    if bucket.is_complex():  # as until torch 2.9
        bucket = torch.view_as_real(bucket).view(-1)
    return [*found, bucket.tolist()]


def test_a_bucket_holds_the_gradients():
    first, second = run_ranks(_buckets, 2)
    assert [sorted(rank[0]) for rank in (first, second)] == [[-2.0] + [1.5] * 6, [-2.0] + [2.5] * 6]
    if first[1] is None:
        pytest.skip("Gloo does not broadcast complex parameters in this torch")
    assert first[1] == [1.0, 2.0, 3.0, -4.0]
