"""States count how long backward() waited for averages, with a peer that comes late."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import CompressState, bf16_compress_hook, compress_hook, fp16_compress_wrapper
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import (
    AutoState,
    LowRankState,
    QuantizedAllreduceState,
    auto_hook,
    low_rank_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks

LATE = 0.3
HOOKS = {
    "16 bits": (CompressState, bf16_compress_hook),
    "16 bits, sums in fp32": (lambda: CompressState(accumulate="fp32"), bf16_compress_hook),
    "wrapper": (CompressState, fp16_compress_wrapper(compress_hook)),
    "8 bits": (lambda: QuantizedAllreduceState(min_bytes=0), quantized_allreduce_hook),
    "small buckets": (QuantizedAllreduceState, quantized_allreduce_hook),
    "low rank": (LowRankState, low_rank_hook),
    "auto": (lambda: AutoState(max_error=None), auto_hook),
}


class _Net(torch.nn.Module):
    """Layers of several buckets, checkpointed reentrantly on request."""

    def __init__(self, *, reentrant=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(100, 100) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x.square().mean()


def _waited(rank, name, how=""):
    """Return the seconds that a pass waits in which rank 1 comes late, and in one under no_sync()."""
    make, hook = HOOKS[name]
    ddp = DistributedDataParallel(_Net(reentrant=how == "reentrant"), bucket_cap_mb=0.03)
    state = make().bind(ddp)
    if how == "overlapped":
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    else:
        ddp.register_comm_hook(state, hook)
    x = torch.randn(4, 100, requires_grad=True)
    for _ in range(80 if name == "auto" else 3):  # ranks compare what is new in the hook, and try candidates
        ddp.zero_grad()
        ddp(x).backward()
    ddp.zero_grad()
    dist.barrier()
    before = state.seconds_waited
    loss = ddp(x)
    if rank == 1:
        time.sleep(LATE)
    loss.backward()
    waited = state.seconds_waited - before
    before = state.seconds_waited
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x).backward()
    if isinstance(state, QuantizedAllreduceState):
        assert state.statistics.seconds_waited == state.seconds_waited
    return waited, state.seconds_waited - before


def _assert_rank_0_has_waited(waited):
    (early, nothing), (late, nothing_either) = waited
    assert 0.8 * LATE < early < LATE + 5
    assert 0 < late < early
    assert (nothing, nothing_either) == (0, 0)


def _all(rank):
    return [_waited(rank, name) for name in HOOKS]


def test_a_rank_counts_how_long_it_waited_for_another():
    first, second = run_ranks(_all, 2, timeout=100)
    for waited in zip(first, second, strict=True):
        _assert_rank_0_has_waited(waited)


@pytest.mark.parametrize("how", ["overlapped", "reentrant"])
def test_waits_are_counted_in_other_passes(how):
    _assert_rank_0_has_waited(run_ranks(_waited, 2, "8 bits", how, timeout=60))
