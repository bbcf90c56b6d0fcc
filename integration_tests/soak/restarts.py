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

from soak.trainings import BASELINES, TRAININGS

__all__ = ["restart"]

_SCRIPT = Path(__file__).with_name("restarted.py")
# Their states have no residuals to resume, or choose again, so they are not tested here.
_LEFT_OUT = ("auto", "FSDP2", *BASELINES)


def restart(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Restart as many jobs as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    names = [name for name in TRAININGS if options.training in name and not name.startswith(_LEFT_OUT)]
    chance = random.Random(f"restarts/{options.seed}")
    chance.shuffle(names)
    through: dict[tuple[str, int], list[str]] = {}
    for number in range(options.restarts):
        training = names[number % len(names)]
        size = min(TRAININGS[training].world_sizes, key=lambda size: abs(size - 3))
        write(_outcome(training, size, options.seed * 1000 + number, through))


def _outcome(
    training: str, size: int, seed: int, through: dict[tuple[str, int], list[str]]
) -> dict[str, Any]:
    began = time.monotonic()
    outcome: dict[str, Any] = {"training": training, "world_size": size, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        folder = Path(name)
        key = training, size
        problems = []
        if key not in through:
            (folder / "through").mkdir()
            problems += _run(folder / "through", training, size, None)
            through[key] = _bits(folder / "through", size)
        (folder / "killed").mkdir()
        problems += _run(folder / "killed", training, size, seed)
        attempts = folder / "killed" / "attempts"
        attempt, first = attempts.read_text().split() if attempts.exists() else ("0", "0")
        if not problems and attempt != "1":
            problems.append(f"{attempt} restarts")
        if not problems and _bits(folder / "killed", size) != through[key]:
            problems.append("other bits than the job that ran through")
    outcome |= {"resumed_at": int(first), "verdict": "wrong" if problems else "right"}
    if problems:
        outcome["problems"] = problems
    return {**outcome, "took": round(time.monotonic() - began, 1)}


def _run(folder: Path, training: str, size: int, seed: int | None) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(_SCRIPT), str(folder), training]
    command += [] if seed is None else [f"--seed={seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
    except subprocess.TimeoutExpired:
        return ["not done after 600 s"]
    return [f"exit code {done.returncode}: {done.stderr[-600:]}"] if done.returncode else []


def _bits(folder: Path, size: int) -> list[str]:
    files = [folder / f"bits-{rank}" for rank in range(size)]
    return [path.read_text() if path.exists() else "" for path in files]
