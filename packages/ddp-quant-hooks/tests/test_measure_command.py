"""The measuring command and its function on real ranks: results, and errors on every rank."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from host_names import take_host_name

from ddp_quant_hooks.measure import Model, measure
from ddp_quant_hooks.measure.__main__ import main, parse, run
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SMALLEST = 1 << 20


def test_torchrun_starts_it_and_rank_0_alone_reports(tmp_path):
    file = tmp_path / "report.json"
    options = "--budget=1.5", f"--json={file}", "--params=7000000", "--step-seconds=0.2"
    done = subprocess.run(
        [*TORCHRUN, "-m", "ddp_quant_hooks.measure", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count("This is one host with 2 ranks and slow links inside it") == 1, "one rank prints"
    report = json.loads(file.read_text())
    assert f"Take: {report['advice']['hook']}" in said
    assert report["hosts"] == [0, 0]
    assert [link["place"] for link in report["links"]] == ["inside hosts"]
    assert min(min(link["bandwidth"], link["latency"]) for link in report["links"]) > 0
    small = {name: exchanges[0] for name, exchanges in report["hooks"].items()}
    assert list(small) == ["fp32", "bf16", "8 bits", "4 bits", "low rank"]
    assert {exchange["size"] for exchange in small.values()} == {SMALLEST}
    assert min(exchange["seconds"] for exchange in small.values()) > 0
    values = SMALLEST // 4
    # Between two ranks each value is sent once; few bits have a scale of 4 bytes for 128 and for 32 values.
    assert {name: exchange["bytes_sent"] for name, exchange in small.items()} == {
        "fp32": 4 * values,
        "bf16": 2 * values,
        "8 bits": values + 4 * values // 128,
        "4 bits": values // 2 + 4 * values // 32,
        "low rank": 2 * 8 * 512 * (1 / 2 + 4 / 32),  # two factors of eight columns
    }
    # Half a unit in the last place, in the L2 norm, is less than 2^-9 for bf16; int8 and int4 have 127 and 7
    # steps.
    bounds = {"fp32": (0.0, 1e-6), "bf16": (1e-3, 4e-3), "8 bits": (4e-3, 1e-2), "4 bits": (0.05, 0.15)}
    bounds["low rank"] = (0.5, 1.0)
    for name, (low, high) in bounds.items():
        assert low <= small[name]["relative_error"] <= high, name
        assert small[name]["bytes_on_host_link"] == 0, "there is one host"
    assert report["warnings"] == []
    assert list(report["estimate"]["steps"]) == list(small)
    assert min(step["seconds"] for step in report["estimate"]["steps"].values()) > 0.2


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


def test_parameters_are_a_whole_number_also_in_powers_of_ten(capsys):
    assert parse(["--params=7e6", "--step-seconds=0.2"]).params == 7_000_000
    for text in ("7.5", "7M", "inf", "nan"):
        with pytest.raises(SystemExit):
            parse([f"--params={text}", "--step-seconds=0.2"])
        assert f"--params: must be a whole number, got {text}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--timeout", "--budget"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_that_nothing_can_take_are_refused_before_anything_is_joined(option, seconds, capsys):
    with pytest.raises(SystemExit):
        parse([f"{option}={seconds}"])
    assert f"{option}: must be positive and finite, got {seconds}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_they_are_refused_before_anything_is_joined():
    with pytest.raises(ValueError, match="--device cuda needs a GPU and a torch with NCCL on every rank"):
        run(parse(["--device", "cuda"]))
    assert not dist.is_initialized()


def _measured_on_hosts(rank):
    """Refusals first, then three ranks on one host, and four on two hosts."""
    seen = {}
    with pytest.raises((ValueError, AgreementError)) as caught:
        measure(budget=-1.0 if rank == 1 else 5.0)
    seen["budget"] = f"{type(caught.value).__name__}: {caught.value}"
    own = [dist.new_group([member]) for member in range(4)][rank]
    with pytest.raises(ValueError, match="at least two ranks, got one"):
        measure(own)
    with pytest.raises((ValueError, AgreementError), match="device is 'nothing'"):
        measure(device="nothing" if rank == 1 else "cpu")
    # As in a program that evaluates in double precision, and draws the same random numbers on all ranks.
    torch.set_default_dtype(torch.float64)
    random, shares = torch.get_rng_state(), []
    three = dist.new_group([0, 1, 2])
    if rank < 3:  # of three ranks, one sends more
        with torch.no_grad(), torch.device("meta"):
            report = measure(three, budget=1e-6, progress=lambda share, _: shares.append(share))
        seen["three"], advice = report.as_dict(), report.for_model(Model(7_000_000, 0.2)).advice
        assert advice.hook in report.hooks
        assert shares == sorted(shares)
        assert 0 <= shares[0] <= shares[-1] <= 1
    assert torch.equal(torch.get_rng_state(), random)
    if take_host_name("0011"[rank]):
        report = measure(budget=1e-6)
        seen["two hosts"] = report.as_dict(), report.as_text()
    return seen


def test_ranks_of_several_hosts_get_one_report_with_the_bytes_on_a_hosts_link():
    first, *others = run_ranks(_measured_on_hosts, 4, timeout=patience(100))
    assert first["budget"].startswith("AgreementError: measure: rank 1 cannot go on: ValueError: budget must")
    assert others[0]["budget"] == "ValueError: budget must be positive and finite, got -1.0"
    # The smallest buckets are measured whatever the budget.
    assert [seen["three"] for seen in others[:2]] == [first["three"]] * 2
    measured = first["three"]["hooks"]
    assert list(measured) == ["fp32", "bf16", "8 bits", "4 bits", "low rank"]
    assert [[one["size"] for one in found] for found in measured.values()] == [[SMALLEST]] * 5
    if "two hosts" not in first:
        pytest.skip("this user cannot give a process a host name of its own")
    report, text = first["two hosts"]
    assert [other["two hosts"][0] for other in others] == [report] * 3
    assert report["hosts"] == [0, 0, 1, 1]
    assert report["cluster"].startswith("2 hosts with 2 ranks each")
    assert [link["place"] for link in report["links"]] == ["inside hosts", "between hosts"]
    links = {name: exchanges[0]["bytes_on_host_link"] for name, exchanges in report["hooks"].items()}
    # Around a ring, one rank of a host sends to the other host.
    assert links["fp32"] == 2 * links["bf16"] == 2 * 3 / 4 * SMALLEST
    assert 0 < links["low rank"] < links["4 bits"] < links["8 bits"] < links["fp32"]
    assert report["warnings"] == []
    assert f"{links['8 bits'] / 1e6:.2f}" in text
