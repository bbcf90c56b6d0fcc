"""Parameters that a pass leaves out are left alone, whatever happened before; static graphs."""

import itertools

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    adamw,
    as_ordinary,
    assert_same,
    backward,
    batches,
    changed,
    ends,
    make_ddp,
    on_ranks,
    paused,
    snapshot,
    start,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ByValue,
    ConfigError,
    OptimizerHookState,
    hook_then_optimizer,
    overlap_optimizer,
)

WEIGHT = 4  # of layer 1: the convolution has two parameters, and so has layer 0


@as_ordinary()
def check_overlap_begun_while_gradients_accumulate(*, overlapped):
    """The layer that is unused in the averaging pass got its gradient before the overlap began."""
    ddp = make_ddp(find_unused_parameters=True)
    optimizer = adamw(ddp)
    first, second = batches(2)
    with ddp.no_sync():
        backward(ddp, first)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    ddp.module.skipped = (1,)
    backward(ddp, second)
    optimizer.step()
    return ends(ddp, optimizer)


@as_ordinary(*itertools.product((False, True), repeat=2))
def check_accumulation_in_pause(view, set_to_none, *, overlapped):
    """One rank uses a layer in the paused pass, both in the next: these gradients are not used ones."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    ddp, optimizer, handle = start(overlapped=overlapped, **options)
    data = batches(4)
    for first, second in zip(data[::2], data[1::2], strict=True):
        ddp.module.skipped = (1,) if dist.get_rank() == 1 else ()
        with paused(handle):
            backward(ddp, first)
        ddp.module.skipped = ()
        backward(ddp, second)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return ends(ddp, optimizer)


@as_ordinary(("skipped",), ("frozen",))
def check_clipping_a_bucket_without_gradients(how, *, overlapped):
    """One bucket per layer, so that one has no gradients at all."""
    ddp = make_ddp(find_unused_parameters=True, bucket_cap_mb=0.0005)
    optimizer = adamw(ddp)
    if overlapped:
        overlap_optimizer(ddp, optimizer, clip=ByValue(0.01))
    if how == "frozen":
        ddp.module.layers[3].requires_grad_(False)
    else:
        ddp.module.skipped = (1,)
    for x in batches(3):
        backward(ddp, x)
        if not overlapped:
            torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return ends(ddp, optimizer)


class OneOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.rests = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.used(x)


@as_ordinary()
def check_state_of_some(*, overlapped):
    """Fused SGD takes no list in which only some have momentum."""
    ddp = DistributedDataParallel(OneOfTwo(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, fused=True)
    for step in range(4):
        if overlapped and step == 2:
            overlap_optimizer(ddp, optimizer)
        train_on(ddp, optimizer, [torch.ones(2, 4)])
    return ends(ddp, optimizer)


def check_skipped_or_stepped():
    """By default an unused layer is left alone; with unused="step" weight decay moves it."""
    for unused, moved in {"skip": [0, 1, 2, 3, 6, 7, 8, 9], "step": list(range(10))}.items():
        ddp, optimizer, _ = start(options={"unused": unused}, find_unused_parameters=True)
        train_on(ddp, optimizer, batches(1))
        before = snapshot(ddp)
        ddp.module.skipped = (1,)
        train_on(ddp, optimizer, batches(1))
        assert_same(changed(ddp, before), moved)


def check_hook_then_optimizer():
    """As in PyTorch, a parameter that no rank has used is stepped with a zero gradient."""
    ddp = make_ddp(find_unused_parameters=True)
    ddp.module.skipped = (1,)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.5)
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    before = snapshot(ddp)
    backward(ddp, batches(1)[0])
    assert_same(snapshot(ddp)[WEIGHT], before[WEIGHT].add(before[WEIGHT] * 0.5, alpha=-0.1))


def check_first_pass_of_a_static_graph():
    """DDP hands over all buckets as bucket 0 and none as the last one: an error, and no hang."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
    sparse = torch.nn.Sequential(torch.nn.Embedding(8, 8, sparse=True), torch.nn.Linear(8, 8))
    for refused in (net, sparse):
        ddp = DistributedDataParallel(refused, static_graph=True)
        with pytest.raises(ConfigError, match="buckets of its first pass apart"):
            overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


check = on_ranks(__name__, timeout=60, group_timeout=20)


def test_parameters_that_a_pass_leaves_out(check):
    check()
