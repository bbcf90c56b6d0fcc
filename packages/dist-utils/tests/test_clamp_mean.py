"""Means that were computed in another dtype stay finite in their own."""

import itertools

import pytest
import torch

from dist_utils.comm_hooks import clamp_mean

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(("source", "dtype"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_a_mean_in_another_dtype_stays_finite(source, dtype):
    reach = min(torch.finfo(source).max, torch.finfo(dtype).max * 1.9)
    mean = torch.tensor([reach, -reach, 1.5, torch.inf, -torch.inf, torch.nan], dtype=source)
    out = clamp_mean(mean, dtype).to(dtype)
    assert out[:3].isfinite().all()
    assert out[2:5].tolist() == [1.5, torch.inf, -torch.inf]
    assert out[5].isnan()
