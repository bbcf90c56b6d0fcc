"""Shared by the tests of what all callers promise: DDP's buckets, plain tensors and FSDP2, step by step."""

import copy
import functools
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import batch, gradients, needs_reset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    LowRankState,
    QuantizedAllreduceState,
    all_reduce,
    kernels,
    low_rank_hook,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils.testing import call_in_backward


class Between(torch.nn.Module):
    """A layer whose backward pass raises if it is told to."""

    fails = False

    def forward(self, x):
        return call_in_backward(x, lambda: self.fails and 1 / 0)


class Caller:
    """Averages the values of numbered steps, always the same for the same number.

    Args:
        **options: Of the state, which quantizes everything unless told otherwise.
    """

    shards = False
    """Whether every rank gets a part of the mean."""
    make_state = QuantizedAllreduceState
    hook = staticmethod(quantized_allreduce_hook)

    def __init__(self, **options):
        torch.manual_seed(0)
        self.between = Between()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(37, 37), torch.nn.Linear(37, 37), self.between, torch.nn.Linear(37, 37)
        )
        self.alone = copy.deepcopy(self.net)
        self.state = self.make_state(**{"min_bytes": 0, **options})
        self.start()

    def start(self):
        """Make what averages; also after a pass that failed."""

    def warm_up(self):
        """Do what must be done before residuals are loaded."""

    def values(self, number):
        """Return this rank's own values of a step."""
        alone = copy.deepcopy(self.alone)
        alone(batch(number)).square().mean().backward()
        return torch.cat([gradient.flatten() for gradient in gradients(alone)])

    def mean(self, number, *, poison=False):
        """Return what this rank has of a step's mean; ``poison``: with a NaN on rank 1."""
        x = batch(number)
        if poison and dist.get_rank() == 1:
            x[0, 0] = torch.nan
        self.net.zero_grad()
        self.model(x).square().mean().backward()
        return torch.cat([gradient.flatten() for gradient in gradients(self.net)])

    def fail(self, number):
        """Make a step that raises a ``ZeroDivisionError`` of the user's, on all ranks."""
        self.between.fails = True
        try:
            self.mean(number)
        finally:
            self.between.fails = False


class Buckets(Caller):
    """``DistributedDataParallel`` with several buckets. After an error it needs a new one around the net."""

    def start(self):
        self.model = None
        gc.collect()
        self.net.zero_grad()
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.006)
        self.model.register_comm_hook(self.state.bind(self.model), self.hook)

    def warm_up(self):
        self.mean(0)  # DDP then makes its final buckets


class Tensors(Caller):
    """Calls of ``all_reduce`` that are started together."""

    def values(self, number):
        return torch.randn(3000, generator=torch.Generator().manual_seed(1000 * number + dist.get_rank()))

    def mean(self, number, *, poison=False):
        values = self.values(number)
        if poison and dist.get_rank() == 1:
            values[5] = torch.nan
        with self.state.step():
            mean = self._average(values)
            assert not self.between.fails or 1 / 0
        return mean

    def _split(self, values):
        return {"first": values[:1000], "second": values[1000:]}

    def _join(self, parts):
        return torch.cat(parts)

    def _average(self, values):
        parts = self._split(values)
        started = [
            all_reduce(part, dist.ReduceOp.AVG, self.state, async_op=True, key=key)
            for key, part in parts.items()
        ]
        for future in started:
            future.wait()
        return self._join([*parts.values()])


class Shards(Tensors):
    """A call of ``reduce_scatter_tensor``."""

    shards = True

    def _average(self, values):
        shard = torch.empty(len(values) // dist.get_world_size())
        reduce_scatter_tensor(shard, values, dist.ReduceOp.AVG, self.state, key="shards")
        return shard


def make_low_rank_state(process_group=None, **options):
    """Return a state whose factors are smaller than small layers, from its second step on."""
    return LowRankState(process_group, **{"min_bytes": 0, "rank": 2, "warm_up_steps": 1, **options})


class LowRankBuckets(Buckets):
    """The same in factors of low rank."""

    make_state = staticmethod(make_low_rank_state)
    hook = staticmethod(low_rank_hook)


class LowRankTensors(Tensors):
    """Calls with two matrices."""

    make_state = staticmethod(make_low_rank_state)

    def values(self, number):
        return super().values(number).view(60, 50)

    def mean(self, number, *, poison=False):
        return super().mean(number, poison=poison).flatten()

    def _split(self, values):
        return {"first": values[:, :30].contiguous(), "second": values[:, 30:].contiguous()}

    def _join(self, parts):
        return torch.cat(parts, 1)


@functools.cache
def nodes_of_one_rank():
    """Return a mesh; every one makes process groups."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("node", "shard"))


class FsdpNodes(Caller):
    """``fully_shard`` on nodes of one rank."""

    def start(self):
        if hasattr(self, "model"):
            self.net.zero_grad()
            self.net.reset_iter_state()
            self.net.zero_grad()
            return
        self._shard(nodes_of_one_rank()["shard"])
        quantize_all_reduce(self.net, self.state)

    def _shard(self, mesh):
        for layer in (*self.net[:2], self.net[3]):
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(self.net, mesh=mesh)


class FsdpShards(FsdpNodes):
    """``fully_shard`` over all ranks."""

    shards = True

    def start(self):
        if hasattr(self, "model"):
            super().start()
            return
        self._shard(nodes_of_one_rank()["node"])
        quantize_reduce_scatter(self.net, self.state)


CALLERS = {
    "DDP": Buckets,
    "tensors": Tensors,
    "shards": Shards,
    "FSDP between nodes": FsdpNodes,
    "FSDP across shards": FsdpShards,
    "low rank, DDP": LowRankBuckets,
    "low rank, tensors": LowRankTensors,
}
RARE = ("shards", "FSDP between nodes")
"""The others have all of their code: the hook, calls on tensors, FSDP2; averages and shards."""


def _marks(name):
    yield from [needs_reset] if "FSDP" in name else []
    yield from [pytest.mark.exhaustive] if name in RARE else []


EACH = [pytest.param(name, marks=[*_marks(name)]) for name in CALLERS]
"""As parameters of a test."""
FEW_BITS = [param for param in EACH if "low rank" not in param.values[0]]


def spoiled_kernel(effect):
    """Call ``effect()`` before every message that this process encodes."""
    real = kernels.encode_shards

    def encode_shards(*arguments, **options):
        effect()
        real(*arguments, **options)

    return mock.patch.object(kernels, "encode_shards", encode_shards)
