"""Train with 8-bit gradients, an overlapped AdamW, a cosine schedule, and a restart from a checkpoint.

    torchrun --nproc-per-node 2 docs/examples/overlapped_training.py

The job trains to the end, then a second one starts from the checkpoint of its middle: both end with the
same parameters, to the bit. Needs ddp-optim-overlap and ddp-quant-hooks.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import OverlapHandle, overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

STEPS, WARM_UP, HIDDEN = 60, 6, 256


def factor(step: int) -> float:
    """Return the learning rate's factor: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


class Job:
    """A model and everything that a step needs."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, 16),
        )
        self.ddp = DistributedDataParallel(net.to(device), bucket_cap_mb=0.1)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=3e-3, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.overlap: OverlapHandle = overlap_optimizer(
            self.ddp,
            self.optimizer,
            comm_hook=quantized_allreduce_hook,
            comm_state=QuantizedAllreduceState(min_bytes=0),
        )
        self.device = device

    def train(self, first: int, last: int) -> float:
        """Run the ordinary loop over steps ``first`` to ``last``; return the last loss."""
        target = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(
            self.device
        )
        for step in range(first, last):
            # Batches depend only on rank and step: a restarted job sees the same ones.
            seed = 1000 * step + dist.get_rank()
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(
                self.device
            )
            self.optimizer.zero_grad()
            loss = (self.ddp(x) - x @ target).square().mean()
            loss.backward()  # averages in 8 bits and steps, bucket by bucket
            self.optimizer.step()  # finds nothing left to do
            self.scheduler.step()
        return float(loss.detach())

    def checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint in the usual form."""
        self.overlap.wait()  # no rank has failed in the last step
        return {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        # Which values share a scale depends on DDP's final buckets, which it makes after a
        # first pass. That pass must not step.
        with self.overlap.pause():
            self.ddp(torch.zeros(1, 64, device=self.device)).sum().backward()
        self.optimizer.zero_grad()
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])


def main() -> None:
    """Train once through, and once more from the middle."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if on_gpus
        else torch.device("cpu")
    )
    if on_gpus:
        torch.cuda.set_device(device)  # where collectives of this rank run
    dist.init_process_group("nccl" if on_gpus else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank-{dist.get_rank()}.pt"
        job = Job(device)
        start = job.train(0, 1)
        job.train(1, STEPS // 2)
        torch.save(job.checkpoint(), path)
        end = job.train(STEPS // 2, STEPS)
        through = job.checkpoint()
        report = job.overlap.wait()
        job.overlap.remove()

        job = Job(device)
        job.load(torch.load(path))
        job.train(STEPS // 2, STEPS)
        resumed = job.checkpoint()
    same = all(
        torch.equal(one, resumed["model"][name]) for name, one in through["model"].items()
    )
    equal = torch.tensor(int(same), device=device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # on every rank
    if dist.get_rank() == 0:
        print(
            f"loss {start:.3f} -> {end:.3f}, "
            f"learning rate {job.scheduler.get_last_lr()[0]:.1e}"
        )
        print(
            f"{len(report.stepped)} of {report.buckets} buckets stepped inside backward()"
        )
        print(
            f"restarted from step {STEPS // 2}: {'the same bits' if equal else 'DIFFERENT'}"
        )
    del job  # a model that outlives its group may wait forever for a thread of Gloo
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
