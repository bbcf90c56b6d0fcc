"""A rank of the demo: it trains several copies of one model, one step of each in turns.

There is one copy per way to average gradients, and one without communication, which shows the computation
time of a step. Because they take turns, other load on the machine slows all of them equally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import Language, Task
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from training import take_step

from ddp_compress_hooks import bf16_compress_hook
from ddp_quant_hooks import LowRankState, QuantizedAllreduceState, low_rank_hook, quantized_allreduce_hook
from dist_utils.testing import same_on_all_ranks, tcp_bytes_sent

COMPUTE, HALF, QUANTIZED = "no communication", "16 bits", "8 bits"
LOW_RANK, POWER = "low rank", "PowerSGD, rank 1"
WAYS = {
    COMPUTE: "with ddp.no_sync():",
    "plain DDP": "ddp = DistributedDataParallel(model, bucket_cap_mb=4)",
    HALF: "ddp.register_comm_hook(None, bf16_compress_hook)",
    QUANTIZED: "ddp.register_comm_hook(QuantizedAllreduceState().bind(ddp), quantized_allreduce_hook)",
    LOW_RANK: "ddp = DistributedDataParallel(model, bucket_cap_mb=10_000)  # one bucket\n"
    "ddp.register_comm_hook(LowRankState(warm_up_steps=3).bind(ddp), low_rank_hook)",
    POWER: "ddp = DistributedDataParallel(model, bucket_cap_mb=10_000)\n"
    "ddp.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=3), powerSGD_hook)",
}
"""The variants, with the code of each for the reader."""
WARM_UP = 3
"""Uncounted first steps: DDP rebuilds its buckets, memory is allocated, and nobody sends factors yet."""
TEXT = partial(Language, 2, 1e-3, 64, width=256, layers=5)
"""Makes the task: two windows of text per rank and step, and a transformer of 4.0 million parameters."""
BUCKET_MB = 4
ONE_BUCKET_MB = 1e4
"""Of hooks that send next to nothing, so that the number of messages counts. PyTorch's mixes up the
collectives of several buckets on Gloo."""


class Training:
    """A model, its optimizer, how its gradients are averaged, and its results."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self._task = name, task
        torch.manual_seed(0)
        bucket_mb = ONE_BUCKET_MB if name in (LOW_RANK, POWER) else BUCKET_MB
        self.ddp = DistributedDataParallel(task.model(), bucket_cap_mb=bucket_mb)
        self.optimizer = task.optimizer(self.ddp.parameters())
        if name == HALF:
            self.ddp.register_comm_hook(None, bf16_compress_hook)
        if name == QUANTIZED:
            self.ddp.register_comm_hook(QuantizedAllreduceState().bind(self.ddp), quantized_allreduce_hook)
        if name == LOW_RANK:
            state = LowRankState(warm_up_steps=WARM_UP).bind(self.ddp)
            self.ddp.register_comm_hook(state, low_rank_hook)
        if name == POWER:
            power = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=WARM_UP)
            self.ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.bytes: list[int] = []

    def step(self, chosen: torch.Tensor) -> None:
        """Train with these examples."""
        dist.barrier()
        sent = count_bytes()
        began = time.perf_counter()
        with self.ddp.no_sync() if self.name == COMPUTE else contextlib.nullcontext():
            loss = take_step(self._task, self.ddp, self.optimizer, chosen)
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.item())
        self.bytes.append(count_bytes() - sent)


def count_bytes() -> int:
    """Return the bytes sent so far; 0 if the system does not count them."""
    try:
        return tcp_bytes_sent()
    except NotImplementedError:
        return 0


def train(steps: int, seconds: float) -> dict[str, Any]:
    """Train every variant, until the number of steps or the seconds are used up."""
    rank, world_size, task = dist.get_rank(), dist.get_world_size(), TEXT()
    trainings = [Training(name, task) for name in WAYS]
    generator = torch.Generator().manual_seed(1)
    deadline = time.monotonic() + seconds
    title = f"{len(WAYS)} models in turns, at most {seconds:g} s"
    bar = tqdm(range(-WARM_UP, steps), disable=rank != 0, unit="step", desc=title)
    for step in bar:
        chosen = task.draw(world_size * task.batch, generator).view(world_size, -1)[rank]
        for training in trainings if step % 2 else reversed(trainings):
            training.step(chosen)
        late = torch.tensor(step > 0 and time.monotonic() > deadline)
        dist.broadcast(late, src=0)
        if late:
            break
    bar.close()
    seen: dict[str, Any] = {"parameters": sum(p.numel() for p in trainings[0].ddp.parameters()), "ways": {}}
    for training in trainings:
        if training.name != COMPUTE and not same_on_all_ranks(training.ddp.module.state_dict()):
            raise RuntimeError(f"{training.name}: the ranks ended with different parameters")
        with torch.no_grad():
            final = task.evaluate(training.ddp)["loss"]
        slowest, losses = torch.tensor(training.seconds), torch.tensor(training.losses)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(losses)
        seen["ways"][training.name] = {
            "code": WAYS[training.name],
            "seconds": slowest[WARM_UP:].tolist(),
            "losses": (losses / world_size)[WARM_UP:].tolist(),
            "bytes": training.bytes[WARM_UP:],
            "held_out_loss": final,
        }
    return seen


def main() -> None:
    """Join the other ranks, train, and write the results from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        seen = train(options.steps, options.seconds)
        if dist.get_rank() == 0:
            options.file.write_text(json.dumps(seen))
        dist.barrier()  # lets Gloo's threads finish: a process that exits before they do can abort
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
