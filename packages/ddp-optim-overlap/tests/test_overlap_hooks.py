"""With any communication hook, the step uses the result of its future."""

import pytest
import torch
import torch.distributed as dist
from overlap_runs import differences, one_group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.short

ADAMW = one_group(torch.optim.AdamW, {"lr": 0.01})


def new_tensor_hook(state, bucket):
    """Average into another tensor and leave the bucket full of nonsense."""
    other = bucket.buffer().clone()
    bucket.buffer().fill_(1e6)

    def halve(done):
        return done.value()[0] / 2

    return dist.all_reduce(other, async_op=True).get_future().then(halve)


HOOKS = {
    "allreduce_hook": lambda: (allreduce_hook, None),
    "fp16": lambda: (fp16_compress_hook, None),
    "bf16, sums in fp32": lambda: (bf16_compress_hook, CompressState(accumulate="fp32")),
    "bf16 wrapper": lambda: (bf16_compress_wrapper(new_tensor_hook), None),
    "pytorch's allreduce": lambda: (default_hooks.allreduce_hook, None),
    "pytorch's fp16": lambda: (default_hooks.fp16_compress_hook, None),
    "pytorch's fp16 wrapper, which sets another buffer": lambda: (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        None,
    ),
    "a new tensor": lambda: (new_tensor_hook, None),
}


def _hooks(_):
    return {
        (name, view): differences(ADAMW, comm=make, gradient_as_bucket_view=view)
        for name, make in HOOKS.items()
        for view in (False, True)
    }


def test_the_bits_of_the_ordinary_loop_with_the_same_hook():
    for rank in run_ranks(_hooks, 2, timeout=120):
        assert len(rank) == 2 * len(HOOKS)
        assert not any(rank.values()), rank
