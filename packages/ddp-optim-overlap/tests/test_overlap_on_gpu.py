"""The parity suite with CUDA streams, over NCCL: one rank per GPU, as many as there are, two at most."""

import itertools

import pytest
import torch
from overlap_runs import FUSED, OPTIMIZERS, batches, same
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import GlobalNorm, OverlapMode, overlap_optimizer
from dist_utils.testing import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
WORLD_SIZE = min(2, max(1, GPUS))


class Wide(torch.nn.Sequential):
    """Wide enough that the steps take longer than their launch."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(32, 1024), *[torch.nn.Linear(1024, 1024)] * 2)
        self.skipped = ()


def _train(
    make_optimizer, rank, *, overlap, steps=5, accumulate=1, scaled=False, options=None, **ddp_options
):
    device = torch.device("cuda", rank)
    ddp = DistributedDataParallel(Wide().to(device), device_ids=[rank], bucket_cap_mb=2, **ddp_options)
    optimizer = make_optimizer(ddp.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=1024.0)
    options = dict(options or {})
    if overlap:
        overlap_optimizer(ddp, optimizer, scaler=scaler, **options)
    for step, x in enumerate(batches(steps * accumulate, rank=rank)):
        if step % accumulate < accumulate - 1:
            with ddp.no_sync():
                scaler.scale(ddp(x.to(device)).square().mean()).backward()
            continue
        scaler.scale(ddp(x.to(device)).square().mean()).backward()
        if not overlap:
            scaler.unscale_(optimizer)
            if "clip" in options:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), options["clip"].max_norm)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in ddp.parameters()], optimizer.state_dict()


def _equal(make, rank, **arguments):
    return same(_train(make, rank, overlap=False, **arguments), _train(make, rank, overlap=True, **arguments))


def _optimizers(rank):
    seen = {}
    for (name, (make, options)), mode, view in itertools.product(
        OPTIMIZERS.items(), OverlapMode, (False, True)
    ):
        kinds = [{"foreach": True}, {"foreach": False}, *([{"fused": True}] if name in FUSED else [])]
        for kind in kinds:
            seen[name, mode.name, view, str(kind)] = _equal(
                lambda parameters, make=make, both={**options, **kind}: make(parameters, **both),
                rank,
                gradient_as_bucket_view=view,
                options={"mode": mode},
            )
    return seen


def test_every_optimizer_on_side_streams():
    for rank in run_ranks(_optimizers, WORLD_SIZE, backend="nccl", timeout=600):
        assert all(rank.values()), [case for case, equal in rank.items() if not equal]


def _modes(rank):
    after = {"mode": OverlapMode.AFTER_REDUCE}

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    return {
        "static graph": _equal(adamw, rank, static_graph=True),
        "find_unused": _equal(adamw, rank, find_unused_parameters=True),
        "no_sync": _equal(adamw, rank, accumulate=3),
        "clip": _equal(adamw, rank, options={**after, "clip": GlobalNorm(0.01)}),
        "scaler": _equal(adamw, rank, scaled=True, options=after),
        "scaler and clip": _equal(adamw, rank, scaled=True, options={**after, "clip": GlobalNorm(0.01)}),
    }


def test_every_way_to_run_ddp_on_side_streams():
    for rank in run_ranks(_modes, WORLD_SIZE, backend="nccl", timeout=300):
        assert all(rank.values()), rank
