"""Ranks whose hooks get different buckets, or that are late: an error everywhere before anything is sent."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils import AgreementError
from dist_utils.comm_hooks import require_same_bucket
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import default_store


def _model(layers=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(90, 90) for _ in range(layers)))


def _hook_of(title, **options):
    def hook(group, bucket):
        future: torch.futures.Future = torch.futures.Future()
        try:
            require_same_bucket(group, title, options, bucket)
        except RuntimeError as error:
            text = str(error)

            def fail(_):
                raise RuntimeError(text)

            future.set_result(None)
            return future.then(fail)
        dist.all_reduce(bucket.buffer())
        future.set_result(bucket.buffer())
        return future

    return hook


def _step(ddp):
    ddp(torch.ones(2, 90)).sum().backward()


def _wrap(hook, group=None, **options):
    ddp = DistributedDataParallel(_model(), **options)
    ddp.register_comm_hook(group, hook)
    return ddp


def _differ(rank):
    """Whatever differs is named: options, hooks, buckets; even if other models have used them before."""
    messages = []
    for hook in (
        _hook_of("ab"[rank == 1], bits=8),
        _hook_of("a", bits=4 if rank == 1 else 8),
    ):
        group = dist.new_group()
        for title, bits in (("a", 8), ("b", 8), ("a", 4)):
            _step(_wrap(_hook_of(title, bits=bits), group))
        with pytest.raises(RuntimeError) as caught:
            _step(_wrap(hook, group))
        messages.append(str(caught.value))
    caps = _wrap(
        _hook_of("a", bits=8), bucket_cap_mb=0.07 if rank == 1 else 0.03, find_unused_parameters=True
    )
    with pytest.raises(RuntimeError) as caught:
        _step(caps)
    return [*messages, str(caught.value)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_differs_between_ranks_is_named_on_every_rank(world_size):
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    for hook, option, bucket in run_ranks(_differ, world_size):
        assert f"a on {others}, b on rank 1" in hook
        assert f"bits is 8 on {others}, 4 on rank 1" in option
        assert "values in the bucket is " in bucket


def _late(rank, limit):
    """A rank that comes after the others have given up must not be matched with the rest of their pass."""
    ddp = _wrap(_hook_of("hook"), bucket_cap_mb=0.03, find_unused_parameters=True)
    if rank == 1:
        default_store().wait(["given up"], timedelta(seconds=10 * limit))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"came within {limit:g} s"):
        _step(ddp)
    default_store().set("given up", "")
    return time.monotonic() - begin


def test_a_pass_waits_once_and_a_late_rank_meets_no_other_bucket():
    limit = patience(3.0)
    waited = run_ranks(_late, 2, limit, group_timeout=limit)
    assert max(waited) < 4 * limit, "not once for each of the eight buckets"


class _Bucket:
    """A bucket of one parameter."""

    def __init__(self, parameter, index=0):
        self._parameter, self._index = parameter, index

    def index(self):
        return self._index

    def buffer(self):
        return self._parameter.detach()

    def parameters(self):
        return [self._parameter]


def _known(rank):
    """A known bucket is not compared again: one rank alone returns. A refusal is raised again."""
    parameter = torch.nn.Parameter(torch.ones(3))
    second = torch.nn.Parameter(torch.ones(3))
    for title in ("one", "two"):
        require_same_bucket(None, title, {"bits": 8}, _Bucket(parameter))
        require_same_bucket(None, title, {"bits": 8}, _Bucket(second, index=1))
    if rank == 0:
        for title in ("two", "one", "two"):
            require_same_bucket(None, title, {"bits": 8}, _Bucket(parameter))
    dist.barrier()
    other = _Bucket(torch.nn.Parameter(torch.ones(3 + rank)))
    differ = "values in the bucket is 3 on rank 0, 4 on rank 1"
    with pytest.raises(AgreementError, match=differ):
        require_same_bucket(None, "one", {"bits": 8}, other)
    if rank == 0:  # without another comparison, for any bucket of the group
        for _ in range(2):
            with pytest.raises(AgreementError, match=differ):
                require_same_bucket(None, "one", {"bits": 8}, _Bucket(parameter))
    dist.barrier()
    require_same_bucket(dist.new_group(), "one", {"bits": 8}, _Bucket(parameter))


def test_a_bucket_is_compared_once_and_a_refusal_is_raised_again():
    run_ranks(_known, 2)


def _joined(rank):
    """A rank without data takes part in the comparisons while buckets are rebuilt; then all go on."""
    net = _model(3)
    for steps in (1 + 2 * rank, 2):
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
        ddp.register_comm_hook(None, _hook_of("hook"))
        with ddp.join():
            for _ in range(steps):
                _step(ddp)
    return torch.stack([parameter.grad.sum() for parameter in net.parameters()]).isfinite().all().item()


def test_a_joined_rank_takes_part_in_the_comparisons():
    assert run_ranks(_joined, 2, group_timeout=patience(5.0)) == [True, True]
