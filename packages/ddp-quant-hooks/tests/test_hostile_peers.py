"""A rank sends arbitrary bytes to its peers, with the right tags and lengths."""

import os

import pytest
import torch
import torch.distributed as dist
from quant_buckets import flat_residuals
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    kernels,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from dist_utils import TensorMismatchError
from dist_utils.testing import run_ranks

GUARD = 1.75
HOSTILE = 1
"""The rank that sends garbage."""
OPTIONS = [
    {"bits": 8},
    {"bits": 4},
    {"bits": 8, "gather": "int8", "error_feedback": "both", "exact_1d": True},
    {"bits": 8, "gather": "fp16", "error_feedback": "shard", "block_size": 64},
]


def _send_garbage(generator):
    """Make this process send random bytes instead of messages from now on."""

    def spoiled(kernel, place):
        def call(*arguments, **named):
            kernel(*arguments, **named)
            written = arguments[place]
            for message in [written] if isinstance(written, torch.Tensor) else written:
                message.random_(0, 256, generator=generator)

        return call

    for name, place in (("encode_shards", 1), ("reduce", 3), ("affine_encode", 1)):
        setattr(kernels, name, spoiled(getattr(kernels, name), place))


def _guarded(values, memories):
    """Return a copy with guard values on both sides; add all of its memory to ``memories``."""
    memories.append(torch.full((values.numel() + 128,), GUARD))
    return memories[-1][64:-64].view(values.shape).copy_(values)


def _finite_residuals(state, model=None):
    residuals = flat_residuals(state.state_dict(model)) if state.options.error_feedback != "none" else {}
    assert [name for name, lost in residuals.items() if not lost.isfinite().all()] == []


def _tensors(options, generator):
    state, size, memories = QuantizedAllreduceState(min_bytes=0, **options), dist.get_world_size(), []
    for length in (1, 31, 500, 4099):
        whole = torch.randn(size, length, generator=generator)
        own, part, source = (_guarded(values, memories) for values in (whole[0], torch.zeros(length), whole))
        all_reduce(own, dist.ReduceOp.AVG, state, key=f"a{length}")
        reduce_scatter_tensor(part, source, dist.ReduceOp.AVG, state, key=f"b{length}")
        assert torch.equal(source, whole), "what is sent is only read"
    for memory in memories:
        assert memory[:64].unique().tolist() == memory[-64:].unique().tolist() == [GUARD]
    _finite_residuals(state)
    state.close()


def _hooks(options, generator):
    for hook in (quantized_allreduce_hook, quantization_pertensor_hook):
        net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))
        inputs = torch.randn(4, 40, generator=generator)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
        state = QuantizedAllreduceState(min_bytes=0, **options)
        ddp.register_comm_hook(None if hook is quantization_pertensor_hook else state, hook)
        for _ in range(2):
            ddp(inputs).square().mean().backward()
        _finite_residuals(state, ddp)
        state.close()


def _messages(rank):
    """Use everything that receives messages, with a rank that sends garbage."""
    generator = torch.Generator().manual_seed(rank)
    if rank == HOSTILE:
        _send_garbage(generator)
    for options in OPTIONS:
        _tensors(options, generator)
        _hooks(options, generator)
    return "went on"


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_garbage_for_messages_writes_only_what_a_message_would(world_size):
    assert run_ranks(_messages, world_size, timeout=120) == ["went on"] * world_size


class EndsTheProcess:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


class HostileState(QuantizedAllreduceState):
    """Has other things than residuals."""

    def state_dict(self, model=None):
        return EndsTheProcess()


def _residuals(rank):
    options, refused = {"min_bytes": 0, "bits": 4}, f"rank {HOSTILE} sent data that are not saved residuals"
    state = QuantizedAllreduceState(**options)
    gathered = state.gather_state_dict(dst=HOSTILE)
    if rank == HOSTILE:
        assert HostileState(**options).gather_state_dict() is None
        gathered["ranks"][0] = EndsTheProcess()
        with pytest.raises(TensorMismatchError, match=refused):
            state.scatter_state_dict(gathered, src=HOSTILE)
        return
    for call in (state.gather_state_dict, lambda: state.scatter_state_dict(None, src=HOSTILE)):
        with pytest.raises(ValueError, match=refused):
            call()


def test_what_a_peer_sends_as_residuals_is_never_unpickled():
    run_ranks(_residuals, 2)
