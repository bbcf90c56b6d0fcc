"""The documents' main claims state the numbers of the result files."""

import ast
import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.claims import CLAIMS, RESULTS, ROOT, Claim, Place, cells, stands


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_documents_and_results_agree(claim):
    missing = [(place, text) for place, text in claim.texts(claim.stored()) if not stands(place, text)]
    assert claim.places
    assert not missing, "the result file has another number: measure again, or fix the document"


def test_every_claim_can_be_measured_again():
    tree = ast.parse((ROOT / "benchmarks/repeat_claims.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {claim.measured_by for claim in CLAIMS} <= functions
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_stated_spreads_are_meaningful():
    spreads = {claim.name: claim.spread(claim.stored()) for claim in CLAIMS}
    assert all(0 < spread < 0.5 for spread in spreads.values()), spreads


def test_only_what_is_worse_by_more_than_the_spread_fails(monkeypatch):
    stored = {
        "a": {"median_ms": 300.0, "quartiles_ms": [290, 320]},
        "b": {"median_ms": 100.0, "quartiles_ms": [95, 105]},
    }
    monkeypatch.setattr(Claim, "stored", lambda _: stored)
    faster = Claim("faster", "{value}", (), "", ("a",), "", ("b",))
    assert faster.value(stored) == 3
    assert faster.spread(stored) == pytest.approx(30 / 300 + 10 / 100)
    assert [faster.holds(value) for value in (9.0, 2.41, 2.39)] == [True, True, False]
    shorter = Claim("shorter", "{value}", (), "", ("b",), "", ("a",), better="less", least_spread=0.5)
    assert [shorter.holds(value) for value in (0.1, 0.49, 0.51)] == [True, True, False]


def test_a_gain_that_is_gone_fails_whatever_the_spread(monkeypatch):
    stored = {
        "a": {"median_ms": 110.0, "quartiles_ms": [100, 120]},
        "b": {"median_ms": 100.0, "quartiles_ms": [85, 105]},
    }
    monkeypatch.setattr(Claim, "stored", lambda _: stored)
    faster = Claim("faster", "{value}", (), "", ("a",), "", ("b",))
    assert faster.spread(stored) > 0.3
    assert [faster.holds(value) for value in (1.01, 0.99)] == [True, False]
    shorter = Claim("shorter", "{value}", (), "", ("b",), "", ("a",), better="less")
    assert [shorter.holds(value) for value in (0.99, 1.01)] == [True, False]


def test_a_claim_rests_on_the_run_that_measured_its_entry_last(monkeypatch):
    whole, part, longer_name = {"tree": "one"}, {"tree": "two"}, {"tree": "three"}
    measured = {"cells / 7M / sides / 8bits": part, "cells / 7M / sides / 8bits+overlap": longer_name}
    monkeypatch.setattr(Claim, "stored", lambda _: {**whole, "measured": measured})
    runs = [
        Claim("", "", (), "", ("cells", "7M", "sides", side, "ms"), "").run()
        for side in ("plain", "8bits", "8bits+overlap")
    ]
    assert [run["tree"] for run in runs] == ["one", "two", "three"]


def test_only_what_a_machine_may_lack_may_be_missing(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    repeat_claims = importlib.import_module("repeat_claims")
    stored = {"a": 2.0, "machine": {"cores": 1, "cpu": "of another kind"}, "date": "today"}
    monkeypatch.setattr(Claim, "stored", lambda _: stored)
    needed = Claim("", "{value}", (), "", ("a",), "")
    assert repeat_claims.check(needed, {"a": 2.0})
    assert not repeat_claims.check(needed, {"a": 1.0})
    assert not repeat_claims.check(needed, {})
    assert repeat_claims.check(replace(needed, optional=True), {})
    assert repeat_claims.check(needed, "no emulated hosts here")


def test_a_number_in_another_column_does_not_count(tmp_path, monkeypatch):
    document = """
| ms | one | two |
|---|---|---|
| **8 bits** | 14 (1.35x) | 37 (1.20x) |

| ms | one |
|---|---|
| other | 1 |

it takes 3
ms
"""
    assert cells(document, "**8 bits**", "two") == ["37 (1.20x)"]
    (tmp_path / "page.md").write_text(document)
    monkeypatch.setattr("benchmarks.claims.ROOT", tmp_path)
    assert stands(Place("page.md", "1.20x", "**8 bits**", "two"), "1.20x")
    assert not stands(Place("page.md", "1.20x", "**8 bits**", "one"), "1.20x")
    assert stands(Place("page.md", ""), "takes 3 ms")


GPU_ROWS = {
    "`tensor.copy_`": "tensor.copy_",
    "encode": "ours: encode, rotation",
    "decode": "ours: decode",
    "mean of 2": "ours: mean of 2",
    "reduce a shard of 2": "ours: reduce, W = 2, rotation",
    "reduce a shard of 8": "ours: reduce, W = 8, rotation",
    "PyTorch's own functions: encode": "PyTorch: encode, per channel",
    "PyTorch's own functions: decode": "PyTorch: decode, per channel",
}


@pytest.mark.parametrize("row", GPU_ROWS)
def test_the_table_of_gpu_kernels_is_that_of_the_results(row):
    buckets = json.loads((RESULTS / "cuda_kernels.json").read_text())["buckets"]
    page = (ROOT / "docs/gpu.md").read_text()
    for size, head in {"256 MiB": "256 MiB of fp32", "25 MiB": "25 MiB"}.items():
        found = buckets[size].get(GPU_ROWS[row])
        milliseconds = "" if found is None else found["median_ms"]
        text = (
            ""
            if found is None
            else f"{milliseconds:.0f} ms"
            if milliseconds > 1
            else f"{milliseconds * 1e3:.1f} us"
        )
        if found is not None and size == "256 MiB":
            text += f", {found['gb_per_s'] / 1e3:.1f} TB/s"
        assert cells(page, row, head) == [text]
    large = buckets["256 MiB"].get(GPU_ROWS[row])
    assert cells(page, row, "of a copy") == ["" if large is None else f"{large['of_copy']:.2f}"]
    host = buckets["25 MiB"][GPU_ROWS[row]].get("host_us")
    assert cells(page, row, "of the host") == ["" if host is None else f"{host:.0f} us"]


def test_the_stated_shares_of_a_copy_are_those_of_the_results():
    large = json.loads((RESULTS / "cuda_kernels.json").read_text())["buckets"]["256 MiB"]
    ours = {name.removeprefix("ours: "): entry["of_copy"] for name, entry in large.items()}
    whole = [share for name, share in ours.items() if name.startswith(("encode", "decode", "mean"))]
    assert stands(
        Place("docs/gpu.md", ""), f"run at {min(whole):.2f} to {max(whole):.2f} of the speed of a copy"
    )
    shares = [f"{ours[f'reduce, W = {ranks}{how}']:.2f}" for how in (", rotation", "") for ranks in (2, 8)]
    text = "{} of a copy for two ranks, {} for eight, and without rotation at {} and {}".format(*shares)
    assert stands(Place("docs/gpu.md", ""), text)


def test_what_nccl_messages_take_of_the_host_is_that_of_the_results():
    """The range over ranks, until a call returns and until it is waited for, to the next 5 us outside."""
    calls = json.loads((RESULTS / "nccl_messages.json").read_text())["us of the host"]

    def stated(size, way):
        times = [time for rank in calls[f"{size} ranks"][way] for time in rank]
        return f"{5 * math.floor(min(times) / 5)} to {5 * math.ceil(max(times) / 5)}"

    two, four, eight = (stated(size, "start_messages") for size in (2, 4, 8))
    text = f"{two} us between two ranks that share the GPU, {four} us among four, and {eight} us among eight"
    assert stands(Place("docs/gpu.md", ""), text)
    two, four, eight = (stated(size, "all_to_all") for size in (2, 4, 8))
    assert stands(Place("docs/gpu.md", ""), f"`all_to_all`: {two}, {four} and {eight} us")


GATHER_ROWS = {
    "native FSDP2, fp32": "native FSDP2, fp32",
    "native, resharded": "native, resharded to 2 ranks",
    "gradients in 16 bits": "gradients in 16 bits",
    "gradients in 8 bits: `quantize_reduce_scatter`": "gradients in 8 bits",
    "both in 8 bits: also `quantize_all_gather`": "both in 8 bits",
    "both, resharded": "both in 8 bits, resharded to 2 ranks",
    "both, gradients in 4 bits, resharded": "weights in 8 bits, gradients in 4, resharded to 2 ranks",
    "both, `keep_for_backward=True`": "both in 8 bits, kept for backward",
    "both, `differences=True`": "differences in 4 bits, gradients in 8",
    "both, `differences=True`, gradients in 4 bits": "differences and gradients in 4 bits",
}


@pytest.mark.parametrize("row", GATHER_ROWS)
def test_the_tables_of_sharded_gathers_are_those_of_the_results(row):
    results = json.loads((RESULTS / "fsdp_gather.json").read_text())
    page, side = (ROOT / "docs/benchmarks/fsdp2.md").read_text(), GATHER_ROWS[row]
    found = [results["times"][where] for where in ("2 hosts of 2 ranks", "4 hosts of 1 rank")]
    for rate, column in {"200mbit": "0.2 Gbit/s", "1gbit": "1 Gbit/s"}.items():
        entries = [rates[rate][side] for rates in found if side in rates[rate]]
        assert cells(page, row, column) == [
            f"{entry['median_ms']:.0f} ms"
            + (f", {entry['times_faster']:.2f}x" if side != "native FSDP2, fp32" else "")
            for entry in entries
        ]
    counted = [rates["1gbit"][side]["bytes_a_parameter"] for rates in found if side in rates["1gbit"]]
    assert cells(page, row, "bytes a parameter") == [f"{value:.2f}" for value in counted]


def test_the_table_of_advice_has_the_numbers_of_the_results():
    sharded = json.loads((RESULTS / "fsdp_gather.json").read_text())["times"]["4 hosts of 1 rank"]
    texts = [
        "; ".join(
            f"{sharded[rate][side]['times_faster']:.2f}" for side in ("gradients in 8 bits", "both in 8 bits")
        )
        for rate in ("1gbit", "200mbit")
    ]
    steps = json.loads((RESULTS / "whole_steps.json").read_text())["cells"]
    ratios = {
        (cell, side): f"{found['faster_than_plain']['median']:.2f}"
        for cell, of_cell in steps.items()
        for side, found in of_cell["sides"].items()
        if "faster_than_plain" in found
    }
    slow, fast = "7M, 2 hosts, 0.1 Gbit/s", "7M, 2 hosts, 10 Gbit/s"
    texts += [
        f"{ratios[slow, '8bits']} and {ratios[slow, '4bits']}",
        f"{ratios[fast, '8bits']}, {ratios[fast, 'bf16']}",
    ]
    texts += [f"{ratios[slow, 'low-rank-one']} in one bucket"]
    texts += [f"{ratios['60M, 2 hosts, 1 Gbit/s', '8bits']} (57 million)"]
    assert [text for text in texts if not stands(Place("docs/choose.md", ""), text)] == []


def test_the_table_of_many_ranks_is_that_of_the_results():
    results = json.loads((RESULTS / "many_ranks.json").read_text())
    path = "docs/benchmarks/many-ranks.md"
    page = (ROOT / path).read_text()
    for case, times in results["cases"].items():
        for size, kib in {"64 KiB": 64, "1 MiB": 1 << 10, "4 MiB": 4 << 10, "25 MiB": 25 << 10}.items():
            ours, ring = (times[f"{side}, {kib << 10}"]["fastest"] for side in ("8 bits", "fp32 ring"))
            assert cells(page, case.removesuffix(", loopback"), size) == [
                f"{1e3 * ours:.1f} ({ours / ring:.2f})"
            ]
    for ranks_and_hosts, found in results["counted"].items():
        ranks, hosts = (f"{int(part.split()[0]):,}" for part in ranks_and_hosts.split(", "))
        bytes_a_value, limit = f"{found['bytes_a_value']:.2f}", f"{found['limit']:.2f}"
        assert f"| {ranks} | {hosts} | {bytes_a_value} | {limit} | {found['messages']} |" in page.splitlines()
    machine, torch = results["machine"], results["versions"]["torch"].split("+")[0]
    text = f"({machine['cores']} cores, {machine['cpu']}, Gloo, torch {torch}, {results['date']})"
    assert stands(Place(path, ""), text)


def test_sentences_about_whole_steps_have_the_numbers_of_the_results():
    results = json.loads((RESULTS / "whole_steps.json").read_text())
    cells = {name: cell["sides"] for name, cell in results["cells"].items()}
    ours, theirs, eight = (
        cells["7M, 2 hosts, 0.1 Gbit/s"][side]["faster_than_plain"]["median"]
        for side in ("low-rank-one", "powersgd-one", "8bits")
    )
    picture = f"at 0.1 Gbit/s low rank {ours:.1f}, PowerSGD {theirs:.1f}, 8 bits {eight:.2f}"
    assert stands(Place("README.md", ""), picture)
    where = f"({results['machine']['cpu']}), Gloo, torch {results['versions']['torch']}, {results['date']}."
    assert stands(Place("README.md", ""), where)
    eight, half = (cells["7M, 2 hosts of 4 ranks, 1 Gbit/s"][side] for side in ("8bits", "bf16"))
    cores = (
        f"8 bits take {eight['wire_ms']:.0f} ms on the wire, but a step takes "
        f"{eight['exposed']['median_ms']:.0f} ms longer than its computation; 16 bits, which compute less, "
        f"take {half['median_ms'] / eight['median_ms']:.2f} of the time"
    )
    assert stands(Place("docs/benchmarks/whole-steps.md", ""), cores)


@pytest.mark.parametrize(
    ("commands", "document", "section"),
    [
        (("table", "equal-time"), "docs/benchmarks/whole-steps.md", None),
        (("short-table",), "README.md", "## Measured"),
        (("factors-table",), "docs/benchmarks/low-rank.md", "## Other ranks"),
    ],
)
def test_the_tables_of_whole_steps_are_those_of_the_results(commands, document, section):
    measured = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, "bench_whole_steps.py", command],
            cwd=ROOT / "benchmarks",
            capture_output=True,
            text=True,
            check=True,
        )
        measured += done.stdout.splitlines()
    page = (ROOT / document).read_text()
    if section is not None:
        page = page.partition(f"\n{section}\n")[2].partition("\n## ")[0]
    stated = page.splitlines()
    assert [line for line in measured if line not in stated] == []
    rows = {line for line in measured if line.startswith("|")}
    assert [line for line in stated if line.startswith("|") and line not in rows] == []
