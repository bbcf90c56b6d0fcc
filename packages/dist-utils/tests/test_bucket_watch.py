"""A hook that gets no bucket from its model: one warning, and only if buckets were expected."""

import copy
import pickle
import warnings

import torch
import torch._dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dist_utils.comm_hooks import BucketWatch, completed_future
from dist_utils.testing import run_ranks


class _Net(torch.nn.Module):
    """Two layers; the first is checkpointed reentrantly on request."""

    def __init__(self, *, reentrant=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def _pass(ddp):
    """Run a backward pass; return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return [str(one.message) for one in caught]


def _in_use(ddp, watch):
    def hook(_, bucket):
        watch.end()
        return completed_future(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    return [_pass(ddp) for _ in range(4)]


def _watched(_):
    found = {}
    ddp = DistributedDataParallel(_Net())
    watch = BucketWatch(ddp, "MyState")
    with ddp.no_sync():
        found["no_sync"] = [_pass(ddp) for _ in range(3)]
    copy.deepcopy(ddp.module)
    pickle.dumps(ddp.module)
    found["idle"] = [_pass(ddp) for _ in range(4)]
    found["in use"] = _in_use(ddp, BucketWatch(ddp, "MyState"))

    ddp = DistributedDataParallel(_Net())
    watch = BucketWatch(ddp, "MyState")
    found["ended"] = _pass(ddp)
    watch.end()
    found["ended"] += _pass(ddp) + _pass(ddp)

    BucketWatch(ddp, "MyState")
    module = ddp.module
    del ddp
    found["model gone"] = _pass(module) + _pass(module) + _pass(module)

    reentrant = DistributedDataParallel(_Net(reentrant=True))
    found["reentrant"] = _in_use(reentrant, BucketWatch(reentrant, "MyState"))

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        without_buckets = DistributedDataParallel(_Net())
    BucketWatch(without_buckets, "MyState")
    found["Python reducer"] = [_pass(without_buckets) for _ in range(3)]
    return found


def test_two_passes_without_a_bucket_warn_once():
    for found in run_ranks(_watched, 2):
        before, (warning,), *after = found.pop("idle")
        assert before == []
        assert after == [[], []]
        assert "2 backward passes" in warning
        assert "MyState" in warning
        assert "register_comm_hook(state, hook)" in warning
        assert found == {
            "no_sync": [[]] * 3,
            "in use": [[]] * 4,
            "ended": [],
            "model gone": [],
            "reentrant": [[]] * 4,
            "Python reducer": [[]] * 3,
        }


def _raised(_):
    ddp = DistributedDataParallel(_Net())
    BucketWatch(ddp, "MyState")
    warnings.simplefilter("error")
    seen = []
    for _ in range(3):
        try:
            ddp(torch.ones(2, 4)).sum().backward()
            seen.append("")
        except UserWarning as error:
            seen.append(type(error).__name__)
    return seen


def test_a_warning_that_is_an_error_ends_that_backward_pass_only():
    assert run_ranks(_raised, 2) == [["", "UserWarning", ""]] * 2
