"""Log what gradient averaging and overlapped steps do: to ``logging``, and to TensorBoard if it is installed.

    torchrun --nproc-per-node 2 docs/examples/logged_training.py runs/logged

Needs ddp-optim-overlap and ddp-quant-hooks; TensorBoard shows the folder: ``tensorboard --logdir runs``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, Statistics, quantized_allreduce_hook

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STEPS, EVERY = 30, 10
log = logging.getLogger("training")


def tensorboard_writer(folder: str | None) -> SummaryWriter | None:
    """Return a writer for TensorBoard, on rank 0 and if TensorBoard is installed."""
    if (
        folder is None
        or dist.get_rank() != 0
        or importlib.util.find_spec("tensorboard") is None
    ):
        return None
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow and optional

    return SummaryWriter(folder)


def write(
    writer: SummaryWriter | None, title: str, values: dict[str, int | float], step: int
) -> None:
    """Log the numbers of rank 0, by name."""
    if dist.get_rank() == 0:
        log.info(
            "step %d, %s: %s",
            step,
            title,
            ", ".join(f"{key} {value:g}" for key, value in values.items()),
        )
    if writer is not None:
        for key, value in values.items():
            writer.add_scalar(f"{title}/{key}", value, step)


def main(folder: str | None) -> None:
    """Train a small network and log every ten steps what they have sent and hidden."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if on_gpus
        else torch.device("cpu")
    )
    if on_gpus:
        torch.cuda.set_device(device)  # where collectives of this rank run
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16)
    )
    ddp = DistributedDataParallel(net.to(device), bucket_cap_mb=0.1)
    state = QuantizedAllreduceState(min_bytes=0, sample_every=20)
    overlap = overlap_optimizer(
        ddp,
        torch.optim.AdamW(ddp.parameters(), lr=3e-3),
        comm_hook=quantized_allreduce_hook,
        comm_state=state,
    )
    writer = tensorboard_writer(folder)
    torch.manual_seed(1 + dist.get_rank())  # from here on each rank has its own data
    before = Statistics()
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 64, device=device)
        ddp.zero_grad()
        (
            ddp(x) - x[:, :16]
        ).square().mean().backward()  # averages in 8 bits and steps, bucket by bucket
        if step % EVERY == 0:
            report = overlap.wait()  # of this step
            now = state.statistics
            write(writer, "gradients", (now - before).as_dict(), step)  # of the last ten
            write(writer, "overlap", report.as_dict(), step)
            before = now
    if writer is not None:
        writer.close()
    del ddp, overlap, state  # a model that outlives its group may wait forever
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
