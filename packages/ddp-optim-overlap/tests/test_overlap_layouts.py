"""Parameters whose strides change during training."""

import gc
import weakref

import torch
import torch.distributed as dist
from overlap_runs import (
    PoisonedPages,
    adamw,
    backward,
    batches,
    begin_overlap,
    make_ddp,
    same,
    snapshot,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.bucket_memory import StorageMemory
from dist_utils.testing import run_ranks


def _channels_last(net):
    net.to(memory_format=torch.channels_last)


def _columns_first(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)


def _train(change, when, *, overlapped, memory=None, view=False, again=False):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.Conv2d(6, 4, 3, padding=1))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.0005, gradient_as_bucket_view=view)
    optimizer = adamw(ddp)
    handle = begin_overlap(ddp, optimizer, memory=memory) if overlapped else None
    for step in range(6):
        if step == when:
            change(net)
            if handle is not None and again:
                handle.remove()
                begin_overlap(ddp, optimizer, memory=memory)
        generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
        ddp(torch.randn(2, 4, 5, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(ddp)


def _other_strides(_):
    seen = {}
    for change in (_channels_last, _columns_first):
        for when in (0, 1, 2, 4):
            for view in (False, True):
                ordinary = _train(change, when, overlapped=False, view=view)
                for memory in (None, PoisonedPages, StorageMemory)[: 2 if view else 3]:
                    ends = _train(change, when, overlapped=True, memory=memory, view=view)
                    seen[change.__name__, when, view, getattr(memory, "__name__", "")] = same(ordinary, ends)
        ends = _train(change, 4, overlapped=True, view=True, again=True)
        seen[change.__name__, "again"] = same(ordinary, ends)
    return seen


class _SomeUsed(torch.nn.Module):
    """The middle one of three convolutions is left out by rank 1 in some passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.all_used = True

    def forward(self, x):
        first, middle, last = self.layers
        x = first(x)
        return last(x if dist.get_rank() == 1 and not self.all_used else middle(x).tanh())


def _train_some(unused, when, *, overlapped, memory=None, cap=0.0005, again=False):
    net = _SomeUsed()
    ddp = DistributedDataParallel(
        net, bucket_cap_mb=cap, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    optimizer = adamw(ddp)
    handle = begin_overlap(ddp, optimizer, memory=memory) if overlapped else None
    for step in range(7):
        if step == when:
            _channels_last(net)
            if handle is not None and again:
                handle.remove()
                begin_overlap(ddp, optimizer, memory=memory)
        net.all_used = step not in unused
        generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
        ddp(torch.randn(2, 4, 5, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(ddp)


def _other_strides_where_some_are_unused(_):
    """A gradient keeps its layout in its bucket, though this rank has no gradient that shows it."""
    seen = {}
    for unused, when in (((2, 3), 2), ((2, 3), 3), ((3,), 1), ((0, 1, 2), 1), ((0, 2), 2)):
        for cap in (0.0005, 1):
            ordinary = _train_some(unused, when, overlapped=False, cap=cap)
            for memory, again in ((None, False), (PoisonedPages, False), (None, True)):
                ends = _train_some(unused, when, overlapped=True, memory=memory, cap=cap, again=again)
                seen[unused, when, cap, memory is None, again] = same(ordinary, ends)
    return seen


def _let_go(_):
    """The memory of buckets is freed with the model, even if the handle is kept."""
    ddp = make_ddp()
    optimizer = adamw(ddp)
    buffers = []

    def hook(group, bucket):
        buffers.append(weakref.ref(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=dist.group.WORLD)
    for x in batches(4):
        backward(ddp, x)
        optimizer.step()
        optimizer.zero_grad()
    held = [one() is not None for one in buffers[-2:]]
    handle.wait()
    del ddp
    gc.collect()
    return held, [one() for one in buffers]


def _run(rank):
    return {**_other_strides(rank), **_other_strides_where_some_are_unused(rank)}, _let_go(rank)


def test_parameters_with_other_strides_and_freed_models():
    for seen, (held, left) in run_ranks(_run, 2):
        assert [case for case, right in seen.items() if not right] == []
        assert all(held)
        assert left == [None] * len(left)
