"""Programs and snippets of the READMEs and of the site run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dist_utils.testing import run_ranks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def _programs():
    found = [
        (f"{readme.parent.name} {number}", snippet)
        for readme in sorted(ROOT.glob("packages/*/README.md"))
        for number, snippet in enumerate(_snippets(readme))
        if "init_process_group" in snippet
    ]
    return [
        pytest.param(program, id=name, marks=() if place == 0 else pytest.mark.exhaustive)
        for place, (name, program) in enumerate(found)
    ]


def _run(arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("program", _programs())
def test_programs_of_readmes_end_alike_on_all_ranks(program, tmp_path):
    (tmp_path / "example.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = _run([*launcher, "example.py"], tmp_path)
    told = dict(re.findall(r"rank (\d): (-?[\d.]+)?", output))
    assert sorted(told) == ["0", "1"]
    assert told["0"] == told["1"]


def test_the_hook_of_the_page_passes_its_own_test(tmp_path):
    *hooks, test = _snippets(DOCS / "own-hook.md")
    (tmp_path / "my_hooks.py").write_text("\n".join(hooks))
    (tmp_path / "test_my_hooks.py").write_text(test)
    assert "2 passed" in _run(["-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path)


def _find_the_limit(_):
    waiting, choosing = _snippets(DOCS / "network-limit.md")
    names = {"ddp": DistributedDataParallel(torch.nn.Linear(64, 64)), "batch": torch.randn(8, 64)}
    exec(waiting, names)
    exec(choosing, names)
    names["ddp"](names["batch"]).mean().backward()
    return names["alone"], names["together"]


def test_the_page_tells_the_time_with_and_without_communication():
    for alone, together in run_ranks(_find_the_limit, 2, timeout=60):
        assert alone > 0
        assert together > 0
