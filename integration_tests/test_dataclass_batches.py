"""The documentation's example of dataclass batches, run as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "dataclass_batches.py"


def test_a_ddp_job_trains_on_dataclass_batches_in_bf16(launch):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={launch.world_size}", str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Batch in torch.bfloat16, labels in torch.int64" in done.stdout
    accuracy = re.search(r"accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) > 0.9
