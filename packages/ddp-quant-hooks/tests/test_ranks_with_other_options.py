"""Ranks with different hooks or options: an error on every rank before anything is sent."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook, bf16_compress_hook
from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils import torch_compat
from dist_utils.testing import grad_bucket, patience, run_ranks

# What all ranks but the last have, what the last has, and what the message must say.
OPTIONS = [
    ({}, {"bits": 4, "error_feedback": "none"}, "bits is 8 on {others}, 4 on rank {last}"),
    ({}, {"block_size": 256}, "block_size is 128 on {others}, 256 on rank {last}"),
    ({}, {"gather": "fp16"}, "gather is 'int8' on {others}, 'fp16' on rank {last}"),
    ({}, {"error_feedback": "both"}, "error_feedback is 'none' on {others}, 'both' on rank {last}"),
    ({}, {"rotate": False}, "rotate is True on {others}, False on rank {last}"),
    ({}, {"exact_1d": True}, "exact_1d is False on {others}, True on rank {last}"),
    ({}, {"sample_every": 2}, "sample_every is 0 on {others}, 2 on rank {last}"),
    ({}, {"min_bytes": 1 << 30}, "min_bytes is 0 on {others}, 1073741824 on rank {last}"),
]


def _error(hook, state, bucket, values):
    """Return the text of the error in the hook's future; the values must be unchanged."""
    before = values.clone()
    bucket.set_buffer(values)
    with pytest.raises(RuntimeError) as caught:
        hook(state, bucket).wait()
    assert torch.equal(values, before), "nothing was averaged"
    return str(caught.value).partition("\n")[0]  # without the traceback


def _different_options(rank):
    """Every option in turn; then the same for all, on the same group."""
    last = dist.get_world_size() - 1
    bucket, values = grad_bucket([torch.ones(3)]), torch.arange(3000.0) + rank
    messages = []
    for usual, other, _ in OPTIONS:
        state = QuantizedAllreduceState(**{"min_bytes": 0, **(other if rank == last else usual)})
        messages.append(_error(quantized_allreduce_hook, state, bucket, values))
        assert messages[-1] == _error(quantized_allreduce_hook, state, bucket, values), "it is kept"
        state.close()
    bucket.set_buffer(torch.full((3000,), float(rank)))
    mean = quantized_allreduce_hook(QuantizedAllreduceState(min_bytes=0), bucket).wait()
    assert torch.equal(mean, torch.full((3000,), last / 2))
    return messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_different_option_raises_on_every_rank_and_is_named(world_size):
    last = world_size - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    for messages in run_ranks(_different_options, world_size, timeout=60):
        for message, (_, _, expected) in zip(messages, OPTIONS, strict=True):
            assert "AgreementError: QuantizedAllreduceState differs between ranks: " in message
            assert expected.format(others=others, last=last) in message


def _different_hooks(rank):
    """A different hook, bucket dtype or number of values, and flat versus hierarchical."""
    bucket, values = grad_bucket([torch.ones(3)]), torch.arange(3000.0) + rank
    mesh = init_device_mesh("cpu", (2, 2))
    seen = {}
    for name, left, right in [
        ("affine", (quantization_pertensor_hook, None), (quantization_perchannel_hook, None)),
        ("16 bits", (quantized_allreduce_hook, QuantizedAllreduceState), (bf16_compress_hook, None)),
        ("plain", (allreduce_hook, None), (quantization_pertensor_hook, None)),
    ]:
        hook, make = right if rank == 2 else left
        group = dist.new_group()  # a group without a state keeps a refusal as long as it exists
        seen[name] = _error(hook, make(group, min_bytes=0) if make else group, bucket, values)
    state = QuantizedAllreduceState(min_bytes=0) if rank else HierarchicalAllreduceState(mesh=mesh)
    seen["hierarchy"] = _error(quantized_allreduce_hook, state, bucket, values)
    one_node = dist.new_group(range(4))
    groups = {"mesh": mesh} if rank < 2 else {"intra_group": one_node}
    state = HierarchicalAllreduceState(**groups)
    seen["nodes"] = _error(quantized_allreduce_hook, state, bucket, values)
    lengths = torch.ones(3000 + 100 * (rank == 3))
    seen["values"] = _error(quantized_allreduce_hook, QuantizedAllreduceState(min_bytes=0), bucket, lengths)
    dtype = torch.float16 if rank == 3 else torch.float32
    state = QuantizedAllreduceState(min_bytes=0)
    seen["dtype"] = _error(quantized_allreduce_hook, state, bucket, torch.ones(3000, dtype=dtype))
    return seen


