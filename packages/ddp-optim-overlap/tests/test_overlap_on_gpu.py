"""The parity suite with CUDA streams, over NCCL: one rank per GPU, as many as there are, two at most."""

import contextlib

import pytest
import torch
from overlap_runs import batches, rank_device, same
from parity_cases import MODES, every_mode, every_optimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import GlobalNorm, OverlapMode, overlap_optimizer
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.gpu
WORLD_SIZE = min(2, max(1, torch.cuda.device_count()))


def _on_nccl(cases, timeout):
    return run_ranks(_deterministic, WORLD_SIZE, cases, backend="nccl", timeout=timeout)


def _deterministic(rank, cases):
    torch.cuda.set_device(rank)
    torch.backends.cudnn.deterministic = True  # two runs are compared to the bit
    return cases(rank)


@pytest.mark.parametrize("cases", [every_optimizer, every_mode])
def test_the_parity_suite(cases):
    for rank in _on_nccl(cases, timeout=900):
        assert len(rank) > len(MODES)
        assert not any(rank.values()), {case: different for case, different in rank.items() if different}


def _train_wide(*, overlap, steps=5, accumulate=1, scaled=False, options=None, **ddp_options):
    """Train a model whose steps take longer than their launch: what does not wait for its stream shows."""
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(32, 1024), *[torch.nn.Linear(1024, 1024) for _ in range(3)]]
    device, options = rank_device(), dict(options or {})
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=2, **ddp_options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=1024.0)
    if overlap:
        overlap_optimizer(ddp, optimizer, scaler=scaler, **options)
    for step, x in enumerate(batches(steps * accumulate)):
        last = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            scaler.scale(ddp(x.to(device)).square().mean()).backward()
        if not last:
            continue
        if not overlap:
            scaler.unscale_(optimizer)
            if "clip" in options:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), options["clip"].max_norm)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in ddp.parameters()], optimizer.state_dict()


AFTER = {"mode": OverlapMode.AFTER_REDUCE}
WIDE = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "no_sync": {"accumulate": 3},
    "clip": {"options": {**AFTER, "clip": GlobalNorm(0.01)}},
    "scaler": {"scaled": True, "options": AFTER},
    "scaler and clip": {"scaled": True, "options": {**AFTER, "clip": GlobalNorm(0.01)}},
}


def _every_wide(_):
    return {
        name: same(_train_wide(overlap=False, **arguments), _train_wide(overlap=True, **arguments))
        for name, arguments in WIDE.items()
    }


def test_steps_that_take_longer_than_their_launch():
    for rank in _on_nccl(_every_wide, timeout=300):
        assert all(rank.values()), rank
