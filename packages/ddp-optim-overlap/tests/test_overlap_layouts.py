"""The memory of parameters: unusual and changed strides, and shared memory."""

import itertools

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    PoisonedPages,
    adamw,
    as_ordinary,
    assert_ordinary,
    assert_same,
    backward,
    batches,
    begin_overlap,
    on_ranks,
    snapshot,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import ConfigError, OptimizerHookState, overlap_optimizer
from ddp_optim_overlap.bucket_memory import StorageMemory

Conv = torch.nn.Conv2d


def _channels_last(net):
    return net.to(memory_format=torch.channels_last)


def _columns_first(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)
    return net


def _plain():
    return torch.nn.Sequential(Conv(4, 6, 3, padding=1), Conv(6, 4, 3, padding=1))


# Of a side of 1 torch does not mind the stride, so several strides are called contiguous.
NETS = {
    "3x3": _plain,
    "1x1": lambda: torch.nn.Sequential(Conv(4, 6, 1), Conv(6, 4, 1)),
}


def _inputs(first=0, last=4):
    seeds = [step + 10 * dist.get_rank() for step in range(first, last)]
    return [torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


CHANGES = (_channels_last, _columns_first)
VIEWS = (False, True)


def _start(net, view):
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.0005, gradient_as_bucket_view=view)
    return ddp, adamw(ddp)


@as_ordinary(
    *itertools.product(NETS, CHANGES, VIEWS, (None, PoisonedPages)),
    *itertools.product(NETS, CHANGES, (False,), (StorageMemory,)),
)
def check_unusual_from_the_beginning(name, change, view, memory, *, overlapped):
    torch.manual_seed(0)
    ddp, optimizer = _start(change(NETS[name]()), view)
    if overlapped:
        begin_overlap(ddp, optimizer, memory=memory)
    return train_on(ddp, optimizer, _inputs())


class _SomeUsed(torch.nn.Module):
    """The middle one of three convolutions is left out by rank 1 in some passes."""

    def __init__(self, unused):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Conv(4, 4, 3, padding=1) for _ in range(3))
        self.unused, self.passes = unused, 0

    def forward(self, x):
        first, middle, last = self.layers
        self.passes += 1
        x = first(x)
        return last(x if dist.get_rank() == 1 and self.passes - 1 in self.unused else middle(x).tanh())


@as_ordinary(
    *itertools.product(((0, 2),), (0.0005, 1), (None, PoisonedPages)),
)
def check_unused_on_one_rank(unused, cap, memory, *, overlapped):
    """A gradient has its layout in its bucket, though this rank has no gradient that shows it."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": cap}
    ddp = DistributedDataParallel(_channels_last(_SomeUsed(unused)), **options)
    optimizer = adamw(ddp)
    if overlapped:
        begin_overlap(ddp, optimizer, memory=memory)
    return train_on(ddp, optimizer, _inputs(last=5))


@as_ordinary(*itertools.product(CHANGES, (0, 3), (True,), (None, PoisonedPages)))
def check_changed_afterwards(change, when, view, memory, *, overlapped):
    """Refused before anything is stepped: DDP itself would permute gradients. A new DDP model takes it."""
    torch.manual_seed(0)
    ddp, optimizer = _start(_plain(), view)
    handle = begin_overlap(ddp, optimizer, memory=memory) if overlapped else None
    train_on(ddp, optimizer, _inputs(last=when))
    change(ddp.module)
    if handle is not None:
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match=r"(?i)layout|stride"):
            backward(ddp, _inputs()[0])
        with pytest.raises(ConfigError, match=r"(?i)layout|stride"):
            optimizer.step()
        assert_same(snapshot(ddp), before)
        handle.remove()
        optimizer.zero_grad()
    ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=0.0005, gradient_as_bucket_view=view)
    if overlapped:
        begin_overlap(ddp, optimizer, memory=memory)
    return train_on(ddp, optimizer, _inputs(when, 6))


def check_shared_memory():
    """Two layers that are slices of one tensor: interleaved columns, or in part the same ones."""

    def make(*, shared):
        torch.manual_seed(0)
        memory = torch.randn(8, 16)
        net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
        net[1].weight = torch.nn.Parameter(memory[:, :8].data)
        net[4].weight = torch.nn.Parameter((memory[:, 7:15] if shared else memory[:, 8:]).data)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.0005)
        return ddp, adamw(ddp)

    for take in (lambda ddp, optimizer: OptimizerHookState(optimizer), overlap_optimizer):
        with pytest.raises(ConfigError, match="share memory"):
            take(*make(shared=True))

    def run(*, overlapped):
        ddp, optimizer = make(shared=False)
        if overlapped:
            overlap_optimizer(ddp, optimizer)
        return train_on(ddp, optimizer, [x.flatten()[:8] for x in batches(3)])

    assert_ordinary(run)


check = on_ranks(__name__, timeout=120, group_timeout=20)


def test_layouts(check):
    check()