def test_different_hooks_raise_on_every_rank():
    for seen in run_ranks(_different_hooks, 4, timeout=60):
        assert "quantization_pertensor_hook on ranks 0, 1, 3" in seen["affine"]
        assert "quantization_perchannel_hook on rank 2" in seen["affine"]
        assert "QuantizedAllreduceState on ranks 0, 1, 3, bf16_compress_hook on rank 2" in seen["16 bits"]
        assert "allreduce_hook on ranks 0, 1, 3, quantization_pertensor_hook on rank 2" in seen["plain"]
        assert "HierarchicalAllreduceState on rank 0, QuantizedAllreduceState on ranks" in seen["hierarchy"]
        assert "rank 2 of the process group has intra_group [0, 1, 2, 3], and rank 0 [0, 1]" in seen["nodes"]
        assert "values in the bucket is 3000 on ranks 0, 1, 2, 3100 on rank 3" in seen["values"]
        assert "bucket is torch.float32 on ranks 0, 1, 2, torch.float16 on rank 3" in seen["dtype"]


def _ddp_goes_on(rank):
    """In DDP: no parameter changes, and after close() on every rank the same model trains on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    options = [{"min_bytes": 0, "bits": 4 if rank else 8, "error_feedback": "none"}, {"min_bytes": 0}]
    states = [QuantizedAllreduceState(**each) for each in options]

    def hook(which: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return quantized_allreduce_hook(which[0], bucket)

    model.register_comm_hook(states, hook)
    with pytest.raises(RuntimeError, match="bits is 8 on rank 0, 4 on rank 1"):
        model(torch.ones(1, 50)).sum().backward()
    states.pop(0).close()
    model.zero_grad()
    for _ in range(2):
        model(torch.full((1, 50), rank + 1.0)).sum().backward()
    return model.module.weight.grad


def test_a_model_trains_on_after_the_error():
    for gradient in run_ranks(_ddp_goes_on, 2):
        assert torch.equal(gradient, torch.full((50, 50), 3.0))


def _one_rank_without(rank, state):
    """The hook on rank 0 only: its error names the missing ranks; the collective of the others ends."""
    model = DistributedDataParallel(torch.nn.Linear(200, 200))
    if rank == 0 and state:
        model.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)
    elif rank == 0:
        model.register_comm_hook(None, bf16_compress_hook)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 200)).sum().backward()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("state", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_hook_on_one_rank_only_is_an_error_that_says_so(state):
    limit = patience(3.0)
    (message, first), (_, second) = run_ranks(_one_rank_without, 2, state, group_timeout=limit)
    assert f"ranks [0] came within {limit:g} s, ranks [1] did not" in message
    assert max(first, second) < 10 * limit


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("bits", 8.0, TypeError),
        ("bits", True, TypeError),
        ("bits", 6, ValueError),
        ("block_size", 128.0, TypeError),
        ("block_size", "128", TypeError),
        ("block_size", 100, ValueError),
        ("block_size", 8192, ValueError),
        ("gather", [], TypeError),
        ("gather", "int16", ValueError),
        ("error_feedback", ["both"], TypeError),
        ("error_feedback", "all", ValueError),
        ("min_bytes", float("nan"), TypeError),
        ("min_bytes", "1", TypeError),
        ("min_bytes", -1, ValueError),
        ("sample_every", 1.5, TypeError),
        ("sample_every", -2, ValueError),
        ("exact_1d", 1, TypeError),
    ],
)
def test_an_option_of_another_type_or_value_is_refused_when_the_state_is_made(option, value, error):
    with pytest.raises(error, match=option):
        QuantizedAllreduceState(**{option: value})


def test_options_do_not_change_after_ranks_have_compared_them():
    state = QuantizedAllreduceState(sample_every=3)
    assert state.sample_every == state.options.sample_every == 3
    for name in ("min_bytes", "exact_1d", "sample_every", "error_feedback"):
        with pytest.raises(AttributeError):
            setattr(state, name, 1)


def _without_a_backend(rank):
    """A group that was made without naming a backend has one for GPUs too, where torch has none."""
    store = torch_compat.default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    values = torch.full((1000,), float(rank))
    quantized_allreduce_hook(QuantizedAllreduceState(min_bytes=0), grad_bucket([values])).wait()
    dist.destroy_process_group()
    return True


def test_a_group_without_a_named_backend_averages():
    assert run_ranks(_without_a_backend, 2) == [True, True]
