"""Measure the documents' claims again with few repeats: do they still hold on this machine and tree?

    python benchmarks/repeat_claims.py             # ten minutes at most; hosts need root
    python benchmarks/repeat_claims.py buckets_on_2_hosts errors

Exits with 1 if a claim of claims.py is worse than documented by more than its spread, also when measured a
second time, if there is time for that, because a busy moment distorts few repeats; and if the time was not
enough for all, for example on a busy machine. Names what this machine cannot measure. Writes nothing:
the documents rest on the files in results/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from buckets import time_hooks
from claims import CLAIMS, Claim
from emulated_hosts import EmulationUnavailableError
from harness import load, slowest
from machine import describe_machine
from rank_processes import on_ranks
from whole_steps.cells import RATES, Cell, run
from whole_steps.ranks import Job
from whole_steps.summary import summarize

from dist_utils.testing import run_ranks

SECONDS, MARGIN = 600.0, 90.0
"""The time for all measurements, and the longest time of a single one, in seconds."""


def buckets_on_2_hosts() -> dict[str, Any]:
    """Average 25 MiB with every hook of ddp-quant-hooks."""
    return {
        "hosts": {rate: {2: _times_of("quantized_allreduce.hooks", 2, rate)} for rate in ("1gbit", "10gbit")}
    }


def buckets_on_4_hosts() -> dict[str, Any]:
    """Average 25 MiB with every hook of ddp-quant-hooks."""
    return {"hosts": {"1gbit": {4: _times_of("quantized_allreduce.hooks", 4, "1gbit")}}}


def half_buckets_on_2_hosts() -> dict[str, Any]:
    """Average 25 MiB with every hook of ddp-compress-hooks."""
    return {"hosts": {2: _times_of("compress_hooks.sides", 2, "1gbit")}}


def bytes_of_buckets() -> dict[str, Any]:
    """Count the bytes that hooks send."""
    count_bytes = _bench("quantized_allreduce").count_bytes
    return {"bytes": {size: run_ranks(count_bytes, size, timeout=300)[0] for size in (2, 4)}}


def errors() -> dict[str, Any]:
    """Average with simulated ranks."""
    return {"schemes": _bench("quant_accuracy").measure([2, 8], 1)}


def kernels_alone() -> dict[str, Any]:
    """Encode and decode 25 MiB."""
    return {"kernels": _bench("quant_kernels").measure(25 * 2**20 // 4, 21)}


def overlapped_steps() -> dict[str, Any]:
    """Train a stack of linear layers with every way to step."""
    found = _bench("overlap").time_case("hosts", "60MB", "foreach", 8, 9)
    return {"hosts": {"cases": {"60MB, foreach, batch 8": found}}}


def sharded_steps() -> dict[str, Any]:
    """Train a model of FSDP2 on two hosts of two ranks."""
    return {"times": {"1gbit": _bench("fsdp").times("1gbit", 7)}}


def gathered_steps() -> dict[str, Any]:
    """Gather FSDP2's parameters in few bits on two hosts of two ranks."""
    where, names = "2 hosts of 2 ranks", ("native FSDP2, fp32", "both in 8 bits")
    names += ("both in 8 bits, kept for backward",)
    return {"times": {where: {"1gbit": _bench("fsdp_gather").times("1gbit", 7, where, names)}}}


def walks() -> dict[str, Any]:
    """Walk a dict of lists."""
    bench = _bench("containers")
    visit, batch = bench.TASKS["keep"], bench.BATCHES["dict of lists"]()
    sides = {
        name: lambda batch, walk=bench.PEERS[name]: walk(visit, batch) for name in ("dist_utils", "torch")
    }
    return {"us_per_tensor": {"dict of lists": {"keep": bench.measure(sides, batch, 100)}}}


def module_states() -> dict[str, Any]:
    """Send 100 MiB of parameters to the other rank."""
    bench = _bench("module_sync")
    return {"ms": {"100.2 MiB": slowest(run_ranks(bench.measure, 2, max(bench.WIDTHS), 11, timeout=300))}}


