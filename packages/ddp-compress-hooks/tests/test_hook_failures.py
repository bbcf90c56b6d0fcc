"""A peer that dies while gradients are sent: an error on every survivor, and no wrong step."""

import os
import time

import pytest
import torch
from hook_buckets import HOOKS, state_of
from torch.nn.parallel import DistributedDataParallel

from dist_utils.testing import call_in_backward, patience, run_ranks, stop_process

GROUP_TIMEOUT = 40.0


def _stop_or_die(how):
    """End the process, or halt it, after later layers' buckets were started."""
    if how == "stops":
        stop_process()
    elif how:
        os._exit(3)


def _peer_dies(rank, name, how):
    layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers
            self.dies = False

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if index == 1:
                    x = call_in_backward(x, lambda: _stop_or_die(self.dies))
            return x

    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    model.register_comm_hook(state_of(name), HOOKS[name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    step()
    step()
    before = [parameter.clone() for parameter in model.parameters()]
    net.dies = how if rank == 1 else False
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        step()
    seconds = time.monotonic() - start
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return unchanged, seconds


@pytest.mark.parametrize(
    "name",
    ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook/fp32", "fp16_compress_wrapper(foreign)"],
)
def test_survivors_raise_within_the_timeout_and_keep_their_parameters(name):
    first, died, last = run_ranks(_peer_dies, 3, name, "exits", may_die={1}, group_timeout=GROUP_TIMEOUT)
    assert died is None
    for unchanged, seconds in (first, last):
        assert unchanged
        # Gloo may miss a connection that closes just as a wait on it starts, with plain DDP, too.
        assert seconds < GROUP_TIMEOUT + 5


@pytest.mark.parametrize(
    "name", ["bf16_compress_hook", pytest.param("bf16_compress_hook/fp32", marks=pytest.mark.exhaustive)]
)
def test_a_peer_that_stops_raises_at_the_timeout_and_changes_no_parameter(name):
    """Like one that dies, but with open connections: only the group's timeout reveals it."""
    limit = patience(3.0)
    ranks = run_ranks(_peer_dies, 3, name, "stops", may_die={1}, group_timeout=limit)
    for unchanged, seconds in (ranks[0], ranks[2]):
        assert unchanged
        assert seconds < 5 * limit
