"""DDP with batches that are dataclasses, on CPU and GPU: moved to the device, cast to bf16, trained on.

torchrun --nproc-per-node 2 docs/examples/dataclass_batches.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dist_utils import cast_forward_inputs, recursive_to, sync_module_states


@dataclass(frozen=True)
class Batch:
    """Melodies of different lengths and whether each one rises."""

    notes: PackedSequence
    rises: torch.Tensor


class RiseDetector(nn.Module):
    """Read a melody, say whether it rises."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(1, 16)
        self.decide = nn.Linear(16, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return two scores for each melody."""
        _, last = self.read(batch.notes)
        return self.decide(last[0])


def melodies(seed: int, count: int) -> Iterator[Batch]:
    """Make batches of 32 melodies with 5 to 12 notes."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        rises = torch.randint(2, (32,), generator=random)
        lengths = torch.randint(5, 13, (32,), generator=random)
        notes = [
            torch.linspace(-1, 1, length)[:, None] * (2 * rise - 1)
            + 0.3 * torch.randn(length, 1, generator=random)
            for rise, length in zip(rises.tolist(), lengths.tolist(), strict=True)
        ]
        yield Batch(pack_sequence(notes, enforce_sorted=False), rises)


def main() -> None:
    """Train, and print how often the last batches were judged rightly."""
    backend = (
        "nccl"
        if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        else "gloo"
    )
    dist.init_process_group(backend)
    gpu = backend == "nccl"
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    )
    if gpu:
        torch.cuda.set_device(device)  # where collectives of this rank run
    model = RiseDetector().to(device, torch.bfloat16)
    # A clear error on every rank if their models differ; DDP itself would hang or crash.
    sync_module_states(model, None, 250 << 20, 0, ())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    right = []
    for batch in melodies(seed=dist.get_rank(), count=120):
        # DDP itself neither moves nor casts what is inside a dataclass.
        (there,) = recursive_to(batch, device, use_side_stream_for_tensor_copies=True)
        (inputs,), _ = cast_forward_inputs(torch.bfloat16, there)
        scores = ddp(inputs)
        loss = nn.functional.cross_entropy(scores.float(), inputs.rises)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((scores.argmax(1) == inputs.rises).float().mean())

    accuracy = torch.stack(right[-20:]).mean()
    dist.all_reduce(accuracy)
    if dist.get_rank() == 0:
        print(
            f"{type(inputs).__name__} in {inputs.notes.data.dtype}, labels in "
            f"{inputs.rises.dtype}"
        )
        print(f"accuracy {accuracy.item() / dist.get_world_size():.3f}")
    del ddp  # a model that outlives its group may wait forever for a thread of Gloo
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
