"""Ranks whose overlaps differ: an error on every rank before anything is averaged or stepped."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook, fp16_compress_hook
from ddp_optim_overlap import (
    ByValue,
    ClipPolicy,
    ConfigError,
    OverlapError,
    OverlapMode,
    PerBucketNorm,
    overlap_optimizer,
)
from dist_utils.testing import patience, run_ranks


class OwnClip(ClipPolicy):
    """A user's own policy, whose repr contains an address."""

    def clip(self, parameters):
        """Change nothing."""


AFTER = {"mode": OverlapMode.AFTER_REDUCE}

# The options of the first ranks, those of the last one, and what the message must say.
CASES = [
    ({}, AFTER, "mode is 'bucket' on {first}, 'after_reduce' on rank {last}"),
    ({"clip": ByValue(1.0)}, {"clip": ByValue(2.0)}, "clip is 'ByValue(max_value=1.0)' on {first}"),
    ({"clip": ByValue(1.0)}, {"clip": PerBucketNorm(1.0)}, "'PerBucketNorm(max_norm=1.0)' on rank {last}"),
    ({}, {"clip": OwnClip()}, "clip is 'NoneType' on {first}, 'OwnClip' on rank {last}"),
    (
        {"comm_hook": fp16_compress_hook},
        {"comm_hook": bf16_compress_hook},
        "communication hook is 'fp16_compress_hook' on {first}, 'bf16_compress_hook' on rank {last}",
    ),
    (AFTER, {**AFTER, "scaler": torch.amp.GradScaler("cpu")}, "scaler is False on {first}, True on"),
]


def _model(optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(20, 20))
    return ddp, optimizer(ddp.parameters(), lr=0.1)


def _different(rank, last):
    messages = []
    for usual, other, _ in CASES:
        ddp, optimizer = _model()
        handle = overlap_optimizer(ddp, optimizer, **(other if rank == last else usual))
        before = [parameter.clone() for parameter in ddp.parameters()]
        with pytest.raises(RuntimeError, match="differs between ranks"):
            ddp(torch.ones(1, 20)).sum().backward()
        with pytest.raises(OverlapError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
        assert all(torch.equal(old, new) for old, new in zip(before, ddp.parameters(), strict=True))
        handle.remove()
    ddp, optimizer = _model(torch.optim.AdamW if rank == last else torch.optim.SGD)
    overlap_optimizer(ddp, optimizer)
    with pytest.raises(RuntimeError, match=r"\('SGD', 1\).* on rank.*\('AdamW', 1\).* on rank"):
        ddp(torch.ones(1, 20)).sum().backward()
    return messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_overlaps_raise_on_every_rank_and_step_nothing(world_size):
    first, last = "rank 0" if world_size == 2 else "ranks 0, 1", world_size - 1
    for messages in run_ranks(_different, world_size, last, timeout=90):
        for message, (_, _, expected) in zip(messages, CASES, strict=True):
            assert expected.format(first=first, last=last) in message


def _goes_on(rank):
    """After remove() and a new overlap on all ranks, the model trains as in an ordinary loop."""
    models = []
    for overlapped in (True, False):
        ddp, optimizer = _model()
        if overlapped:
            handle = overlap_optimizer(ddp, optimizer, **(AFTER if rank else {}))
            with pytest.raises(RuntimeError, match="mode is"):
                ddp(torch.ones(1, 20)).sum().backward()
            handle.remove()
            optimizer.zero_grad()
            overlap_optimizer(ddp, optimizer, clip=OwnClip())
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.full((1, 20), rank + 1.0)).square().sum().backward()
            optimizer.step()
        models.append(list(ddp.parameters()))
    return all(torch.equal(ours, plain) for ours, plain in zip(*models, strict=True))


def test_a_model_trains_on_after_a_difference():
    assert run_ranks(_goes_on, 2) == [True, True]


def _one_rank_alone(rank):
    ddp, optimizer = _model()
    if rank == 0:
        overlap_optimizer(ddp, optimizer)
        with pytest.raises(RuntimeError) as caught:
            ddp(torch.ones(1, 20)).sum().backward()
        return str(caught.value)
    with pytest.raises(RuntimeError):  # the average: rank 0 does not take part in it
        ddp(torch.ones(1, 20)).sum().backward()
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
