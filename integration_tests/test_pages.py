"""Programs and snippets of the READMEs and of the site run unchanged, and tables are up to date."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from dist_utils.testing import run_ranks, same_on_all_ranks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts),
]
# Snippets that need more than a model: tests below and frameworks/test_page.py run them.
ELSEWHERE = {DOCS / name for name in ("own-hook.md", "fsdp2.md", "frameworks.md")}


def _snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _is_program(snippet):
    return "init_process_group" in snippet


def _programs():
    found = [
        (f"{page.relative_to(ROOT)} {number}", snippet)
        for page in PAGES
        for number, snippet in enumerate(_snippets(page))
        if _is_program(snippet)
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
def test_programs_end_alike_on_all_ranks(program, tmp_path):
    assert "barrier()" in program
    (tmp_path / "example.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = _run([*launcher, "example.py"], tmp_path)
    told = dict(re.findall(r"rank (\d): (-?[\d.]+)?", output))
    assert sorted(told) == ["0", "1"]
    assert told["0"] == told["1"]


def _anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site create them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("readme", PAGES[:6], ids=lambda readme: readme.parent.name)
def test_readmes_are_short_and_their_links_have_a_target(readme):
    assert len(readme.read_text().splitlines()) <= 160
    # Sphinx checks those of the site.
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", readme.read_text()):
        path, _, anchor = link.partition("#")
        target = (readme.parent / path).resolve() if path else readme
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_pages_have_no_directives_that_a_code_host_shows_as_they_are():
    directive = re.compile(r"(^```\{(?!eval-rst)|\{[\w:]+\}`)", re.MULTILINE)
    shown = {page: re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in PAGES}
    assert [page for page, text in shown.items() if directive.search(text)] == []


def _names(folder):
    """Return the names that a snippet uses from the program around it."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(8, 64)
    return {
        "__name__": "__main__",
        "ddp": ddp,
        "model": net,
        "optimizer": optimizer,
        "inner": optimizer,
        "scaler": torch.amp.GradScaler("cpu"),
        "batch": batch,
        "batches": [batch] * 3,
        "loss": net(batch).mean(),
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "weights": [torch.randn(32, 64) for _ in range(3)],
        "x": batch,
        "nodes": 2,
        "ranks_per_node": 1,
        "path": folder / "checkpoint.pt",
    }


def _run_snippets(rank, folder):
    os.chdir(folder)
    sys.path.insert(0, str(DOCS / "examples"))
    done = []
    for page in PAGES:
        for number, snippet in enumerate(_snippets(page)):
            if page in ELSEWHERE or _is_program(snippet):
                continue
            where = f"{page.relative_to(ROOT)} {number}"
            # No GPUs, and only a short measurement.
            here = snippet.replace('"cuda"', '"cpu"').replace("budget=20", "budget=1")
            names = _names(folder)
            ddp, batch = names["ddp"], names["batch"]
            exec(compile(here, where, "exec"), names)
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            dist.barrier()
            done.append(where)
    return done


def test_snippets_run_beside_a_model(tmp_path):
    first, second = run_ranks(_run_snippets, 2, tmp_path, timeout=110)
    assert first == second
    assert len(first) >= 18


def test_the_hook_of_the_page_passes_its_own_test(tmp_path):
    *hooks, test = _snippets(DOCS / "own-hook.md")
    (tmp_path / "my_hooks.py").write_text("\n".join(hooks))
    (tmp_path / "test_my_hooks.py").write_text(test)
    assert "2 passed" in _run(["-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path)


def _find_the_limit(_):
    (waiting,) = [snippet for snippet in _snippets(DOCS / "choose.md") if "no_sync" in snippet]
    names = {"ddp": DistributedDataParallel(torch.nn.Linear(64, 64)), "batch": torch.randn(8, 64)}
    exec(waiting, names)
    return names["alone"], names["together"]


def test_the_page_prints_the_time_with_and_without_communication():
    for alone, together in run_ranks(_find_the_limit, 2, timeout=60):
        assert alone > 0
        assert together > 0


def _run_the_page_of_fsdp2(_):
    names = {}
    for number, snippet in enumerate(_snippets(DOCS / "fsdp2.md")):
        exec(compile(snippet, f"docs/fsdp2.md {number}", "exec"), names)
    trained = [parameter.to_local() for parameter in names["model"].parameters()]
    assert same_on_all_ranks(trained, names["mesh"]["node"].get_group())
    return names["state"].statistics.bytes_ratio


@pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook",
)
def test_the_page_of_fsdp2_runs():
    assert max(run_ranks(_run_the_page_of_fsdp2, 4, timeout=100)) < 0.3


def test_tables_of_whole_steps_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks/results/whole_steps.json").read_text())
    program = "import json, sys; from whole_steps.tables import tables; print(tables(json.load(sys.stdin)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "benchmarks",
        input=json.dumps(results),
        capture_output=True,
        text=True,
        check=True,
    )
    page = (DOCS / "benchmarks" / "whole-steps.md").read_text().splitlines()
    assert [line for line in done.stdout.splitlines() if line not in page] == []
