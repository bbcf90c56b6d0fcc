r"""Train with DistributedDataParallel and gradients in 8 bits; continue from the last checkpoint.

    torchrun --standalone --nproc-per-node 8 train_ddp.py runs/first

Copy it, and put in your model, batches and loss. It uses NCCL if every rank of a machine has a GPU,
otherwise Gloo. Started again with the same folder, it continues from the last checkpoint; all machines must
share the folder. Needs ddp-quant-hooks, on GPUs with its extra cuda.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook


def join_ranks() -> torch.device:
    """Join the other ranks that torchrun has started, and return this rank's device."""
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        # After a restart the store still has the addresses of dead ranks: use new keys.
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if not has_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def new_model() -> nn.Module:
    """Return the model: put yours here."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def batch(step: int, device: torch.device) -> torch.Tensor:
    """Return this rank's batch of a step, the same after a restart: put your data here."""
    random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(32, 256, generator=random).to(device)


class Training:
    """A model, its optimizer and its gradients in few bits."""

    def __init__(self, device: torch.device, bits: int, error_feedback: str) -> None:
        self.device = device
        self.ddp = DistributedDataParallel(new_model().to(device))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.gradients = QuantizedAllreduceState(bits=bits, error_feedback=error_feedback)
        self.ddp.register_comm_hook(self.gradients.bind(self.ddp), quantized_allreduce_hook)

    def step(self, number: int) -> torch.Tensor:
        """Train on one batch, and return the loss."""
        # Each rank has its own dropout masks, the same after a restart.
        torch.manual_seed(number * dist.get_world_size() + dist.get_rank())
        x = batch(number, self.device)
        loss = (self.ddp(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint; call it on every rank."""
        rank, place = dist.get_rank(), folder / f"step-{steps}"
        place.mkdir(parents=True, exist_ok=True)
        # The residuals of error feedback are this rank's own.
        torch.save(self.gradients.state_dict(), place / f"rank-{rank}.pt")
        if rank == 0:
            parts = {
                "model": self.ddp.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(
                {**parts, "steps": steps, "world_size": dist.get_world_size()},
                place / "shared.pt",
            )
        dist.barrier()  # all files are there
        if rank == 0:
            (folder / "latest.new").write_text(place.name)
            (folder / "latest.new").replace(folder / "latest")  # at once, or not at all

    def resume(self, folder: Path) -> int:
        """Load the last checkpoint, if there is one, and return the steps done."""
        if not (folder / "latest").exists():
            return 0
        place = folder / (folder / "latest").read_text()
        # DDP's final buckets, made after a first pass, decide which values share a scale.
        self.ddp(batch(0, self.device)).sum().backward()
        self.optimizer.zero_grad()
        self.gradients.discard_step()  # no optimizer step uses that pass
        shared = torch.load(place / "shared.pt", map_location="cpu", weights_only=True)
        self.ddp.module.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        if (
            shared["world_size"] == dist.get_world_size()
        ):  # residuals of other ranks do not fit
            residuals = place / f"rank-{dist.get_rank()}.pt"
            self.gradients.load_state_dict(
                torch.load(residuals, map_location="cpu", weights_only=True)
            )
        return int(shared["steps"])


def main() -> None:
    """Train, and write a checkpoint every so many steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--every", type=int, default=50, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8)
    feedback = "none", "shard", "both"  # "both" for 4 bits with SGD
    parser.add_argument("--error-feedback", choices=feedback, default="none")
    options = parser.parse_args()
    training = Training(join_ranks(), options.bits, options.error_feedback)
    first = training.resume(options.folder)
    if dist.get_rank() == 0:
        print(
            f"world size {dist.get_world_size()}, {dist.get_backend()}, from step {first}",
            flush=True,
        )
    for number in range(first, options.steps):
        loss = training.step(number)
        if (number + 1) % options.every == 0 or number + 1 == options.steps:
            training.save(options.folder, number + 1)
            if dist.get_rank() == 0:
                mib = training.gradients.statistics.bytes_sent / 2**20
                print(f"step {number + 1}: loss {loss:.4f}, {mib:.1f} MiB sent", flush=True)
    del training  # a model that outlives its group may wait forever for a thread of Gloo
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
