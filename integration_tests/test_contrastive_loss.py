"""The documentation's contrastive loss: four ranks train like one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "contrastive_loss.py"


def test_four_ranks_end_with_the_parameters_of_one_process_in_both_conventions():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    moved = re.search(r"one process: parameters moved by up to (\S+) in 20 steps", done.stdout)
    assert moved is not None, done.stdout
    assert float(moved[1]) > 1  # the parameters moved, so a difference is possible
    differences = {
        name: float(value) for name, value in re.findall(r"(\w+): differs by up to (\S+)", done.stdout)
    }
    # 20 steps, each with sums of fewer than 100 products, in a different order.
    assert differences == {
        "sum": pytest.approx(0, abs=2e3 * 2**-52),
        "replicated": pytest.approx(0, abs=2e3 * 2**-52),
    }