def gathers() -> dict[str, Any]:
    """Call every collective forward and backward, on 64 MiB."""
    bench = _bench("autograd_collectives")
    ranks = run_ranks(bench.measure, 2, bench.SIZES["64 MiB"] // 4, 3, False, timeout=300)
    return {"ms": {"2 ranks, 64 MiB": slowest(ranks)}}


def whole_steps() -> dict[str, Any]:
    """Train the small transformer and the wide perceptron on two hosts."""
    cells = {}
    for model in ("7M", "MLP"):
        cell, job = Cell(model, 2, "1gbit"), Job(model, ("plain", "8bits", "8bits+overlap"), 15)
        cells[cell.name] = summarize(run(cell, job), RATES["1gbit"], 1)
    return {"cells": cells}


def steps_on_a_slow_link() -> dict[str, Any]:
    """Train the small transformer on two hosts with a link of 0.1 Gbit/s."""
    cell, job = Cell("7M", 2, "0.1gbit"), Job("7M", ("plain", "8bits", "low-rank-one"), 7)
    return {"cells": {cell.name: summarize(run(cell, job), RATES["0.1gbit"], 1)}}


def _times_of(hooks: str, hosts: int, rate: str) -> dict[str, Any]:
    module, name = hooks.split(".")
    return slowest(on_ranks(time_hooks, hosts, getattr(_bench(module), name), 9, rate=rate))


def _bench(name: str) -> Any:
    # Imported when needed, because some compare with packages that may be missing.
    return importlib.import_module(f"bench_{name}")


def measure(name: str) -> dict[str, Any] | str:
    """Return the results of a function of this module, in the form of a result file, or why it failed."""
    function: Callable[[], dict[str, Any]] = globals()[name]
    print(f"\n{name}: {function.__doc__}", flush=True)
    try:
        found: dict[str, Any] = json.loads(json.dumps(function()))
    except (EmulationUnavailableError, ImportError) as error:
        return str(error)
    return found


def check(claim: Claim, results: dict[str, Any] | str) -> bool:
    """Print the outcome for a claim; return whether it holds, or this machine cannot measure it."""
    stored = claim.stored()
    then, bound = claim.compared_value(stored), claim.bound(stored)
    sentence = claim.sentence.format(value=claim.value(stored))
    if isinstance(results, str):
        print(f"not measured  {sentence} ({results})")
        return True
    try:
        now = claim.compared_value(results)
    except KeyError as error:
        print(f"{'not measured' if claim.optional else 'FAILS'}  {sentence} ({error} is not there)")
        return claim.optional
    limit = "least" if claim.better == "more" else "most"
    held = claim.holds(now)
    verdict = "holds" if held else "FAILS"
    what = f"{claim.compared[-1].replace('_', ' ')} {then:.3g}, now" if claim.compared else "Now"
    print(f"{verdict}  {sentence} {what} {now:.3g}; at {limit} {bound:.3g} is allowed.")
    run = claim.run()
    if not held and (machine := run["machine"]) != describe_machine()["machine"]:
        where = f"{machine['cores']} cores, {machine['cpu']}"
        tree = run.get("tree", "of that day")
        print(f"       It was measured on {where}. To compare trees, run this at commit {tree}, too.")
    return held


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(claim.measured_by for claim in CLAIMS))
    parser.add_argument("names", nargs="*", help=f"what to measure: {', '.join(names)}")
    wanted = parser.parse_args().names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"no claim is measured by {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.set_num_threads(1)  # as in ranks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    began = time.monotonic()
    broken: dict[str, set[str]] = {}
    took: dict[str, float] = {}
    late: list[str] = []
    for name in wanted:
        started = time.monotonic()
        if started - began > SECONDS - MARGIN:
            late.append(name)
            continue
        broken[name] = failing(name)
        took[name] = time.monotonic() - started
    for name in [name for name, claims in broken.items() if claims]:
        if time.monotonic() - began + took[name] < SECONDS:
            broken[name] &= failing(name)
    print(f"\nload {load()}, {time.monotonic() - began:.0f} s")
    if late:
        print(f"no time was left for {', '.join(late)}")
    still = [claim for claims in broken.values() for claim in sorted(claims)]
    if still or late:
        sys.exit(f"claims that do not hold here: {'; '.join(still) or 'none of those measured'}")


def failing(name: str) -> set[str]:
    """Measure, and return the names of the claims that do not hold."""
    results = measure(name)
    return {claim.name for claim in CLAIMS if claim.measured_by == name and not check(claim, results)}


if __name__ == "__main__":
    main()
