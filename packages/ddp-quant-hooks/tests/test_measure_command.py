"""The measuring command and its function on real ranks: results, and errors on every rank."""

import itertools
import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks.measure import Model, measure
from ddp_quant_hooks.measure.__main__ import main, parse
from ddp_quant_hooks.measure.joining import find_place
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

COMMAND = [sys.executable, "-m", "ddp_quant_hooks.measure"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_RANK", "SLURM_", "TORCHELASTIC_")
SIZES = [1 << 20, 5 << 20, 25 << 20]


def _environ(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def _outcomes(*commands):
    """Run commands in parallel; return the exit code, standard output and standard error of each."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environ, **pipes) for command, environ in commands]
    try:
        said = [process.communicate(timeout=patience(100)) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]


def _is_free(port):
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return listener.connect_ex(("127.0.0.1", port)) != 0


def _slurm(rank, job):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": str(rank),
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
    }


def _free_job():
    """Return the number of a job whose port is free."""
    return next(
        job for job in itertools.count(os.getpid()) if _is_free(find_place(_environ(**_slurm(0, job))).port)
    )


def test_torchrun_starts_it_and_rank_0_alone_reports(tmp_path):
    file = tmp_path / "report.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [*("--budget", "1.5", "--json", str(file), "--params", "7000000", "--step-seconds", "0.2")]
    options += ["--world", "16", "--gbit", "10", "--gpus-per-node", "8"]
    ((code, said, complaints),) = _outcomes(
        ([*torchrun, "-m", "ddp_quant_hooks.measure", *options], _environ())
    )
    assert code == 0, complaints
    assert said.count("2 ranks on 1 node") == 1, "one rank prints"
    assert "Predicted, not measured" in said
    report = json.loads(file.read_text())
    assert f"Take: {report['advice']['hook']}" in said
    assert report["nodes"] == [[0, 1]]
    assert [link["place"] for link in report["links"]] == ["inside nodes"]
    assert all(link["bandwidth"] > 0 and link["latency"] > 0 for link in report["links"])
    hooks = {hook["name"]: hook for hook in report["hooks"]}
    assert list(hooks) == ["fp32", "bf16", "8 bits", "4 bits"]
    small = {name: hook["exchanges"][0] for name, hook in hooks.items()}
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
    assert set(report["estimate"]["steps"]) == set(hooks)
    assert all(step["seconds"] > 0.2 for step in report["estimate"]["steps"].values())
    assert "8 bits between nodes" in report["prediction"]["predicted_seconds"]


@pytest.mark.exhaustive
def test_ranks_with_other_options_both_fail_under_slurm():
    job = _free_job()
    budgets = ["4", "5"]
    outcomes = _outcomes(
        *(
            ([*COMMAND, "--budget", budget], _environ(**_slurm(rank, job)))
            for rank, budget in enumerate(budgets)
        )
    )
    for rank, (code, said, complaints) in enumerate(outcomes):
        assert code == 1
        assert not said, "nothing is printed"
        assert f"rank {rank}: AgreementError: ddp_quant_hooks.measure differs between ranks" in complaints
        assert "budget is 4.0 on rank 0, 5.0 on rank 1" in complaints


def test_a_report_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = [*("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))]
    outcomes = _outcomes(
        *(([*COMMAND, "--rank", f"{rank}", *options, "--json", str(tmp_path)], _environ()) for rank in (0, 1))
    )
    for code, said, complaints in outcomes:
        assert code == 1
        assert not said
        assert f"IsADirectoryError: --json {tmp_path} is a folder" in complaints


@pytest.mark.exhaustive
def test_a_rank_does_not_wait_forever_for_a_server_that_is_not_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        options = ["--rank", "1", "--world-size", "2", "--timeout", "1"]
        options += ["--master-addr", "127.0.0.1", "--master-port", str(mute.getsockname()[1])]
        ((code, said, complaints),) = _outcomes(([*COMMAND, *options], _environ()))
    assert code == 1
    assert not said
    assert "rank 1: " in complaints


DIES = """
import os, sys
from ddp_quant_hooks.measure import __main__ as command, trials
run, runs = trials.Trial.run, []
def run_or_die(self):
    runs.append(self)
    if len(runs) == 6:
        os._exit(7)
    return run(self)
trials.Trial.run = run_or_die
sys.exit(command.main())
"""


@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_the_other():
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = [*("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))]
    options += ["--budget", "30", "--timeout", "60"]
    (code, said, complaints), (died, _, _) = _outcomes(
        ([*COMMAND, "--rank", "0", *options], _environ()),
        ([sys.executable, "-c", DIES, "--rank", "1", *options], _environ()),
    )
    assert died == 7
    assert code == 1
    assert "rank 0: RuntimeError" in complaints
    assert "Take:" not in said


def test_without_the_extra_nothing_is_joined(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(
        sys, "argv", ["measure", "--rank", "0", "--world-size", "2", "--master-addr", "nowhere"]
    )
    assert main() == 2
    assert "MissingExtraError" in (complaint := capsys.readouterr().err)
    assert 'pip install "ddp-quant-hooks[measure]"' in complaint


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch, capsys):
    for key in os.environ:
        if key.startswith(LAUNCHERS):
            monkeypatch.delenv(key)
    monkeypatch.setattr(sys, "argv", ["measure"])
    assert main() == 2
    assert "torchrun --standalone --nproc-per-node 2 -m ddp_quant_hooks.measure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--params", "7"], "--params and --step-seconds belong together"),
        (["--gbit", "1"], "--world and --gbit belong together"),
        (
            ["--world", "9", "--gbit", "1", "--gpus-per-node", "2"],
            "ranks_per_node must divide world, got 2 and 9",
        ),
        (["--params", "-7", "--step-seconds", "1"], "parameters must be positive, got -7"),
        (["--budget", "0"], "--budget must be positive and at most 1e+07, got 0"),
        (["--budget", "inf"], "--budget must be positive and at most 1e+07, got inf"),
        (["--timeout", "nan"], "--timeout must be positive and at most 1e+07, got nan"),
        (["--gpus-per-node", "8"], "--gpus-per-node belongs to --world and --gbit"),
        (["--backend", "nccl", "--device", "cpu"], "--backend nccl needs --device cuda"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_joined(options, message, capsys):
    with pytest.raises(SystemExit):
        parse(options)
    assert message in capsys.readouterr().err


def _threads():
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _measured_in_no_time(rank):
    report = measure(budget=1e-6)
    return report.as_dict(), report.for_model(Model(parameters=7_000_000, step_seconds=0.2)).advice.hook


def test_the_smallest_buckets_are_measured_whatever_the_budget():
    (first, advice), (second, _) = run_ranks(_measured_in_no_time, 2)
    assert first == second
    assert [[entry["size"] for entry in hook["exchanges"]] for hook in first["hooks"]] == [[SIZES[0]]] * 4
    assert all(hook["exchanges"][0]["seconds"] > 0 for hook in first["hooks"])
    assert advice in [hook["name"] for hook in first["hooks"]]


def _measured_in_a_grid(rank):
    """Refusals first, then two nodes of two ranks."""
    seen = {}
    with pytest.raises((ValueError, AgreementError)) as caught:
        measure(budget=-1.0 if rank == 1 else 5.0)
    seen["budget"] = f"{type(caught.value).__name__}: {caught.value}"
    own = [dist.new_group([member]) for member in range(4)][rank]
    with pytest.raises(ValueError, match="at least two ranks, got one"):
        measure(own)
    some = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    with pytest.raises(ValueError, match="needs all 4 ranks, process_group has 2"):
        measure(some)
    with pytest.raises(TypeError, match="budget must be a number, got str"):
        measure(budget="5")
    with pytest.raises((ValueError, AgreementError), match="device is 'nothing'"):
        measure(device="nothing" if rank == 1 else "cpu")
    torch.set_num_threads(1)
    shares = []
    # As in a program that evaluates in double precision, and draws the same random numbers on all ranks.
    torch.set_default_dtype(torch.float64)
    random, threads = torch.get_rng_state(), _threads()
    with torch.no_grad():
        report = measure(budget=2.0, node="ab"[rank // 2], progress=lambda share, _: shares.append(share))
    assert torch.equal(torch.get_rng_state(), random)
    assert _threads() <= threads or not GROUPS_END_WITHOUT_GIL  # each group has some
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    seen["report"] = report.as_dict()
    return seen


def test_nodes_of_several_ranks_get_hierarchical_hooks_and_every_rank_the_same_report():
    first, *others = run_ranks(_measured_in_a_grid, 4, timeout=patience(100))
    assert [other["report"] for other in others] == [first["report"]] * 3
    report = first["report"]
    assert report["nodes"] == [[0, 1], [2, 3]]
    assert [link["place"] for link in report["links"]] == ["inside nodes", "between nodes"]
    hooks = {hook["name"]: hook for hook in report["hooks"]}
    assert list(hooks)[-2:] == ["8 bits between nodes", "4 bits between nodes"]
    assert hooks["8 bits between nodes"]["pattern"] == "grid"
    measured = hooks["8 bits between nodes"]["exchanges"][0]
    # fp32 inside nodes: a sum of halves and a gather; between nodes a half in 8 bits, with its scales.
    assert measured["bytes_sent"] == pytest.approx((1 + 0.5 * 0.2578) * measured["size"], rel=0.01)
    assert measured["relative_error"] < hooks["8 bits"]["exchanges"][0]["relative_error"] * 1.5
    assert first["budget"].startswith("AgreementError: measure: rank 1 cannot go on: ValueError: budget must")
    assert others[0]["budget"] == "ValueError: budget must be positive and finite, got -1.0"
