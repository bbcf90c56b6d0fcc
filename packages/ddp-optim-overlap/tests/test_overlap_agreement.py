"""Ranks that average or step differently: an error on every rank before anything is averaged or stepped.

Different hooks, optimizers and policies, and one overlap alone, are in integration_tests/test_peers.py.
"""

import contextlib

import overlap_runs as runs
import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_hook

from ddp_compress_hooks import CompressState, fp16_compress_hook
from ddp_optim_overlap import ByValue, ConfigError, OverlapError, overlap_optimizer
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


def check_a_hook_that_averages_over_other_ranks():
    """Refused at the call."""
    pair = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() == 2]
    ddp, optimizer, _ = runs.start(runs.sgd, overlapped=False, process_group=pair)
    for hook, state in [
        (fp16_compress_hook, None),
        (torchs_hook, None),
        (fp16_compress_hook, dist.group.WORLD),
        (fp16_compress_hook, CompressState(accumulate="fp32")),
    ]:
        with pytest.raises(ConfigError, match=r"over ranks \[0, 1, 2\], but the model over ranks \["):
            overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    overlap_optimizer(ddp, optimizer, comm_hook=fp16_compress_hook, comm_state=CompressState().bind(ddp))
    runs.train_on(ddp, optimizer, runs.batches(1))


@runs.cases(
    {"all used": ({},), "unused": ({"find_unused_parameters": True},)} if GROUPS_END_WITHOUT_GIL else {}
)
def check_a_pause_on_one_rank_only(options):
    ddp, optimizer, handle = runs.start(runs.sgd, **options)
    runs.train_on(ddp, optimizer, runs.batches(2))
    with handle.pause() if dist.get_rank() == 0 else contextlib.nullcontext():
        runs.backward(ddp, runs.batches(1)[0])

    def wait_and_go_on():
        handle.wait()
        optimizer.zero_grad()
        runs.backward(ddp, runs.batches(1)[0])  # no later than in the next pass

    with pytest.raises(RuntimeError, match="pause"):
        wait_and_go_on()
    with pytest.raises(OverlapError, match="pause"):
        optimizer.step()
    handle.remove()
    if not options:  # else DDP's own forward pass raises after such an error
        optimizer.zero_grad()
        for tensor in ddp.parameters():
            dist.broadcast(tensor.detach(), 0)
        runs.train_on(ddp, optimizer, runs.batches(2))
        for tensor in runs.snapshot(ddp):
            first = tensor.clone()
            dist.broadcast(first, 0)
            runs.assert_same(tensor, first)


OPTIONS = {
    "limit": (
        {"clip": ByValue(1.0)},
        {"clip": ByValue(2.0)},
        "max_value is 1.0 on ranks 0, 2, 2.0 on rank 1",
    ),
    "policy": ({}, {"clip": ByValue(2.0)}, "clip is 'NoneType' on ranks 0, 2, 'ByValue' on rank 1"),
    "release": ({}, {"release_gradients": True}, "release_gradients is False on ranks 0, 2, True on rank 1"),
}


@runs.cases(OPTIONS if GROUPS_END_WITHOUT_GIL else {})
def check_options(most, odd, words):
    """Ranks that release gradients ask together for fewer buckets, whether parameters were used."""
    options = odd if dist.get_rank() == 1 else most
    ddp, optimizer, handle = runs.start(runs.sgd, options=options, find_unused_parameters=True)
    before = runs.snapshot(ddp)
    with pytest.raises(RuntimeError, match=words):
        runs.backward(ddp, runs.batches(1)[0])
    for call in (handle.wait, optimizer.step):
        with pytest.raises(ConfigError, match=words):
            call()
    runs.assert_same(runs.snapshot(ddp), before)


@contextlib.contextmanager
def _removed(handle):
    handle.remove()
    yield


@runs.cases({"stepping": (contextlib.nullcontext,), "pause": (runs.paused,), "removed": (_removed,)})
def check_join_that_divides_by_ranks_with_data(around):
    """DDP divides by their number only without a hook; one that is given averages as without the overlap."""
    ddp, optimizer, handle = runs.start(runs.sgd, process_group=dist.new_group())
    before = runs.snapshot(ddp)
    refused = pytest.raises(RuntimeError, match="divide_by_initial_world_size")
    with around(handle), refused, ddp.join(divide_by_initial_world_size=False):
        runs.train_on(ddp, optimizer, runs.batches(dist.get_rank()))
    runs.assert_same(runs.snapshot(ddp), before)
    dist.barrier()


check = runs.on_ranks(__name__, 3, timeout=120, group_timeout=40)


def test_differences_raise_on_every_rank_and_step_nothing(check):
    check()
