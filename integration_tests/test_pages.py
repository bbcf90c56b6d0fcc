"""Programs and snippets of the READMEs and of the site run unchanged."""

import importlib
import itertools
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from pages import DOCS, PAGES, run, run_program, snippets
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from dist_utils.testing import run_ranks, same_on_all_ranks

# Snippets that need more than a model: tests below run them.
ELSEWHERE = {DOCS / name for name in ("own-hook.md", "fsdp2.md")}


def _is_program(snippet):
    return "init_process_group" in snippet.text


PROGRAMS = [
    pytest.param(snippet.text, id=snippet.place, marks=pytest.mark.exhaustive if place else ())
    for place, snippet in enumerate(filter(_is_program, itertools.chain(*map(snippets, PAGES))))
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_end_alike_on_all_ranks(text, tmp_path):
    assert "barrier()" in text
    (tmp_path / "example.py").write_text(text)
    output, _ = run_program(tmp_path / "example.py", folder=tmp_path)
    told = dict(re.findall(r"rank (\d): (-?[\d.]+)", output))
    assert sorted(told) == ["0", "1"]
    assert told["0"] == told["1"]


def _names():
    """Return the names that a snippet uses from the program around it."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(8, 64)
    return {
        "ddp": ddp,
        "model": net,
        "optimizer": optimizer,
        "inner": optimizer,
        "batch": batch,
        "batches": [batch] * 3,
        "loss": net(batch).mean(),
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "weights": [torch.randn(32, 64) for _ in range(3)],
        "x": batch,
        "step": 100,
        "config": {"gradients": "int8"},
        "n": 8,
        "device": "cpu",
        "sum_of_losses": net(batch).sum(),
        "nodes": 2,
        "ranks_per_node": 1,
    }


def _run_snippets(rank, folder):
    os.chdir(folder)
    sys.path.insert(0, str(DOCS / "examples"))
    done = []
    for page in PAGES:
        for snippet in snippets(page):
            if page in ELSEWHERE or _is_program(snippet):
                continue
            # No GPUs, and only a short measurement.
            text = snippet.text.replace('"cuda"', '"cpu"').replace("budget=20", "budget=1")
            names = _names()
            run([snippet._replace(text=text)], **names)
            names["ddp"].zero_grad()
            names["ddp"](names["batch"]).square().mean().backward()
            dist.barrier()
            done.append(snippet.place)
    return done


def test_snippets_run_beside_a_model(tmp_path):
    first, second = run_ranks(_run_snippets, 2, tmp_path, timeout=110)
    assert first == second
    assert len(first) >= 18


def test_the_hook_of_the_page_passes_its_own_test(tmp_path, monkeypatch):
    *hooks, test = snippets(DOCS / "own-hook.md")
    (tmp_path / "my_hooks.py").write_text("\n".join(hook.text for hook in hooks))
    (tmp_path / "test_my_hooks.py").write_text(test.text)
    monkeypatch.syspath_prepend(tmp_path)
    tests = importlib.import_module("test_my_hooks")
    tests.test_all_ranks_get_the_same_average()
    tests.test_an_error_on_one_rank_ends_all()


def _run_the_page_of_fsdp2(_):
    names = run(snippets(DOCS / "fsdp2.md"))
    trained = [parameter.to_local() for parameter in names["model"].parameters()]
    assert same_on_all_ranks(trained, names["mesh"]["node"].get_group())
    return names["state"].statistics.bytes_ratio


@pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook",
)
def test_the_page_of_fsdp2_runs():
    assert max(run_ranks(_run_the_page_of_fsdp2, 4, timeout=100)) < 0.3
