"""Hooks of DDP that FSDP1 calls with a tensor."""

import inspect

import pytest
import torch

from dist_utils.comm_hooks import buckets_only


def _some_hook(state, bucket, size=3):
    return state, bucket, size


def test_hooks_of_buckets_refuse_tensors_and_stay_what_they_are():
    hook = buckets_only(_some_hook)
    assert hook(None, bucket="bucket", size=4) == (None, "bucket", 4)
    assert inspect.signature(hook) == inspect.signature(_some_hook)
    for arguments in ((None, torch.ones(2)), (None, torch.ones(2), torch.ones(1))):
        with pytest.raises(TypeError, match=r"_some_hook averages buckets.*FSDP1.*use fully_shard"):
            hook(*arguments)
