r"""A job that torchrun may restart: 4-bit gradients with feedback, overlapped steps, one checkpoint file.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        docs/examples/restarted_training.py runs/restarted --fail-at 7

``--fail-at`` lets the last rank die in the first attempt, as on a lost machine. Needs ddp-optim-overlap and
ddp-quant-hooks.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

STEPS, EVERY = 12, 3
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def join_process_group() -> None:
    """Find the other ranks of this attempt, and none of an earlier one."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt {ATTEMPT}", store),
        rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a file completely, or not at all."""
    torch.save(checkpoint, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(folder: Path, fail_at: int | None) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    state = QuantizedAllreduceState(bits=4, min_bytes=0).bind(ddp)
    handle = overlap_optimizer(
        ddp, optimizer, comm_hook=quantized_allreduce_hook, comm_state=state
    )
    path, first = folder / "checkpoint.pt", 0
    checkpoint = None
    if RANK == 0 and path.exists():  # only its machine needs the file
        checkpoint = torch.load(path, weights_only=True)
    names = "model", "optimizer", "step"
    shared = [checkpoint and {name: checkpoint[name] for name in names}]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        # DDP's final buckets, made after a first pass, decide which values share a scale.
        with handle.pause():
            ddp(torch.zeros(1, 64)).sum().backward()
        ddp.module.load_state_dict(shared[0]["model"])
        optimizer.load_state_dict(shared[0]["optimizer"])
        state.scatter_state_dict(checkpoint["residuals"] if checkpoint else None)
        first = shared[0]["step"]
    for step in range(first, STEPS):
        if (
            step == fail_at
            and ATTEMPT == 0
            and dist.get_rank() == dist.get_world_size() - 1
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        # Batches depend on rank and step alone, so that a restarted job sees the same ones.
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + RANK))
        optimizer.zero_grad()
        (
            ddp(x) - x
        ).square().mean().backward()  # averages in 4 bits and steps, bucket by bucket
        if (step + 1) % EVERY == 0:
            handle.wait()  # no rank has failed in this step
            residuals = state.gather_state_dict()  # rank 0 gets the residuals of all
            if RANK == 0:
                parts = {
                    "model": ddp.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                save(path, {**parts, "residuals": residuals, "step": step + 1})
    if RANK == 0:
        print(f"attempt {ATTEMPT}: steps {first} to {STEPS}")


def main() -> None:
    """Read the command line, train, and leave the process group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fail-at", type=int)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    join_process_group()
    train(arguments.folder, arguments.fail_at)
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
