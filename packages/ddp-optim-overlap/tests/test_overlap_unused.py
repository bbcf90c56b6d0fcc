"""Parameters that a pass leaves out are left alone, whatever happened before."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from overlap_runs import adamw, backward, batches, both, make_ddp, named, require_held, run_parts, snapshot
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import ByValue, OptimizerHookState, hook_then_optimizer, overlap_optimizer
from dist_utils.testing import run_ranks

WEIGHT = 4  # of layer 1: the convolution has two parameters, and so has layer 0


def _overlap_begun_while_gradients_accumulate(seen):
    """The layer that is unused in the averaging pass got its gradient before the overlap began."""

    def run(*, overlapped):
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
        return snapshot(ddp), optimizer.state_dict()

    seen["stepped"] = both(run)


def _accumulation_in_pause(seen):
    """One rank uses a layer in the paused pass, both in the next: these gradients are not used ones."""
    for view in (False, True):
        for set_to_none in (False, True):

            def run(*, overlapped, view=view, set_to_none=set_to_none):
                ddp = make_ddp(find_unused_parameters=True, gradient_as_bucket_view=view)
                optimizer = adamw(ddp)
                handle = overlap_optimizer(ddp, optimizer) if overlapped else None
                data = batches(4)
                for first, second in zip(data[::2], data[1::2], strict=True):
                    ddp.module.skipped = (1,) if dist.get_rank() == 1 else ()
                    with handle.pause() if handle else contextlib.nullcontext():
                        backward(ddp, first)
                    ddp.module.skipped = ()
                    backward(ddp, second)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                return snapshot(ddp), optimizer.state_dict()

            seen[view, set_to_none] = both(run)


def _clipping_a_bucket_without_gradients(seen):
    """One bucket per layer, so that one has no gradients at all."""
    for how in ("skipped", "frozen"):

        def run(*, overlapped, how=how):
            ddp = make_ddp(find_unused_parameters=True, bucket_cap_mb=0.0005)
            optimizer = adamw(ddp)
            handle = overlap_optimizer(ddp, optimizer, clip=ByValue(0.01)) if overlapped else None
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
            if handle is not None:
                handle.wait()
            return snapshot(ddp), optimizer.state_dict()

        seen[how] = both(run)


class OneOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.rests = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.used(x)


def _state_of_some(seen):
    """Fused SGD takes no list in which only some have momentum; its trial must not use one, either."""

    def run(*, overlapped):
        ddp = DistributedDataParallel(OneOfTwo(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, fused=True)
        for step in range(4):
            if overlapped and step == 2:
                overlap_optimizer(ddp, optimizer)
            backward(ddp, torch.ones(2, 4))
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(ddp), optimizer.state_dict()

    seen["stepped"] = both(run)


def _hook_then_optimizer(seen):
    """As in PyTorch, a parameter that no rank has used is stepped with a zero gradient."""
    ddp = make_ddp(find_unused_parameters=True)
    ddp.module.skipped = (1,)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.5)
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    before = snapshot(ddp)
    backward(ddp, batches(1)[0])
    moved = snapshot(ddp)[WEIGHT]
    expected = before[WEIGHT].add(before[WEIGHT] * 0.5, alpha=-0.1)
    seen["moved by weight decay"] = torch.equal(moved, expected)


PARTS = named(
    _overlap_begun_while_gradients_accumulate,
    _accumulation_in_pause,
    _clipping_a_bucket_without_gradients,
    _state_of_some,
    _hook_then_optimizer,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=60, group_timeout=20)


@pytest.mark.parametrize("name", PARTS)
def test_parameters_that_a_pass_leaves_out(ranks, name):
    require_held(ranks, name)
