"""Ranks whose overlaps differ: an error on every rank before anything is averaged or stepped."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    assert_same,
    backward,
    batches,
    cases,
    changed,
    make_ddp,
    on_ranks,
    sgd,
    snapshot,
    start,
    train_on,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_hook

from ddp_compress_hooks import CompressState, bf16_compress_hook, fp16_compress_hook
from ddp_optim_overlap import (
    ByValue,
    ClipPolicy,
    ConfigError,
    OverlapError,
    PerBucketNorm,
    PreviousStepNorm,
    overlap_optimizer,
)
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


class OwnClip(ClipPolicy):
    """A user's own policy, whose repr contains an address."""

    def clip(self, parameters):
        """Change nothing."""


def _adam(ddp):
    return torch.optim.Adam(ddp.parameters())


# What the last rank does differently, with what the others do, and what the message must say.
DIFFERENT = {
    "limits": (
        {"clip": ByValue(1.0)},
        {"clip": ByValue(2.0)},
        r"clip is 'ByValue\(max_value=1.0\)' on ranks 0, 1",
    ),
    "policies": (
        {"clip": ByValue(1.0)},
        {"clip": PerBucketNorm(1.0)},
        r"'PerBucketNorm\(max_norm=1.0\)' on rank 2",
    ),
    "an own policy": ({}, {"clip": OwnClip()}, r"clip is None on ranks 0, 1, 'OwnClip\(\)' on rank 2"),
    "hooks": (
        {"comm_hook": fp16_compress_hook},
        {"comm_hook": bf16_compress_hook},
        "hook is 'fp16_compress_hook' on ranks 0, 1, 'bf16_compress_hook' on rank 2",
    ),
    "optimizers": ({}, {}, r"\('SGD', 1\).* on ranks 0, 1.*\('Adam', 1\).* on rank 2"),
}


@cases({name: (name, *rest) for name, rest in DIFFERENT.items()})
def check_different(name, usual, other, words):
    """After remove() and a new overlap on all ranks, the model trains as in an ordinary loop."""
    last = dist.get_rank() == 2
    make = _adam if last and name == "optimizers" else sgd
    ddp, optimizer, handle = start(make, options=other if last else usual)
    before = snapshot(ddp)
    with pytest.raises(RuntimeError, match=words):
        backward(ddp, batches(1)[0])
    for call in (optimizer.step, handle.wait):
        with pytest.raises(OverlapError, match=words):
            call()
    assert_same(changed(ddp, before), [])
    handle.remove()
    optimizer.zero_grad()
    optimizer = sgd(ddp)
    overlap_optimizer(ddp, optimizer, clip=OwnClip())
    plain, other, _ = start(sgd, overlapped=False)
    backward(plain, batches(1)[0])  # now both have their final buckets, on which sums of three ranks depend
    plain.zero_grad()
    assert_same(train_on(ddp, optimizer, batches(2)), train_on(plain, other, batches(2)))


def check_the_kind_of_a_resumed_norm_is_no_difference():
    """It lies on each rank's own device: it may be a tensor or a number."""
    runs = []
    for previous in (7.5, 7.5 if dist.get_rank() else torch.tensor(7.5)):
        ddp, optimizer, _ = start(sgd, options={"clip": PreviousStepNorm(1.0, previous=previous)})
        runs.append(train_on(ddp, optimizer, batches(2)))
    assert_same(*runs)


def check_a_hook_that_averages_over_other_ranks():
    """Refused at the call."""
    pair = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() == 2]
    ddp, optimizer, _ = start(sgd, overlapped=False, process_group=pair)
    for hook, state in [
        (fp16_compress_hook, None),
        (torchs_hook, None),
        (fp16_compress_hook, dist.group.WORLD),
        (fp16_compress_hook, CompressState(accumulate="fp32")),
    ]:
        with pytest.raises(ConfigError, match=r"over ranks \[0, 1, 2\], but the model over ranks \["):
            overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    overlap_optimizer(ddp, optimizer, comm_hook=fp16_compress_hook, comm_state=CompressState().bind(ddp))
    train_on(ddp, optimizer, batches(1))


@cases({"all used": ({},), "unused": ({"find_unused_parameters": True},)} if GROUPS_END_WITHOUT_GIL else {})
def check_a_pause_on_one_rank_only(options):
    ddp, optimizer, handle = start(sgd, **options)
    train_on(ddp, optimizer, batches(2))
    with handle.pause() if dist.get_rank() == 0 else contextlib.nullcontext():
        backward(ddp, batches(1)[0])

    def wait_and_go_on():
        handle.wait()
        optimizer.zero_grad()
        backward(ddp, batches(1)[0])  # no later than in the next pass

    with pytest.raises(RuntimeError, match="pause"):
        wait_and_go_on()
    with pytest.raises(OverlapError, match="pause"):
        optimizer.step()
    handle.remove()
    if not options:  # else DDP's own forward pass raises after such an error
        optimizer.zero_grad()
        for tensor in ddp.parameters():
            dist.broadcast(tensor.detach(), 0)
        train_on(ddp, optimizer, batches(2))
        for tensor in snapshot(ddp):
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert_same(tensor, first)


check = on_ranks(__name__, 3, timeout=120, group_timeout=40)


def test_differences_raise_on_every_rank_and_step_nothing(check):
    check()


def _one_rank_alone(rank):
    ddp = make_ddp()
    if rank == 0:
        overlap_optimizer(ddp, sgd(ddp))
    with pytest.raises(RuntimeError) as caught:  # on rank 1 the average: rank 0 does not take part in it
        backward(ddp, batches(1)[0])
    return str(caught.value)


def test_an_overlap_on_one_rank_only_is_an_error_that_says_so():
    limit = patience(2.0)
    message, _ = run_ranks(_one_rank_alone, 2, group_timeout=limit)
    assert f"ranks [0] came within {limit:g} s, ranks [1] did not" in message
