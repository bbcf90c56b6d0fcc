"""A stepped weight that the same backward pass reads again."""

import time
from functools import partial

import torch
from overlap_runs import backward, step_buckets_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_optim_overlap import (
    WeightReuseError,
    overlap_optimizer,
)
from dist_utils.testing import call_in_backward, run_ranks


def _wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Reuses(torch.nn.Module):
    """A checkpointed block that uses a later layer's weight without its gradient."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8)
        self.how = how
        self.goes_on = lambda: True

    def block(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                target = self.last(x)
            return torch.tanh(x * target)
        weight = self.last.weight.detach() if self.how == "detach" else torch.eye(8)
        return torch.tanh(x @ weight)

    def forward(self, x):
        x = checkpoint(self.block, self.first(x), use_reentrant=False)
        return self.last(call_in_backward(x, partial(_wait_until, self.goes_on)))


def _weight_reuse(_):
    """The hazard is a race, so the recomputation here waits until the last layer is stepped."""
    step_buckets_of(1)
    seen = {}
    for how in ("detach", "no_grad", "harmless"):
        for check in (False, True):
            ddp = DistributedDataParallel(Reuses(how), bucket_cap_mb=0.0001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            handle = overlap_optimizer(ddp, optimizer, check=check)
            backward(ddp, torch.ones(2, 8))  # after it there are several buckets
            optimizer.zero_grad()
            weight = ddp.module.last.weight
            before = weight.detach().clone()
            now = weight.detach()  # made here, because reading the parameter inside raises
            if check:  # between the step and the mark nothing would be detected
                ddp.module.goes_on = lambda weight=weight: type(weight) is not torch.nn.Parameter
            else:
                ddp.module.goes_on = lambda now=now, before=before: bool((now != before).any())
            seen[how, check] = None
            try:
                backward(ddp, torch.ones(2, 8))
            except WeightReuseError:
                seen[how, check] = "detected"
                weight.sum()  # outside of backward: allowed
                handle.remove()
            assert {type(parameter) for parameter in ddp.parameters()} == {torch.nn.Parameter}
    return seen


def test_a_stepped_weight_that_a_checkpointed_block_reads_is_an_error():
    for rank in run_ranks(_weight_reuse, 2, timeout=60):
        assert rank == {
            ("detach", False): None,
            ("detach", True): "detected",
            ("no_grad", False): None,
            ("no_grad", True): "detected",
            ("harmless", False): None,
            ("harmless", True): None,
        }
