"""Jobs that torchrun restarts after a rank was killed: bitwise equal to uninterrupted jobs."""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pages import DOCS, end_of, program

from dist_utils.testing import same_bits

EXAMPLE, STEPS = DOCS / "examples" / "restarted_training.py", 12


def restart(options: Any) -> Iterator[dict[str, Any]]:
    """Restart as many jobs as the options of the command line say, and yield each outcome."""
    chance = random.Random(f"restarts/{options.seed}")
    for _ in range(options.restarts):
        yield kill_and_restart(chance.choice([2, 3, 4]), chance.randrange(1, STEPS))


def kill_and_restart(ranks: int, step: int) -> dict[str, Any]:
    """Kill a rank in a step; return the outcome."""
    began, problems = time.monotonic(), []
    try:
        if not same_bits(_run(ranks), _run(ranks, f"--fail-at={step}")):
            problems = ["other bits than those of the job that ran through"]
    except AssertionError as error:
        problems = [str(error)[-600:]]
    outcome = {"world_size": ranks, "killed_at": step, "verdict": "wrong" if problems else "right"}
    return {**outcome, "problems": problems, "took": round(time.monotonic() - began, 1)}


def _run(ranks: int, *arguments: str) -> Any:
    """Run a job that must need as many restarts as it has arguments; return its last checkpoint."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        with program(EXAMPLE, folder, *arguments, ranks=ranks, restarts=1, **quiet) as started:
            output, _ = end_of(started)
        assert output.startswith(f"attempt {len(arguments)}"), output
        return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
