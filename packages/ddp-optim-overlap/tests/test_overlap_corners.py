"""Unusual loops and graphs: nothing hangs, no gradient is counted twice, and no bit differs."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    Net,
    batches,
    both,
    make_ddp,
    named,
    require_held,
    run_parts,
    snapshot,
    step_buckets_of,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    OptimizerHookState,
    OverlapError,
    hook_then_optimizer,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks

LARGE = 2**22


class Heads(torch.nn.Module):
    """Two last layers, one of them possibly unused, so that another parameter gets the first gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = (torch.nn.Linear(8, 8) for _ in range(3))
        self.use = "ab"

    def forward(self, x):
        x = torch.tanh(self.body(x))
        for name in "ba":
            if name in self.use:
                x = getattr(self, name)(x)
        return x


def _heads(**options):
    ddp = DistributedDataParallel(Heads(), find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    overlap_optimizer(ddp, optimizer)
    return ddp, optimizer


def _pass(ddp, use):
    ddp.module.use = use
    ddp(torch.randn(4, 8)).square().mean().backward()


def _another_parameter_is_first(seen):
    """One used gradient stays: unchanged, halved, or zeroed in a way that raises no version."""
    for left, wrong in (("used", True), ("halved", True), ("zeroed", False)):
        ddp, optimizer = _heads()
        _pass(ddp, "ab")
        optimizer.step()
        for name, parameter in ddp.module.named_parameters():
            if name != "b.bias":
                parameter.grad = None
            elif left == "halved":
                parameter.grad.mul_(0.5)
            elif left == "zeroed":
                parameter.grad.data.zero_()
        if wrong:
            with pytest.raises(RuntimeError, match="adds to gradients that a step has already used"):
                _pass(ddp, "b")
        else:
            _pass(ddp, "b")
            optimizer.step()
        seen[left] = True


def _first_pass_of_a_static_graph(seen):
    """DDP hands over all buckets as bucket 0 and none as the last one: an error, and no hang."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
    sparse = torch.nn.Sequential(torch.nn.Embedding(8, 8, sparse=True), torch.nn.Linear(8, 8))
    for refused in (net, sparse):
        ddp = DistributedDataParallel(refused, static_graph=True)
        with pytest.raises(ConfigError, match="buckets of its first pass apart"):
            overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    for size in (1, LARGE):
        step_buckets_of(size)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
        net[0].register_forward_hook(lambda *arguments: arguments[2].double())
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer)
        ddp._set_static_graph()
        with pytest.raises(RuntimeError, match="does not average"):  # of the second bucket
            ddp(torch.ones(2, 8)).sum().backward()
        seen[size] = True


def _no_last_bucket(seen):
    """With an option, DDP leaves out buckets that no rank has used; it waits for all others."""
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    try:
        DistributedDataParallel(torch.nn.Linear(1, 1), **options)
    except TypeError:
        seen["torch has no such option"] = True
        return
    for size in (1, LARGE):
        step_buckets_of(size)
        ddp = make_ddp(**options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
        try:
            for skipped in ((), (), (0,), (0, 1), ()):
                ddp.module.skipped = skipped
                ddp(batches(1)[0]).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except (RuntimeError, OverlapError):
            pass  # it may raise, but must not hang
        seen[size] = True


def _a_hook_fails_behind_early_steps(seen):
    """The worker has taken unannounced buckets when a later one fails."""
    for fails in (1, 2):
        step_buckets_of(LARGE)
        state = {"fails": -1}

        def hook(state, bucket):
            if bucket.index() == state["fails"]:
                state["worker"].wait()
                raise ValueError("a bad hook")
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / 2)

        ddp = make_ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
        for x in batches(2):
            ddp(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        step_buckets_of(3000)
        state |= {"fails": fails, "worker": handle._engine._worker}
        with pytest.raises(RuntimeError, match="a bad hook"):
            ddp(batches(1)[0]).square().sum().backward()
        handle.remove()
        state["fails"] = -1
        with overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state) as handle:
            optimizer.zero_grad()
            ddp(batches(1)[0]).square().sum().backward()
            seen[fails] = len(handle.wait().stepped) > fails


class Checkpointed(torch.nn.Module):
    """Most of it runs its backward pass inside another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.rest = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        return checkpoint(self.rest, self.first(x), use_reentrant=True)


def _reentrant_checkpoints(seen):
    for release in (False, True):
        for view in (False, True):

            def run(*, overlapped, release=release, view=view):
                step_buckets_of(LARGE)
                ddp = DistributedDataParallel(
                    Checkpointed(), bucket_cap_mb=0.0002, gradient_as_bucket_view=view
                )
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
                if overlapped:
                    overlap_optimizer(ddp, optimizer, release_gradients=release)
                for seed in range(4):
                    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
                    ddp(x).square().sum().backward()
                    if overlapped and release:
                        assert all(parameter.grad is None for parameter in ddp.parameters())
                    optimizer.step()
                    optimizer.zero_grad()
                return snapshot(ddp)

            seen[release, view] = both(run)


def _a_layout_that_changes(seen):
    """DDP lays gradients out like their parameters."""
    for when in (1, 2, 3, 4):

        def run(*, overlapped, when=when):
            ddp = make_ddp()
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
            if overlapped:
                overlap_optimizer(ddp, optimizer)
            else:
                ddp.register_comm_hook(None, allreduce_hook)
            for step, x in enumerate(batches(6)):
                if step == when:
                    ddp.module.to(memory_format=torch.channels_last)
                ddp(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return snapshot(ddp)

        seen[when] = both(run)


def _an_optimizer_that_rests(seen):
    """Its step() finds no gradients because none were computed, not because they were freed."""
    ddp = make_ddp(find_unused_parameters=True)
    one = torch.optim.SGD(ddp.module.conv.parameters(), lr=0.1)
    other = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, [one, other], release_gradients=True)
    ddp(batches(1)[0]).square().sum().backward()
    one.step()
    other.step()
    with handle.pause():
        ddp.module.conv(batches(1)[0]).sum().backward()
    before = snapshot(ddp)
    one.step()
    other.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, ddp.parameters(), strict=True)]
    seen["rests"] = any(moved) and not all(moved)


def _a_model_that_is_gone(seen):
    """A handle that outlives its model keeps no bucket."""
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    buffers = []

    def hook(_, bucket):
        buffers.append(weakref.ref(bucket.buffer()))
        return allreduce_hook(None, bucket)

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = overlap_optimizer(ddp, optimizer, comm_hook=hook)
    for x in batches(4):
        ddp(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["there"] = any(buffer() is not None for buffer in buffers)
    del ddp
    deadline = time.monotonic() + 20  # one of Gloo's threads may still hold a callback
    while any(buffer() is not None for buffer in buffers) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    seen["gone"] = not any(buffer() is not None for buffer in buffers) and handle is not None


PARTS = named(
    _another_parameter_is_first,
    _first_pass_of_a_static_graph,
    _no_last_bucket,
    _a_hook_fails_behind_early_steps,
    _reentrant_checkpoints,
    _a_layout_that_changes,
    _an_optimizer_that_rests,
    _a_model_that_is_gone,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, group_timeout=30, timeout=120)


@pytest.mark.parametrize("name", PARTS)
def test_corners(ranks, name):
    require_held(ranks, name)
