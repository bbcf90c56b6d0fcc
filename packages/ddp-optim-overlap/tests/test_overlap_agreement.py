"""Ranks whose overlaps differ: an error on every rank before anything is averaged or stepped."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from overlap_runs import assert_same, backward, snapshot, train_on
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_hook
from torch.nn.parallel import DistributedDataParallel

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


# The options of the first ranks, those of the last one, and what the message must say.
CASES = [
    ({"clip": ByValue(1.0)}, {"clip": ByValue(2.0)}, "clip is 'ByValue(max_value=1.0)' on {first}"),
    ({"clip": ByValue(1.0)}, {"clip": PerBucketNorm(1.0)}, "'PerBucketNorm(max_norm=1.0)' on rank {last}"),
    ({}, {"clip": OwnClip()}, "clip is None on {first}, 'OwnClip()' on rank {last}"),
    (
        {"comm_hook": fp16_compress_hook},
        {"comm_hook": bf16_compress_hook},
        "communication hook is 'fp16_compress_hook' on {first}, 'bf16_compress_hook' on rank {last}",
    ),
    ({"clip": PreviousStepNorm(1.0)}, {"clip": PreviousStepNorm(2.0)}, "clip is"),
]


def _model(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(20, 20), **options)
    return ddp, optimizer(ddp.parameters(), lr=0.1)


def _x():
    return torch.full((1, 20), dist.get_rank() + 1.0)


def _different(rank, last):
    messages = []
    for usual, other, _ in CASES:
        ddp, optimizer = _model()
        handle = overlap_optimizer(ddp, optimizer, **(other if rank == last else usual))
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="differs between ranks"):
            backward(ddp, _x())
        with pytest.raises(OverlapError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
        assert_same(snapshot(ddp), before)
        handle.remove()
    ddp, optimizer = _model(torch.optim.AdamW if rank == last else torch.optim.SGD)
    overlap_optimizer(ddp, optimizer)
    with pytest.raises(RuntimeError, match=r"\('SGD', 1\).* on rank.*\('AdamW', 1\).* on rank"):
        backward(ddp, _x())
    return messages


def test_different_overlaps_raise_on_every_rank_and_step_nothing():
    for messages in run_ranks(_different, 3, 2, timeout=90):
        for message, (_, _, expected) in zip(messages, CASES, strict=True):
            assert expected.format(first="ranks 0, 1", last=2) in message


def _goes_on(rank):
    """After remove() and a new overlap on all ranks, the model trains as in an ordinary loop."""
    ddp, optimizer = _model()
    handle = overlap_optimizer(ddp, optimizer, clip=ByValue(1.0) if rank else None)
    with pytest.raises(RuntimeError, match="clip is"):
        backward(ddp, _x())
    handle.remove()
    optimizer.zero_grad()
    overlap_optimizer(ddp, optimizer, clip=OwnClip())
    assert_same(train_on(ddp, optimizer, [_x()] * 2), train_on(*_model(), [_x()] * 2))


def test_a_model_trains_on_after_a_difference():
    run_ranks(_goes_on, 2)


def _wait_and_go_on(handle, ddp, optimizer):
    handle.wait()
    optimizer.zero_grad()
    backward(ddp, _x())


def _pauses_alone(rank, unused):
    ddp, optimizer = _model(find_unused_parameters=unused)
    handle = overlap_optimizer(ddp, optimizer)
    train_on(ddp, optimizer, [_x()] * 2)
    with handle.pause() if rank == 0 else contextlib.nullcontext():
        backward(ddp, _x())
    with pytest.raises(RuntimeError, match="pause"):
        _wait_and_go_on(handle, ddp, optimizer)  # no later than in the next pass
    with pytest.raises(OverlapError, match="pause"):
        optimizer.step()
    handle.remove()
    if unused:
        return None  # DDP's own forward pass raises after such an error
    optimizer.zero_grad()
    for tensor in ddp.parameters():
        dist.broadcast(tensor.detach(), 0)
    train_on(ddp, optimizer, [_x()] * 2)
    return snapshot(ddp)


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
@pytest.mark.parametrize("unused", [False, True])
def test_a_pause_on_one_rank_only_is_an_error_on_every_rank(unused):
    assert_same(*run_ranks(_pauses_alone, 2, unused, group_timeout=patience(20.0)))


def _one_rank_alone(rank):
    ddp, optimizer = _model()
    if rank == 0:
        overlap_optimizer(ddp, optimizer)
        with pytest.raises(RuntimeError) as caught:
            backward(ddp, _x())
        return str(caught.value)
    with pytest.raises(RuntimeError):  # the average: rank 0 does not take part in it
        backward(ddp, _x())
    return ""


def test_an_overlap_on_one_rank_only_is_an_error_that_says_so():
    limit = patience(3.0)
    message, _ = run_ranks(_one_rank_alone, 2, group_timeout=limit)
    assert f"ranks [0] came within {limit:g} s, ranks [1] did not" in message


def _other_ranks(rank):
    """A hook whose state averages over different ranks than the model is refused at the call."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    pair = pairs[rank == 2]
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=pair)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for hook, state in [
        (fp16_compress_hook, None),
        (torchs_hook, None),
        (fp16_compress_hook, dist.group.WORLD),
        (fp16_compress_hook, CompressState(accumulate="fp32")),
    ]:
        with pytest.raises(ConfigError, match=r"over ranks \[0, 1, 2\], but the model over ranks \["):
            overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    overlap_optimizer(ddp, optimizer, comm_hook=fp16_compress_hook, comm_state=CompressState().bind(ddp))
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    optimizer.step()


def test_a_hook_that_averages_over_other_ranks_is_refused():
    run_ranks(_other_ranks, 3)
