"""The demo, run as a reader would: its output, where it runs, and that it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import end_of

from dist_utils.testing import patience

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "demo.py"
for needed in ("matplotlib", "tqdm"):
    pytest.importorskip(needed, reason=f"the demo needs {needed}")

ROW = re.compile(
    r"^(plain DDP|\d+ bits|low rank|PowerSGD, rank 1)"
    r" +\d+ \[\d+, \d+] +-?\d+"  # the step, and its exposed part
    r" +(\d+\.\d+)x +(\S+|not counted) +(\d+\.\d+)$",
    re.MULTILINE,
)


def _start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell may make background processes ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - calls nothing else
    )


def test_every_hook_learns_the_same_and_sends_what_it_says(tmp_path):
    process = _start(tmp_path, "--steps=2")
    output, _ = end_of(process)
    rows = {name: (float(speed), sent, float(loss)) for name, speed, sent, loss in ROW.findall(output)}
    assert list(rows) == ["plain DDP", "16 bits", "8 bits", "low rank", "PowerSGD, rank 1"], output
    assert rows["plain DDP"][0] == 1
    if sys.platform == "linux":
        plain = float(rows["plain DDP"][1])
        # Each of two ranks sends all of its 4.0 million gradients: 4 bytes each, then 2, then 1 and a scale
        # of 4 bytes per 128, then factors. The rest is message headers, and buckets too small for 8 bits.
        for name, share in {
            "16 bits": 0.5,
            "8 bits": 0.258,
            "low rank": 0.005,
            "PowerSGD, rank 1": 0.006,
        }.items():
            assert share - 0.005 < float(rows[name][1]) / plain < share + 0.005, output
    # Losses are about 4 here, and differ after five steps only by rounding.
    assert all(abs(loss - rows["plain DDP"][2]) < 0.05 for _, _, loss in rows.values()), output
    first = output.splitlines()[0]
    assert first == "Training on two emulated hosts, links of 1gbit." or re.search(
        "loopback.*emulated hosts: .", first
    )
    assert (tmp_path / "build" / "demo.png").stat().st_size > 10_000
    assert str(tmp_path / "build" / "demo.png") in output


def _processes_of(folder):
    """Return the command lines of demo processes with ``folder`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}\0" in (process / "environ").read_bytes().decode(errors="replace"):
                found.append((process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def _wait_for_processes(folder, are_right, demo):
    """Wait until ``are_right`` holds for the command lines; a failure shows the demo's output."""
    # Attempts are counted instead of time, because a suspended machine makes no progress.
    for _ in range(int(patience(60) / 0.05)):
        if are_right(_processes_of(folder)):
            return
        time.sleep(0.05)
    ended, lines = demo.poll(), _processes_of(folder)
    demo.kill()
    pytest.fail(f"{ended=}, {lines=}, {demo.communicate(timeout=60)}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_no_process_is_left(tmp_path, how):
    process = _start(tmp_path)
    _wait_for_processes(
        tmp_path, lambda lines: sum("demo_training.py" in line for line in lines) == 2, process
    )
    process.send_signal(how)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if how == signal.SIGINT else -how)
    if how == signal.SIGINT:
        assert errors.strip().splitlines()[-1].endswith("stopped"), output + errors
        assert "Traceback" not in errors
    _wait_for_processes(tmp_path, lambda lines: not lines, process)
