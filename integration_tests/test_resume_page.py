"""The program of docs/resume.md goes on where it ended: with the same bits, or with more ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "resume.md"


def _train(folder, steps, ranks=2):
    """Run the program up to a step, from its last checkpoint; return what each rank has printed."""
    folder.mkdir(exist_ok=True)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (folder / "example.py").write_text(program)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "example.py"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"rank (\d): (-?[\d.]+)", done.stdout))


def test_a_job_that_ended_goes_on(tmp_path):
    _train(tmp_path / "interrupted", 6)
    resumed = _train(tmp_path / "interrupted", 12)
    assert sorted(resumed) == ["0", "1"]
    assert len(set(resumed.values())) == 1
    assert resumed == _train(tmp_path / "through", 12)
    more_ranks = _train(tmp_path / "interrupted", 15, ranks=3)
    assert sorted(more_ranks) == ["0", "1", "2"]
    assert len(set(more_ranks.values())) == 1
