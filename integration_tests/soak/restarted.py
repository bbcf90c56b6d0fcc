"""Jobs that torchrun restarts after a rank was killed: bitwise equal to uninterrupted jobs.

Also the program that torchrun starts.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from trainings import BASELINES, TRAININGS, Places

from dist_utils import resolve_group
from soak.faults import EVERY
from soak.records import digests

__all__ = ["restart"]

STEPS = 24
LEFT_OUT = ("auto", "FSDP2", *BASELINES)
"""Their states have no residuals to resume, or choose again."""


def restart(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Restart as many jobs as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    names = [name for name in TRAININGS if options.training in name and not name.startswith(LEFT_OUT)]
    random.Random(f"restarts/{options.seed}").shuffle(names)
    for number in range(options.restarts):
        training, seed = names[number % len(names)], options.seed * 1000 + number
        began = time.monotonic()
        through, killed = _run(training, None), _run(training, seed)
        problems = [] if through == killed else [f"{through} without and {killed} with a killed rank"]
        outcome = {"training": training, "seed": seed, "verdict": "wrong" if problems else "right"}
        write({**outcome, "problems": problems, "took": round(time.monotonic() - began, 1)})


def _run(training: str, seed: int | None) -> list[str]:
    """Run a job; return the digests of all ranks, or what is wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        arguments = [folder, training, *([] if seed is None else [f"--seed={seed}"])]
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            return [f"exit code {done.returncode}: {done.stderr[-600:]}"]
        attempts = {path.read_text() for path in Path(folder).glob("attempt-*")}
        if attempts != {"0" if seed is None else "1"}:
            return [f"attempts {attempts}"]
        return [path.read_text() for path in sorted(Path(folder).glob("bits-*"))]


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
    training = TRAININGS[options.training].begin(resolve_group(), Places())
    for step in range(training.resume(options.folder), STEPS):
        if attempt == 0 and options.seed is not None:
            _draw_death(options.seed, step, rank, world_size)
        training.step(step)
        if (step + 1) % EVERY == 0:
            training.save(options.folder, step + 1)
    (options.folder / f"bits-{rank}").write_text(" ".join(digests(training.tensors())))
    (options.folder / f"attempt-{rank}").write_text(str(attempt))
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
