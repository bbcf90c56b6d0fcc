"""The documentation's job that torchrun restarts: a rank dies, and the result is the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "restarted_training.py"


def _start(folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, "--max-restarts=1", "--monitor-interval=0.1", str(SCRIPT), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _same(one, other):
    """Compare nested containers, with tensors bitwise."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


@pytest.mark.exhaustive
def test_a_job_with_a_dead_rank_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    jobs = [_start(tmp_path / "killed", "--fail-at=7"), _start(tmp_path / "through")]
    outputs = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert [printed for printed, _ in outputs] == ["attempt 1: steps 6 to 12\n", "attempt 0: steps 0 to 12\n"]
    killed, through = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("killed", "through"))
    assert through["step"] == 12
    assert any(residual.any() for residual in _tensors(through["residuals"]))
    assert _same(killed, through)


def _tensors(one):
    if isinstance(one, torch.Tensor):
        return [one]
    children = one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else []
    return [tensor for child in children for tensor in _tensors(child)]
