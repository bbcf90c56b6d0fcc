"""The measuring command and its function on real ranks: results, and errors on every rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks.measure import Model, measure
from ddp_quant_hooks.measure.__main__ import main, parse, run
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SIZES = [1 << 20, 5 << 20, 25 << 20]


def _outcome(*options):
    """Run the command on two ranks; return the exit code, standard output and standard error."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*TORCHRUN, "-m", "ddp_quant_hooks.measure", *options],
        env=environ,
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_torchrun_starts_it_and_rank_0_alone_reports(tmp_path):
    file = tmp_path / "report.json"
    code, said, complaints = _outcome(
        "--budget=1.5", f"--json={file}", "--params=7000000", "--step-seconds=0.2"
    )
    assert code == 0, complaints
    assert said.count("This is one host with 2 ranks and slow links inside it") == 1, "one rank prints"
    report = json.loads(file.read_text())
    assert f"Take: {report['advice']['hook']}" in said
    assert report["hosts"] == [0, 0]
    assert [link["place"] for link in report["links"]] == ["inside hosts"]
    assert all(link["bandwidth"] > 0 and link["latency"] > 0 for link in report["links"])
    small = {name: exchanges[0] for name, exchanges in report["hooks"].items()}
    assert list(small) == ["fp32", "bf16", "8 bits", "4 bits"]
    assert all(exchange["size"] == SIZES[0] and exchange["seconds"] > 0 for exchange in small.values())
    values = SIZES[0] // 4
    # Between two ranks each value is sent once; few bits have a scale of 4 bytes for 128 and for 32 values.
    assert {name: exchange["bytes_sent"] for name, exchange in small.items()} == {
        "fp32": 4 * values,
        "bf16": 2 * values,
        "8 bits": values + 4 * values // 128,
        "4 bits": values // 2 + 4 * values // 32,
    }
    # Half a unit in the last place, in the L2 norm, is less than 2^-9 for bf16; int8 and int4 have 127 and 7
    # steps.
    bounds = {"fp32": (0.0, 1e-6), "bf16": (1e-3, 4e-3), "8 bits": (4e-3, 1e-2), "4 bits": (0.05, 0.15)}
    for name, (low, high) in bounds.items():
        assert low <= small[name]["relative_error"] <= high, name
        assert small[name]["bytes_on_host_link"] == 0, "there is one host"
    assert report["warnings"] == []
    assert list(report["estimate"]["steps"]) == list(small)
    assert all(step["seconds"] > 0.2 for step in report["estimate"]["steps"].values())


def test_a_report_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    code, said, complaints = _outcome("--json", str(tmp_path))
    assert code == 1
    assert not said
    assert "IsADirectoryError" in complaints
    assert str(tmp_path) in complaints


@pytest.mark.parametrize("world_size", [None, "1"])
def test_without_other_ranks_it_says_how_to_start_it(world_size, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(sys, "argv", ["measure"])
    assert main() == 2
    assert "torchrun --standalone --nproc-per-node 2 -m ddp_quant_hooks.measure" in capsys.readouterr().err


def test_options_of_a_model_belong_together(capsys):
    with pytest.raises(SystemExit):
        parse(["--params", "7"])
    assert "--params and --step-seconds belong together" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_they_are_refused_before_anything_is_joined():
    with pytest.raises(ValueError, match="--device cuda needs a GPU and a torch with NCCL on every rank"):
        run(parse(["--device", "cuda"]))
    assert not dist.is_initialized()


def _threads():
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _measured_on_hosts(rank):
    """Refusals first, then two hosts of two ranks in two orders, and three ranks."""
    seen = {}
    with pytest.raises((ValueError, AgreementError)) as caught:
        measure(budget=-1.0 if rank == 1 else 5.0)
    seen["budget"] = f"{type(caught.value).__name__}: {caught.value}"
    own = [dist.new_group([member]) for member in range(4)][rank]
    with pytest.raises(ValueError, match="at least two ranks, got one"):
        measure(own)
    with pytest.raises(TypeError, match="budget must be a number, got str"):
        measure(budget="5")
    with pytest.raises((ValueError, AgreementError), match="device is 'nothing'"):
        measure(device="nothing" if rank == 1 else "cpu")
    torch.set_num_threads(1)
    shares = []
    socket.gethostname = lambda: f"host {rank // 2}"
    # As in a program that evaluates in double precision, and draws the same random numbers on all ranks.
    torch.set_default_dtype(torch.float64)
    random, threads = torch.get_rng_state(), _threads()
    with torch.no_grad():
        report = measure(budget=2.0, progress=lambda share, _: shares.append(share))
    assert torch.equal(torch.get_rng_state(), random)
    assert _threads() <= threads or not GROUPS_END_WITHOUT_GIL  # each group has some
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    seen["report"], seen["text"] = report.as_dict(), report.as_text()
    socket.gethostname = lambda: f"host {rank % 2}"
    seen["in turns"] = measure(budget=1e-6).as_dict()
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        report = measure(three, budget=1e-6)
        seen["three"], advice = report.as_dict(), report.for_model(Model(7_000_000, 0.2)).advice
        assert advice.hook in report.hooks
    return seen


def test_ranks_of_several_hosts_get_one_report_with_the_bytes_on_a_hosts_link():
    first, *others = run_ranks(_measured_on_hosts, 4, timeout=patience(100))
    assert [other["report"] for other in others] == [first["report"]] * 3
    assert first["budget"].startswith("AgreementError: measure: rank 1 cannot go on: ValueError: budget must")
    assert others[0]["budget"] == "ValueError: budget must be positive and finite, got -1.0"
    report = first["report"]
    assert report["hosts"] == [0, 0, 1, 1]
    assert report["cluster"].startswith("2 hosts with 2 ranks each")
    assert [link["place"] for link in report["links"]] == ["inside hosts", "between hosts"]
    links = {name: exchanges[0]["bytes_on_host_link"] for name, exchanges in report["hooks"].items()}
    # Around a ring, one rank of a host sends to the other host.
    assert links["fp32"] == 2 * links["bf16"] == 2 * 3 / 4 * SIZES[0]
    assert 0 < links["4 bits"] < links["8 bits"] < links["fp32"]
    assert report["warnings"] == []
    assert f"{links['8 bits'] / 1e6:.2f}" in first["text"]
    in_turns = first["in turns"]
    assert in_turns["hosts"] == [0, 1, 0, 1]
    assert in_turns["hooks"]["fp32"][0]["bytes_on_host_link"] == 2 * links["fp32"], "every rank sends to it"

    # The smallest buckets are measured whatever the budget. Of three ranks, one sends more.
    three = [seen["three"] for seen in (first, *others[:2])]
    assert three == [three[0]] * 3
    sizes = {name: [one["size"] for one in found] for name, found in three[0]["hooks"].items()}
    assert sizes == dict.fromkeys(("fp32", "bf16", "8 bits", "4 bits"), SIZES[:1])
