"""The documentation's job that logs statistics, run as a reader would."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "logged_training.py"


def test_statistics_are_logged_as_numbers(launch, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={launch.world_size}", str(SCRIPT), str(tmp_path / "runs")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^training: step (\d+), (\w+): (.*)$", done.stderr, re.MULTILINE)
    assert [(step, title) for step, title, _ in lines] == [
        (str(step), title) for step in (10, 20, 30) for title in ("gradients", "overlap")
    ]
    for step, title, text in lines:
        values = {name: float(value) for name, value in (pair.split(" ") for pair in text.split(", "))}
        if title == "overlap":
            assert values["number"] == int(step)
            assert values["stepped"] == values["buckets"] > 1
        else:
            assert 10 < values["quantized_buckets"] < 100  # for ten steps, not for all so far
            assert 0 < values["relative_error"] < 3e-2
            assert 0.25 < values["bytes_ratio"] < 0.5  # includes an exact all-reduce for every sample
    if importlib.util.find_spec("tensorboard") is not None:
        assert list((tmp_path / "runs").glob("events*"))
