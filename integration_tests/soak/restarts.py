"""Jobs that torchrun restarts after a rank was killed: bitwise equal to uninterrupted jobs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_utils.testing import same_bits

__all__ = ["restart"]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "restarted_training.py"
STEPS = 12


def restart(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Restart as many jobs as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    chance = random.Random(f"restarts/{options.seed}")
    for _ in range(options.restarts):
        began = time.monotonic()
        ranks, step = chance.choice([2, 3, 4]), chance.randrange(1, STEPS)
        through, killed = _run(ranks), _run(ranks, f"--fail-at={step}")
        problems = [found for found in (through, killed) if isinstance(found, str)]
        if not problems and not same_bits(through, killed):
            problems = ["other bits than those of the job that ran through"]
        outcome = {"world_size": ranks, "killed_at": step, "verdict": "wrong" if problems else "right"}
        write({**outcome, "problems": problems, "took": round(time.monotonic() - began, 1)})


def _run(ranks: int, *arguments: str) -> Any:
    """Run a job; return its last checkpoint, or what is wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(EXAMPLE)]
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        done = subprocess.run(
            [*command, folder, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode or not done.stdout.startswith(f"attempt {len(arguments)}"):
            return f"exit code {done.returncode}: {done.stdout} {done.stderr[-600:]}"
        return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
