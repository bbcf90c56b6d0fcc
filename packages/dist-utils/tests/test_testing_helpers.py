"""Helpers for tests: bitwise equality, a call in the middle of backward, buckets, and bytes on the wire."""

import dataclasses
import sys
import time
import warnings
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_utils.testing import (
    call_in_backward,
    grad_bucket,
    run_ranks,
    same_bits,
    same_on_all_ranks,
    tcp_bytes_sent,
)

NAN = float("nan")


@dataclasses.dataclass
class Parts:
    parts: object


def _quantized(scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by newer versions
        return torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.qint8)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([NAN, -0.0]), torch.tensor([NAN, -0.0])),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j).conj()),
        ({"a": [torch.ones(1), 2, "b"]}, {"a": [torch.ones(1), 2, "b"]}),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (Parts(np.arange(5000)), Parts(np.arange(5000))),
        (deque([torch.arange(5000)]), deque([torch.arange(5000)])),
        ({"b", "a", ("c", 1)}, {("c", 1), "a", "b"}),
        (SimpleNamespace(x=torch.ones(1)), SimpleNamespace(x=torch.ones(1))),
        (np.array([{"a": torch.ones(2)}]), np.array([{"a": torch.ones(2)}])),
        ([torch.optim.SGD], [torch.optim.SGD]),
    ],
)
def test_same_bits(left, right):
    assert same_bits(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (np.zeros(5000), np.eye(1, 5000, 2500)[0]),
        (Parts(torch.zeros(5000)), Parts(torch.eye(1, 5000))),
        (_quantized(1.0), _quantized(0.25)),
        (deque([torch.zeros(5000)]), deque([torch.arange(5000).eq(2500).float()])),
        (SimpleNamespace(x=torch.tensor(1.0)), SimpleNamespace(x=torch.tensor(1 + 2**-20))),
        (SimpleNamespace(x=1), SimpleNamespace(y=1)),
        ({"a"}, {"b"}),
        ([torch.optim.SGD], [torch.optim.Adam]),
    ],
)
def test_other_bits(left, right):
    assert not same_bits(left, right)
    assert not same_bits(right, left)


def _compare(rank):
    pair = dist.new_group([1, 2])
    with pytest.raises(TypeError, match="values is a generator, which a comparison would use up"):
        same_on_all_ranks(torch.nn.Linear(1, 1).parameters())
    sharded = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (3,)), [Shard(0)])
    with pytest.raises(TypeError, match=r"weight is a DTensor, .* give its to_local\(\)"):
        same_on_all_ranks({"weight": sharded})
    found = {
        "same": same_on_all_ranks({"weight": torch.tensor([NAN, 1.0]), "step": 3, "empty": torch.empty(0)}),
        "one bit": same_on_all_ranks([torch.tensor([0.0 if rank < 2 else -0.0])]),
        "another shape": same_on_all_ranks(torch.zeros(3 if rank else 4)),
        "another number": same_on_all_ranks({"step": rank}),
        "none at all": same_on_all_ranks([]),
    }
    if rank:
        found["in a group"] = same_on_all_ranks(torch.tensor(min(rank, 1)), pair)
    return found


def test_same_on_all_ranks():
    different = dict.fromkeys(["one bit", "another shape", "another number"], False)
    expected = {"same": True, "none at all": True, **different}
    assert run_ranks(_compare, 3) == [expected, *[expected | {"in a group": True}] * 2]


def test_call_in_backward():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = call_in_backward(x * 2, lambda: order.append("called"))
    assert order == []
    (y.sum() * 3).backward()
    assert order == ["called"]
    assert torch.equal(x.grad, torch.full((2,), 6.0))

    (gradient,) = torch.autograd.grad(call_in_backward(x, lambda: False).sum(), x)  # its result is not used
    assert torch.equal(gradient, torch.ones(2))

    with pytest.raises(ZeroDivisionError):
        call_in_backward(x, lambda: 1 / 0).sum().backward()


def _bucket(rank):
    return sorted(grad_bucket([torch.full((2, 3), 1.5 + rank), torch.tensor([-2.0])]).buffer().tolist())


def test_a_bucket_holds_the_gradients():
    assert run_ranks(_bucket, 2) == [[-2.0] + [1.5] * 6, [-2.0] + [2.5] * 6]


def _send(rank, elements):
    tensor = torch.zeros(elements)
    dist.all_reduce(tensor)
    dist.barrier()
    before = tcp_bytes_sent()
    dist.all_reduce(tensor)
    dist.barrier()
    sent = tcp_bytes_sent() - before
    time.sleep(0.3 * rank)  # a rank that has returned stays connected to the others
    return sent, tcp_bytes_sent() - before - sent


@pytest.mark.skipif(sys.platform != "linux", reason="counting sent bytes needs Linux")
def test_sent_bytes_are_those_of_a_ring_all_reduce():
    world_size, elements = 4, 1 << 18
    ring = 2 * (world_size - 1) / world_size * 4 * elements
    for sent, later in run_ranks(_send, world_size, elements):
        # Above the payload: Gloo's message headers and the barrier.
        assert ring <= sent < 1.02 * ring
        assert later == 0
