"""A peer that dies, a kernel that fails: an error on every rank, and no wrong step."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from quant_buckets import flat_residuals, make_state, run_hook
from torch.nn.parallel import DistributedDataParallel

import ddp_quant_hooks.averaging
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    kernels,
    quantization_perchannel_hook,
    quantized_allreduce_hook,
)
from dist_utils import torch_compat
from dist_utils.testing import call_in_backward, grad_bucket, patience, run_ranks, same_bits

GROUP_TIMEOUT = 40.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))
        self.dies = False

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = call_in_backward(x, lambda: self.dies and os._exit(3))
        return x


def _model(hook):
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    if hook == "perchannel":
        state = None
        model.register_comm_hook(None, quantization_perchannel_hook)
    else:
        state = make_state(hook)
        model.register_comm_hook(state, quantized_allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    return net, model, state, step


def _peer_dies(rank, hook):
    net, _, _, step = _model(hook)
    step()
    step()
    before = [parameter.clone() for parameter in net.parameters()]
    net.dies = rank == 1
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        step()
    unchanged = all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    return unchanged, time.monotonic() - start


@pytest.mark.parametrize("hook", ["int8", "perchannel"])
def test_survivors_raise_within_the_timeout_and_keep_their_parameters(hook):
    first, died, last = run_ranks(_peer_dies, 3, hook, may_die={1}, group_timeout=GROUP_TIMEOUT)
    assert died is None
    for unchanged, seconds in (first, last):
        assert unchanged
        # Gloo may miss a connection that closes just as a wait on it starts, with plain DDP, too.
        assert seconds < GROUP_TIMEOUT + 5


def _kernel_fails(rank):
    """A kernel fails on one rank only: there the error says so, and the other ranks get an error, too."""
    net, trained, state, step = _model("feedback both")
    step()
    step()
    before = [parameter.clone() for parameter in net.parameters()]
    residuals = state.state_dict(trained)
    real = kernels.encode_shards

    def broken(*arguments, **options):
        if rank == 1:
            time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
            raise MemoryError("no room for a kernel")
        if rank == 0:
            time.sleep(1.5)  # it starts to send when rank 1 is gone, and rank 2 waits for this rank first
        real(*arguments, **options)

    kernels.encode_shards = broken
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError) as caught:
            step()
    finally:
        kernels.encode_shards = real
    if torch_compat.GROUPS_END_WITHOUT_GIL:
        assert time.monotonic() - began < GROUP_TIMEOUT / 2, "a peer tells, no timeout"
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    after = state.state_dict(trained)
    assert same_bits(flat_residuals(residuals), flat_residuals(after)), "the step was not made"
    if rank == 1 and not torch_compat.GROUPS_END_WITHOUT_GIL:
        time.sleep(GROUP_TIMEOUT - 1)  # there, the peers notice only at their timeout
    state.close()
    dist.barrier()
    # A fresh start, on a model that was not interrupted in a backward pass.
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    model.register_comm_hook(state, quantized_allreduce_hook)
    model(torch.ones(1, 50)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(50, 50)), "a constant is exact"
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_kernel_error_reaches_every_rank_and_leaves_parameters_and_residuals(world_size):
    messages = run_ranks(_kernel_fails, world_size, group_timeout=GROUP_TIMEOUT, timeout=60)
    assert "no room for a kernel" in messages[1]


def _counts_differ(rank):
    """The last kernel fails on one rank only, whose count is lower; after a fresh start all sample alike."""
    bucket, state = grad_bucket([torch.ones(3)]), make_state("int8", sample_every=2)
    real, failing = kernels.decode_shards, rank == 1

    def broken(*arguments, **options):
        if failing:
            raise MemoryError("no room for a kernel")
        real(*arguments, **options)

    kernels.decode_shards = broken
    try:
        run_hook(state, bucket, torch.ones(1000))
    except RuntimeError:
        assert failing
    failing = False
    state.close()
    dist.barrier()
    for _ in range(3):
        assert torch.equal(run_hook(state, bucket, torch.full((1000,), 2.0)), torch.full((1000,), 2.0))
    return state.statistics.quantized_buckets


def test_ranks_that_have_counted_differently_sample_the_same_buckets():
    assert run_ranks(_counts_differ, 3, group_timeout=GROUP_TIMEOUT, timeout=60) == [4, 3, 4]


def _failure_beside_the_exchange(rank):
    """The part of a bucket that is averaged exactly fails: the step is not made, and no residual changes."""
    gradients = [torch.randn(20, 30, generator=torch.Generator().manual_seed(rank)), torch.ones(20)]
    bucket = grad_bucket(gradients)
    model = torch.nn.Module()
    model.parameters_of_bucket = torch.nn.ParameterList(bucket.parameters())
    state = make_state("feedback both", exact_1d=True)
    for _ in range(3):
        quantized_allreduce_hook(state, bucket).wait()
    before = flat_residuals(state.state_dict(model))
    assert max(lost.abs().max() for lost in before.values()) > 0

    def broken(gradients, world_size):
        raise MemoryError("no room for an all-reduce")

    ddp_quant_hooks.averaging._set_apart = broken
    with pytest.raises(RuntimeError, match="no room for an all-reduce"):
        quantized_allreduce_hook(state, bucket).wait()
    assert same_bits(before, flat_residuals(state.state_dict(model)))


def test_a_failure_beside_the_exchange_leaves_residuals():
    run_ranks(_failure_beside_the_exchange, 2, timeout=60)


def _plain_fails(rank):
    """Buckets too small to be quantized, until a peer dies."""
    state, bucket = QuantizedAllreduceState(), grad_bucket([torch.ones(3)])
    quantized_allreduce_hook(state, bucket).wait()
    all_reduce(torch.ones(3), dist.ReduceOp.SUM, state)
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError):
        quantized_allreduce_hook(state, bucket).wait()
    with pytest.raises(RuntimeError):
        all_reduce(torch.ones(3), dist.ReduceOp.SUM, state)
    return state.statistics.plain_buckets


def test_a_bucket_that_is_not_averaged_is_not_counted():
    assert run_ranks(_plain_fails, 2, may_die={1}, group_timeout=GROUP_TIMEOUT) == [2, None]


def _peer_of_two_dies(rank):
    net, _, _, step = _model("int8")
    step()
    net.dies = rank == 1
    with pytest.raises(RuntimeError):
        step()


def test_one_of_two_dies():
    # The buckets of the second step are new: the other rank waits in the store, which knows of no death.
    run_ranks(_peer_of_two_dies, 2, may_die={1}, group_timeout=patience(2.0))
