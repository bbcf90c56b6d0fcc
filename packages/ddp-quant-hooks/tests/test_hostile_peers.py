"""A rank sends arbitrary bytes to its peers, with the right tags and lengths."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
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
from ddp_quant_hooks.feedback import checkpoint
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


class Guarded:
    """Tensors with guard values on both sides."""

    def __init__(self):
        self.all = []

    def __call__(self, values):
        memory = torch.full((values.numel() + 128,), GUARD)
        self.all.append(memory)
        inside = memory[64:-64].view(values.shape)
        return inside.copy_(values)

    def assert_untouched(self):
        for memory in self.all:
            assert (memory[:64] == GUARD).all()
            assert (memory[-64:] == GUARD).all()


def _all_calls(rank, options, generator, *, hooks):
    """Use everything that receives messages, with a rank that sends garbage."""
    guarded, size = Guarded(), dist.get_world_size()
    state = QuantizedAllreduceState(**{"min_bytes": 0, **options})
    keyed = state.error_feedback != "none"
    for length in (1, 31, 500, 4099):
        values = torch.randn(length, generator=generator)
        own = guarded(values)
        all_reduce(own, dist.ReduceOp.AVG, state, key=f"a{length}" if keyed else None)
        whole, part = torch.randn(size, length, generator=generator), guarded(torch.zeros(length))
        given_values = guarded(whole)
        reduce_scatter_tensor(
            part, given_values, dist.ReduceOp.AVG, state, key=f"b{length}" if keyed else None
        )
        assert torch.equal(given_values, whole), "what is sent is only read"
    guarded.assert_untouched()
    for residual in flat_residuals(state.state_dict()).values() if keyed else ():
        assert residual.isfinite().all()
    state.close()
    if not hooks:
        return
    for hook in (quantized_allreduce_hook, quantization_pertensor_hook):
        net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))
        inputs = torch.randn(4, 40, generator=generator)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
        state = QuantizedAllreduceState(**{"min_bytes": 0, **options})
        ddp.register_comm_hook(None if hook is quantization_pertensor_hook else state, hook)
        for _ in range(2):
            ddp(inputs).square().mean().backward()
        if keyed and hook is quantized_allreduce_hook:
            saved = state.state_dict(ddp)
            assert all(residual.isfinite().all() for residual in flat_residuals(saved).values())
        state.close()


def _peers(rank, seed):
    generator = torch.Generator().manual_seed(seed + rank)
    if rank == HOSTILE:
        _send_garbage(generator)
    for number, options in enumerate(OPTIONS):
        _all_calls(rank, options, generator, hooks=number % 2 == seed % 2)
    return "went on"


few = settings(
    deadline=None, derandomize=True, database=None, max_examples=1, phases=[Phase.explicit, Phase.generate]
)  # every example is a launch: shrinking takes too long


@pytest.mark.parametrize("world_size", [2, 3])
@few
@given(seed=st.integers(0, 2**40))
def test_garbage_for_messages_writes_only_what_a_message_would(world_size, seed):
    assert run_ranks(_peers, world_size, seed, timeout=120) == ["went on"] * world_size


class EndsTheProcess:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


def _pickled(*_):
    return torch.frombuffer(bytearray(pickle.dumps(EndsTheProcess())), dtype=torch.uint8)


def _residuals_of_peers(rank, seed):
    generator = torch.Generator().manual_seed(seed)
    state = QuantizedAllreduceState(min_bytes=0, bits=4)
    all_reduce(torch.arange(300.0), dist.ReduceOp.AVG, state, key="a")
    written, tell = checkpoint._written, checkpoint.all_gather_plain
    payloads = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in (1, 99, 5000)]
    # The last one ends torch's own reader in the middle of a number.
    short = torch.tensor([0x80, 2, 0x47, 1], dtype=torch.uint8)
    for payload in [*payloads, _pickled(), short]:
        gathered = state.gather_state_dict(dst=HOSTILE)
        if rank == HOSTILE:
            checkpoint._written = lambda part, payload=payload: payload
            assert state.gather_state_dict() is None
            with pytest.raises(TensorMismatchError):
                state.scatter_state_dict(gathered, src=HOSTILE)
            checkpoint._written = written
        else:
            for call in (state.gather_state_dict, lambda: state.scatter_state_dict(None, src=HOSTILE)):
                with pytest.raises(ValueError, match=f"rank {HOSTILE} sent data that are not saved residu"):
                    call()
    for announced in (0, -1, "x", None, [3], 0.5, True):
        if rank == HOSTILE:
            checkpoint.all_gather_plain = lambda group, _, sent=announced: tell(group, sent)
            checkpoint._send = lambda *_: None
            assert state.gather_state_dict() is None
        else:
            with pytest.raises(ValueError, match="announced"):
                state.gather_state_dict()


@few
@given(seed=st.integers(0, 2**40))
def test_what_a_peer_sends_as_residuals_is_never_unpickled(seed):
    run_ranks(_residuals_of_peers, 2, seed)
