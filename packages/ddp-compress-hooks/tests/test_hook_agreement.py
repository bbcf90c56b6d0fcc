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

WIDE_16 = torch.float16, torch.bfloat16

# The hook of the first ranks, that of the last one, and what the message must say.
CASES = [
    (
        (fp16_compress_hook, {}),
        (bf16_compress_hook, {}),
        "fp16_compress_hook on {first}, bf16_compress_hook on",
    ),
    (
        (fp16_compress_hook, {"accumulate": "fp32"}),
        (bf16_compress_hook, {"accumulate": "fp32"}),
        "fp16_compress_hook on {first}, bf16_compress_hook on rank {last}",
    ),
    (
        (fp16_compress_hook, {"accumulate": "fp32"}),
        (fp16_compress_hook, {}),
        "accumulate is 'fp32' on {first}, 'wire' on rank {last}",
    ),
    (
        (bf16_compress_hook, {}),
        (bf16_compress_hook, {"saturate": True}),
        "saturate is False on {first}, True on rank {last}",
    ),
    (
        (compress_hook, {"wire_dtype": torch.float16}),
        (compress_hook, {"wire_dtype": torch.bfloat16}),
        "wire_dtype is torch.float16 on {first}, torch.bfloat16 on rank {last}",
    ),
    ((allreduce_hook, {}), (fp16_compress_hook, {}), "allreduce_hook on {first}, fp16_compress_hook on"),
    (
        (fp16_compress_wrapper(foreign_hook), None),
        (bf16_compress_wrapper(foreign_hook), None),
        "fp16_compress_wrapper(foreign_hook) on {first}, bf16_compress_wrapper(foreign_hook) on rank {last}",
    ),
]


def _different(rank, world_size):
    """A refusal is raised again, for a state until it is closed, for a group as long as it exists."""
    bucket = make_bucket()
    messages = []
    for case in CASES:
        group = dist.new_group()
        hook, options = case[rank == world_size - 1]
        state = group if options is None else CompressState(group, **options)
        for _ in range(2):
            values = torch.full((1000,), 1.0 + rank)
            bucket.set_buffer(values)
            with pytest.raises(RuntimeError) as caught:
                hook(state, bucket).wait()
            assert torch.equal(values, torch.full((1000,), 1.0 + rank)), "nothing was averaged"
            messages.append(str(caught.value))
        hook, options = case[0]
        if options is None:
            state = dist.new_group()
        else:
            state.close()
            state = CompressState(group, **options)
        bucket.set_buffer(torch.full((1000,), world_size * (1.0 + rank)))  # their shares are exact
        result = hook(state, bucket).wait()
        assert torch.equal(result, torch.full((1000,), world_size * (1 + world_size) / 2)), (
            "the same for all ranks"
        )
    bucket.set_buffer(torch.ones(1000, dtype=WIDE_16[rank == 0]))
    with pytest.raises(RuntimeError, match=r"bucket is torch\.bfloat16 on rank 0, torch\.float16 on rank"):
        allreduce_hook(None, bucket).wait()
    return messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_hooks_raise_on_every_rank_until_they_are_made_anew(world_size):
    first, last = "rank 0" if world_size == 2 else "ranks 0, 1", world_size - 1
    for messages in run_ranks(_different, world_size, world_size, timeout=60):
        for twice, (_, _, expected) in zip(
            zip(messages[::2], messages[1::2], strict=True), CASES, strict=True
        ):
            for message in twice:
                assert "AgreementError" in message
                assert expected.format(first=first, last=last) in message


def _wrapped(rank):
    """A refusal of a wrapped hook that has a state is gone when all ranks have closed it."""
    bucket, hook = make_bucket(), bf16_compress_wrapper(compress_hook)
    state = CompressState(saturate=rank == 1)
    for _ in range(2):
        bucket.set_buffer(torch.ones(100))
        with pytest.raises(RuntimeError, match="saturate is False on rank 0, True on rank 1"):
            hook(state, bucket).wait()
    state.saturate = False
    state.close()
    bucket.set_buffer(torch.full((100,), float(rank)))
    return hook(state, bucket).wait()[0].item()


def test_closing_the_state_of_a_wrapped_hook_ends_its_refusal():
    assert run_ranks(_wrapped, 2) == [0.5, 0.5]


def test_saturate_of_another_type_is_refused():
    with pytest.raises(TypeError, match="saturate must be True or False, got 'no'"):
        CompressState(saturate="no")


def _bound(rank):
    """A model over some ranks: the state takes its group, and a state with other ranks is refused."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=pairs[rank == 2])
    ddp.register_comm_hook(CompressState().bind(ddp), fp16_compress_hook)
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    with pytest.raises(ValueError, match=r"averages over ranks \[0, 1, 2\], but the model over ranks \["):
        CompressState(dist.group.WORLD).bind(ddp)
    with pytest.raises(TypeError, match="must be a DistributedDataParallel module, got Linear"):
        CompressState().bind(ddp.module)
    assert CompressState(pairs[rank == 2]).bind(ddp).process_group is pairs[rank == 2]
    return ddp.module.weight.grad[0, 0].item()


def test_a_state_that_is_bound_averages_over_its_models_ranks():
    assert run_ranks(_bound, 3) == [0.5, 0.5, 2.0]
