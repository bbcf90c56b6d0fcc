"""Ranks with different hooks or options: an error on every rank before any gradient is sent."""

import pytest
import torch
import torch.distributed as dist
from hook_buckets import foreign_hook, make_bucket
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dist_utils.testing import run_ranks

WIRE_16, WRAPPED = (torch.float16, torch.bfloat16), bf16_compress_wrapper(compress_hook)
# The hook of both ranks, or of each, its options on each, and how the message begins.
CASES = [
    (
        (fp16_compress_hook, bf16_compress_hook),
        ({}, {}),
        "fp16_compress_hook on rank 0, bf16_compress",
    ),
    (
        (fp16_compress_hook,) * 2,
        ({"accumulate": "fp32"}, {}),
        "accumulate is 'fp32' on rank 0, 'wire' on",
    ),
    ((WRAPPED, WRAPPED), ({}, {"saturate": True}), "saturate is False on rank 0, True on rank 1"),
    (
        (compress_hook, compress_hook),
        [{"wire_dtype": dtype} for dtype in WIRE_16],
        "wire_dtype is torch.float16 on rank 0, torch.bfloat16 on rank 1",
    ),
    (
        (fp16_compress_wrapper(foreign_hook), bf16_compress_wrapper(foreign_hook)),
        (None, None),
        "fp16_compress_wrapper(foreign_hook) on rank 0, bf16_compress_wrapper(foreign_hook) on rank 1",
    ),
]


def _different(rank):
    """A refusal is raised again, for a state until it is closed, for a group as long as it exists."""
    bucket, messages, averaged = make_bucket(), [], []
    for hooks, each, _ in CASES:
        group = dist.new_group()
        hook, options = hooks[rank], each[rank]
        state = group if options is None else CompressState(group, **options)
        for _ in range(2):
            values = torch.full((1000,), 1.0 + rank)
            bucket.set_buffer(values)
            with pytest.raises(RuntimeError) as caught:
                hook(state, bucket).wait()
            assert torch.equal(values, torch.full((1000,), 1.0 + rank)), "nothing was averaged"
            messages.append(str(caught.value))
        hook, options = hooks[0], each[0]
        if options is None:
            state = dist.new_group()
        else:
            state.close()
            state = CompressState(group, **options)
        bucket.set_buffer(torch.full((1000,), float(rank)))
        averaged += hook(state, bucket).wait().unique().tolist()
    bucket.set_buffer(torch.ones(1000, dtype=WIRE_16[rank]))
    with pytest.raises(RuntimeError, match=r"bucket is torch\.float16 on rank 0, torch\.bfloat16 on rank 1"):
        allreduce_hook(None, bucket).wait()
    return messages, averaged


def test_different_hooks_raise_on_every_rank_until_they_are_made_anew():
    for messages, averaged in run_ranks(_different, 2):
        assert averaged == [0.5] * len(CASES)
        for place, message in enumerate(messages):
            assert "AgreementError" in message
            assert CASES[place // 2][2] in message


def _bound(rank):
    """A model over some ranks: the state takes its group, and a state with other ranks is refused."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=pairs[rank == 2])
    ddp.register_comm_hook(CompressState().bind(ddp), fp16_compress_hook)
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    with pytest.raises(ValueError, match=r"averages over ranks \[0, 1, 2\], but the model over ranks \["):
        CompressState(dist.group.WORLD).bind(ddp)
    assert CompressState(pairs[rank == 2]).bind(ddp).process_group is pairs[rank == 2]
    return ddp.module.weight.grad[0, 0].item()


def test_a_state_that_is_bound_averages_over_its_models_ranks():
    assert run_ranks(_bound, 3) == [0.5, 0.5, 2.0]
