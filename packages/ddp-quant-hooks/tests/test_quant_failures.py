"""A peer that dies, a kernel that fails: an error on every rank, and no wrong step."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import exchanges, quantization_perchannel_hook, quantized_allreduce_hook
from dist_utils import torch_compat
from dist_utils.testing import run_ranks

GROUP_TIMEOUT = 12.0


class DieInBackward(torch.autograd.Function):
    """The identity; its backward ends the process, after later layers' buckets are on their way."""

    @staticmethod
    def forward(ctx, x, dies):
        ctx.dies = dies
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.dies:
            os._exit(3)
        return grad, None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))
        self.dies = False

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = DieInBackward.apply(x, self.dies)
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

    return net, state, step


def _peer_dies(rank, hook):
    net, _, step = _model(hook)
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
        assert seconds < GROUP_TIMEOUT + 5


def _kernel_fails(rank):
    """A kernel fails on one rank alone: there the error says so, elsewhere there is one too."""
    net, state, step = _model("feedback both")
    step()
    step()
    before = [parameter.clone() for parameter in net.parameters()]
    residuals = state.state_dict()
    real = exchanges.kernels.encode

    def broken(*arguments, **options):
        if rank == 1:
            raise MemoryError("no room for a kernel")
        real(*arguments, **options)

    exchanges.kernels.encode = broken
    try:
        with pytest.raises(RuntimeError) as caught:
            step()
    finally:
        exchanges.kernels.encode = real
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    after = state.state_dict()
    assert len(after["buckets"]) > 1
    for old, new in zip(residuals["buckets"], after["buckets"], strict=True):
        assert torch.equal(old["own"], new["own"]), "the step was not made"
    if rank == 1 and not torch_compat.GROUPS_END_WITHOUT_GIL:
        time.sleep(GROUP_TIMEOUT - 1)  # there the peers learn of it at their timeout
    state.close()
    dist.barrier()
    # A fresh start, on a model that has not lost its place in a backward pass.
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    model.register_comm_hook(state, quantized_allreduce_hook)
    model(torch.ones(1, 50)).sum().backward()
    return str(caught.value)


def test_a_kernel_error_reaches_every_rank_and_leaves_parameters_and_residuals():
    messages = run_ranks(_kernel_fails, 3, group_timeout=GROUP_TIMEOUT, timeout=60)
    assert "no room for a kernel" in messages[1]
