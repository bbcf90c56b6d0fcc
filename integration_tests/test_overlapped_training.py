"""The documentation's composed job, run as a reader would; and the overlap with the quantized hooks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import AutoState, QuantizedAllreduceState, auto_hook, quantized_allreduce_hook

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "overlapped_training.py"


def test_quantized_hook_overlapped_adamw_cosine_schedule_and_restart(launch):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={launch.world_size}", str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    losses = re.search(r"loss (\S+) -> (\S+), learning rate (\S+)", done.stdout)
    assert losses is not None, done.stdout
    first, last, rate = map(float, losses.groups())
    assert last < 0.6 * first
    assert rate < 1e-5
    buckets = re.search(r"(\d+) of (\d+) buckets stepped", done.stdout)
    assert buckets is not None
    assert buckets[1] == buckets[2] > "1"
    assert "the same bits" in done.stdout


def _quantized(rank):
    """Train without the overlap, with it, and with released gradients, with the same hook."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    found = []
    for overlap in (None, {}, {"release_gradients": True}):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(device), bucket_cap_mb=0.01
        )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        state = QuantizedAllreduceState(min_bytes=0, error_feedback="both")
        if overlap is None:
            ddp.register_comm_hook(state, quantized_allreduce_hook)
        else:
            overlap_optimizer(ddp, optimizer, comm_hook=quantized_allreduce_hook, comm_state=state, **overlap)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(10):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()]))
    return [torch.equal(found[0], other) for other in found[1:]]


def test_the_bits_of_the_ordinary_loop_with_a_quantized_hook(launch):
    assert launch(_quantized, timeout=120) == [[True, True]] * launch.world_size


def _chosen(rank):
    """Train with a hook alone, and with a choice between two copies of it, without and with the overlap."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    found, choices = [], []
    for chooses, overlaps in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(device), bucket_cap_mb=0.01
        )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        state, hook = QuantizedAllreduceState(min_bytes=0), quantized_allreduce_hook
        if chooses:
            alike = [QuantizedAllreduceState(min_bytes=0) for _ in range(2)]
            candidates = {str(number): (one, hook) for number, one in enumerate(alike)}
            state, hook = AutoState(candidates=candidates), auto_hook  # 31 of 70 steps
        if overlaps:
            overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
        else:
            ddp.register_comm_hook(state, hook)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(70):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()]))
        if chooses:
            choices.append(state.choice.candidate)
            state.close()
    return [torch.equal(found[0], other) for other in found[1:]], choices


def test_a_choice_with_the_overlap_has_the_bits_of_the_chosen_hook(launch):
    results = launch(_chosen, timeout=120)
    assert [equal for equal, _ in results] == [[True, True]] * launch.world_size
    assert all(choices == results[0][1] for _, choices in results)
