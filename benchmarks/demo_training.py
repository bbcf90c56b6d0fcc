"""A rank of the demo: it trains several copies of one model, one step of each in turns.

There is one copy per way to average gradients, and one without communication, which shows the computation
time of a step. Because they take turns, other load on the machine slows all of them equally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ddp_compress_hooks import bf16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import same_on_all_ranks, tcp_bytes_sent

ROOT = Path(__file__).parents[1]
COMPUTE, HALF, QUANTIZED, OVERLAPPED = "no communication", "16 bits", "8 bits", "8 bits + overlap"
WAYS = {
    COMPUTE: "with ddp.no_sync():",
    "plain DDP": "ddp = DistributedDataParallel(model)",
    HALF: "ddp.register_comm_hook(None, bf16_compress_hook)",
    QUANTIZED: "ddp.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)",
    OVERLAPPED: "overlap_optimizer(ddp, optimizer,"
    " comm_hook=quantized_allreduce_hook, comm_state=QuantizedAllreduceState())",
}
"""The variants, with the code of each for the reader."""
WARM_UP = 3
"""Uncounted first steps: DDP rebuilds its buckets, and memory is allocated."""
ROWS, LENGTH = 2, 32
"""A rank's batch: the number of pieces of text, and the bytes in each."""
WIDTH, HEADS, HIDDEN, LAYERS = 256, 4, 2048, 3
BUCKET_MB = 4


class Block(nn.Module):
    """Causal attention, and a wide perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the next block."""
        rows, length, _ = x.shape
        projected = self.attend(self.norms[0](x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(found.transpose(1, 2).reshape(rows, length, WIDTH))
        added: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))
        return x + added


class Transformer(nn.Module):
    """Maps bytes of text to scores of the next bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, 256) scores for (rows, length) bytes."""
        scores: torch.Tensor = self.out(self.blocks(self.bytes(text) + self.places.weight[: text.shape[1]]))
        return scores


class Training:
    """A model, its optimizer, how its gradients are averaged, and its results."""

    def __init__(self, name: str) -> None:
        self.name = name
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(Transformer(), bucket_cap_mb=BUCKET_MB)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3, fused=True)
        hook, state = quantized_allreduce_hook, QuantizedAllreduceState()
        if name == HALF:
            self.ddp.register_comm_hook(None, bf16_compress_hook)
        if name == QUANTIZED:
            self.ddp.register_comm_hook(state, hook)
        if name == OVERLAPPED:
            overlap_optimizer(self.ddp, self.optimizer, comm_hook=hook, comm_state=state)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.bytes: list[int] = []

    def step(self, pieces: torch.Tensor) -> None:
        """Train with (rows, length + 1) bytes."""
        dist.barrier()
        sent = count_bytes()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        with self.ddp.no_sync() if self.name == COMPUTE else contextlib.nullcontext():
            loss = self.loss(pieces)
            loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.item())
        self.bytes.append(count_bytes() - sent)

    def loss(self, pieces: torch.Tensor) -> torch.Tensor:
        """Return the model's loss for every next byte."""
        return cross_entropy(self.ddp(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def count_bytes() -> int:
    """Return the bytes sent so far; 0 if the system does not count them."""
    try:
        return tcp_bytes_sent()
    except NotImplementedError:
        return 0


def read_text() -> torch.Tensor:
    """Return the documentation of this repository, as bytes."""
    files = sorted(
        [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guarantees/*.md"), *ROOT.glob("packages/*/README.md")]
    )
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def draw(text: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return random pieces of the text."""
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def train(steps: int, seconds: float) -> dict[str, Any]:
    """Train every variant, until the number of steps or the seconds are used up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text()
    end = len(text) * 19 // 20  # the rest is held out
    trainings = [Training(name) for name in WAYS]
    generator = torch.Generator().manual_seed(1)
    deadline = time.monotonic() + seconds
    bar = tqdm(range(-WARM_UP, steps), disable=rank != 0, unit="step", desc=f"{len(WAYS)} models in turns")
    for step in bar:
        pieces = draw(text[:end], ROWS * world_size, generator)[rank * ROWS : (rank + 1) * ROWS]
        for training in trainings if step % 2 else reversed(trainings):
            training.step(pieces)
        late = torch.tensor(step > 0 and time.monotonic() > deadline)
        dist.broadcast(late, src=0)
        if late:
            break
    bar.close()
    held_out = draw(text[end:], 64, generator)
    seen: dict[str, Any] = {"parameters": sum(p.numel() for p in trainings[0].ddp.parameters()), "ways": {}}
    for training in trainings:
        if training.name != COMPUTE and not same_on_all_ranks(training.ddp.module.state_dict()):
            raise RuntimeError(f"{training.name}: the ranks ended with different parameters")
        with torch.no_grad():
            final = training.loss(held_out).item()
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
