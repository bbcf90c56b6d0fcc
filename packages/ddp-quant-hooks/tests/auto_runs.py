"""Shared by the tests of AutoState: a model in training, and candidates that are slow."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import (
    AutoState,
    LowRankState,
    QuantizedAllreduceState,
    auto_hook,
    low_rank_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import call_in_backward

SECONDS = 0.04
"""The delay of slow candidates: many times the duration of a step."""


def slowed(hook, seconds):
    """Return a hook that takes ``seconds`` longer; they may be a function."""

    def slow_hook(state, bucket):
        time.sleep(seconds() if callable(seconds) else seconds)
        return hook(state, bucket)

    return slow_hook


def exact(seconds=0.0):
    """Return a candidate that averages in full precision."""
    return None, slowed(allreduce_hook, seconds)


def quantized(seconds=0.0, **options):
    """Return a candidate that averages in few bits, buckets of any size."""
    return QuantizedAllreduceState(**{"min_bytes": 0, **options}), slowed(quantized_allreduce_hook, seconds)


def low_rank(seconds=0.0, **options):
    """Return a candidate that averages in factors of one column, buckets of any size."""
    return LowRankState(**{"min_bytes": 0, "rank": 1, **options}), slowed(low_rank_hook, seconds)


class Net(torch.nn.Module):
    """Two buckets of different sizes, if they hold 5 KiB."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 96, bias=False)  # the last bucket
        self.second = torch.nn.Linear(96, 16, bias=False)  # the first one
        self.between = lambda: None

    def _call_between(self):
        self.between()

    def forward(self, x):
        return self.second(call_in_backward(torch.tanh(self.first(x)), self._call_between))


class Training:
    """A model in training with a hook."""

    def __init__(self, state, hook=auto_hook, *, late=0.0, bind=True, **options):
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(Net(), **{"bucket_cap_mb": 0.005, **options})
        self.state, self.late = state, late
        if isinstance(state, AutoState) and bind:
            state.bind(self.ddp)
        self.ddp.register_comm_hook(state, hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.steps = 0

    def step(self, *, accumulated=False):
        generator = torch.Generator().manual_seed(1000 * self.steps + dist.get_rank())
        self.steps += 1
        if not accumulated:
            self.optimizer.zero_grad()
        time.sleep(self.late)
        self.ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
        if self.ddp.require_backward_grad_sync:
            self.optimizer.step()

    def until_chosen(self, most=100):
        """Train until there is a choice; return it with the step in which it was made."""
        before = self.state.choice
        while self.state.choice is before and self.steps < most:
            self.step()
        return self.state.choice, self.steps

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()])
