"""A job that torchrun restarts: one rank is killed in the first attempt, at a random moment."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from soak.faults import EVERY
from soak.records import digests
from soak.trainings import TRAININGS

STEPS = 24


def main() -> None:
    """Train from the last checkpoint that all ranks have to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("training")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    # As in the guide: every attempt has its own keys.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {attempt}", store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    training = TRAININGS[options.training].begin()
    first = training.resume(options.folder)
    for step in range(first, STEPS):
        if attempt == 0 and options.seed is not None:
            _draw_death(options.seed, step, rank, world_size)
        training.step(step)
        if (step + 1) % EVERY == 0:
            training.save(options.folder, step + 1)
    (options.folder / f"bits-{rank}").write_text(" ".join(digests(training.tensors())))
    if rank == 0:
        (options.folder / "attempts").write_text(f"{attempt} {first}")
    dist.barrier()  # lets Gloo's threads finish
    training.close()
    dist.destroy_process_group()


def _draw_death(seed: int, step: int, rank: int, world_size: int) -> None:
    """Kill one rank soon, if this is its step."""
    chance = random.Random(seed)
    if (rank, step) == (chance.randrange(world_size), chance.randrange(EVERY + 1, STEPS - 1)):
        kill = threading.Timer(chance.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()


if __name__ == "__main__":
    main()
