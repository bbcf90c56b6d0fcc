"""Ranks whose hooks get different buckets, or that are late: an error everywhere before anything is sent."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.comm_hooks import require_same_bucket, same_buckets
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import default_store


def _model(layers=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(90, 90) for _ in range(layers)))


def _hook_of(title, **options):
    def hook(_, bucket):
        future: torch.futures.Future = torch.futures.Future()
        try:
            require_same_bucket(None, title, options, bucket)
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


def _wrap(hook, **options):
    ddp = DistributedDataParallel(_model(), **options)
    ddp.register_comm_hook(None, hook)
    return ddp


def _differ(rank):
    """Whatever differs is named: options, hooks, buckets; even if other models have used them before."""
    for title, bits in (("a", 8), ("b", 8), ("a", 4)):
        _step(_wrap(_hook_of(title, bits=bits)))
    messages = []
    for hook in (
        _hook_of("ab"[rank == 1], bits=8),
        _hook_of("a", bits=4 if rank == 1 else 8),
    ):
        with pytest.raises(RuntimeError) as caught:
            _step(_wrap(hook))
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


def _swapped(rank):
    """All ranks have used two hooks in turn around one network; now some ranks use one and some the other."""
    net = _model(1)

    def step(title):
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, _hook_of(title))
        _step(ddp)

    step("a")
    step("b")
    with pytest.raises(RuntimeError) as caught:
        step("ab"[rank])
    return str(caught.value)


def test_hooks_that_were_used_one_after_another_are_not_taken_for_each_other():
    limit = patience(3.0)
    asked, _ = run_ranks(_swapped, 2, group_timeout=limit)
    assert f"ranks [0] came within {limit:g} s, ranks [1] did not" in asked


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


def _hook_inside_of_a_hook(state, bucket):
    require_same_bucket(None, "outer", {}, bucket)
    return _hook_of("inner")(state, bucket)


def _known(rank):
    """A known bucket is not compared again: one rank alone returns."""
    parameter = torch.nn.Parameter(torch.ones(3))
    require_same_bucket(None, "hook", {"bits": 8}, _Bucket(parameter))
    second = torch.nn.Parameter(torch.ones(3))
    require_same_bucket(None, "hook", {"bits": 8}, _Bucket(second, index=1))
    if rank == 0:
        require_same_bucket(None, "hook", {"bits": 8}, _Bucket(parameter))
    dist.barrier()
    other = _Bucket(torch.nn.Parameter(torch.ones(3 + rank)))
    with pytest.raises(RuntimeError, match="values in the bucket is 3 on rank 0, 4 on rank 1"):
        require_same_bucket(None, "hook", {"bits": 8}, other)
    # The rest of that pass is refused; the next one, which begins again at index 0, is not.
    with pytest.raises(RuntimeError, match="values in the bucket is 3 on rank 0, 4 on rank 1"):
        require_same_bucket(None, "hook", {"bits": 8}, _Bucket(parameter, index=1))
    require_same_bucket(None, "hook", {"bits": 8}, _Bucket(parameter))
    if rank == 0:  # other known buckets of it pass, too; the failure is forgotten
        require_same_bucket(None, "hook", {"bits": 8}, _Bucket(second, index=1))
    # Two hooks in turns, outside of backward passes, are compared once each.
    require_same_bucket(None, "one", {}, _Bucket(parameter))
    require_same_bucket(None, "two", {}, _Bucket(parameter))
    if rank == 0:
        require_same_bucket(None, "one", {}, _Bucket(parameter))
    dist.barrier()
    # So are hooks inside hooks, in backward passes.
    asked = []
    same_buckets.require_same_terms = lambda group, title, terms: asked.append(title)
    ddp = _wrap(_hook_inside_of_a_hook)
    for _ in range(4):
        _step(ddp)
    first_and_rebuilt = asked.count("outer")
    assert first_and_rebuilt <= 2 * 5
    assert asked == ["outer", "inner"] * first_and_rebuilt


def test_a_bucket_is_compared_once():
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
