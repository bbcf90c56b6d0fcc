"""A peer that dies or stops while gradients are sent: an error on every survivor, and no wrong step."""

import os
import time

import pytest
import torch
from hook_buckets import HOOKS, state_of
from torch.nn.parallel import DistributedDataParallel

from dist_utils.testing import call_in_backward, patience, run_ranks, same_bits, stop_process


def _die():
    time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
    os._exit(3)


class _Net(torch.nn.Module):
    """Calls something in the middle of the backward pass, when later layers' buckets were started."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))
        self.call = int

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = call_in_backward(x, self.call)
        return x


def _peer_fails(rank, name, how):
    net = _Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    model.register_comm_hook(state_of(name), HOOKS[name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    step()
    step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == 1:
        net.call = how
    with pytest.raises(RuntimeError):
        step()
    return [
        name
        for (name, new), old in zip(net.named_parameters(), before, strict=True)
        if not same_bits(new, old)
    ]


@pytest.mark.parametrize(
    ("name", "how"), [("bf16_compress_hook", stop_process), ("bf16_compress_hook/fp32", _die)]
)
def test_survivors_raise_within_the_timeout_and_keep_their_parameters(name, how):
    ranks = run_ranks(_peer_fails, 3, name, how, may_die={1}, group_timeout=patience(2.0))
    assert ranks == [[], None, []]
