"""dist-autograd-collectives against torch.distributed.nn.functional and spmd-types, on Gloo.

    python benchmarks/bench_autograd_collectives.py            # everything
    python benchmarks/bench_autograd_collectives.py --repeats 21
    python benchmarks/bench_autograd_collectives.py --before dac_before   # beside an earlier version

1. Forward and backward of every function on loopback, 2 and 4 ranks, 1 KiB to 64 MiB. All sides run together,
   in turns forwards and backwards; times are of the slowest rank. "backward" is the backward alone.
2. Overlap: weights are gathered during a computation, started early or not, on two emulated hosts with links
   of 1 Gbit/s.

Writes results/autograd_collectives.json and .png beside this file. spmd-types is compared if it is installed.
With ``--before`` an earlier version, which can be imported under another name, is measured in turns with this
one and with PyTorch: only part 1, into results/autograd_collectives_before.json, with the processor time of
all threads ("host"), which does not count waiting. With ``--messages`` only: messages on Gloo in turns with
torch's own collectives, forward, into results/autograd_collectives_messages.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bar_charts import bars_of, draw_bars
from emulated_hosts import EmulationUnavailableError, address, emulated_hosts
from machine import describe_machine
from timings import slowest

import dist_autograd_collectives as dac
from dist_autograd_collectives import backend
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "autograd_collectives.json"
SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
# Multiples of the default number of repeats.
SHARES = {"1 KiB": 20, "1 MiB": 5, "64 MiB": 1}

TWIN = "pytorch, again"
"""The same code as the side that ratios are relative to: what differs between the two is noise."""

Call = Callable[[], Any]


def sides(x: torch.Tensor, size: int, before: str | None = None) -> dict[str, dict[str, Call]]:
    """Return the calls of each function, by whose implementation it is."""
    import torch.distributed.nn.functional as nnf  # noqa: PLC0415 - warns that it is deprecated

    parts = x.view(size, -1)
    own = torch.empty(parts.shape[1])
    out = torch.empty_like(x)
    outs = list(torch.empty_like(x).view(size, -1).unbind(0))
    found: dict[str, dict[str, Call]] = {}
    ours: list[tuple[str, Any]] = [("ours", dac)]
    if before:
        ours.append(("before", importlib.import_module(before)))
    for who, module in (("pytorch", nnf), (TWIN, nnf), *ours):
        calls: dict[str, Call] = {
            "all_reduce": lambda module=module: module.all_reduce(x),
            "broadcast": lambda module=module: module.broadcast(x, 0),
            "reduce": lambda module=module: module.reduce(x, 0),
            "all_gather": lambda module=module: module.all_gather(x),
            "gather": lambda module=module: module.gather(x, 0),
            "scatter": lambda module=module: module.scatter(list(parts.unbind(0)), 0),
            "reduce_scatter": lambda module=module: module.reduce_scatter(own, list(parts.unbind(0))),
            "all_to_all": lambda module=module: module.all_to_all(outs, list(parts.unbind(0))),
            "all_to_all_single": lambda module=module: module.all_to_all_single(out, x),
        }
        for name, call in calls.items():
            found.setdefault(name, {})[who] = call
    # PyTorch returns the caller's buffer, so it must be a new one while anything still needs the last.
    for who, module in (("pytorch", nnf), *ours):
        found["all_to_all"][f"{who}, new buffer"] = lambda module=module: module.all_to_all(
            list(torch.empty_like(x).view(size, -1).unbind(0)), list(parts.unbind(0))
        )
        found["all_to_all_single"][f"{who}, new buffer"] = lambda module=module: module.all_to_all_single(
            torch.empty_like(x), x
        )
    # PyTorch has nothing that takes as little memory: no buffer, no list.
    for who, module in ours:
        found["scatter"][f"{who}, like="] = lambda module=module: module.scatter(
            list(parts.unbind(0)), 0, like=own
        )
    if before:
        return found
    found["all_gather"]["ours, all_gather_stack"] = lambda: dac.all_gather_stack(x)
    found["reduce_scatter"]["ours, reduce_scatter_dim"] = lambda: dac.reduce_scatter_dim(x)
    found["all_to_all_single"]["ours, all_to_all_dim"] = lambda: dac.all_to_all_dim(x, 0, 0)
    if importlib.util.find_spec("spmd_types"):
        import spmd_types as spmd  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415

        world = dist.group.WORLD
        found["all_reduce"]["spmd-types"] = lambda: spmd.all_reduce(x, world, src=spmd.P, dst=spmd.R)
        found["all_gather"]["spmd-types"] = lambda: spmd.all_gather(x, world, src=spmd.S(0), dst=spmd.R)
        found["reduce_scatter"]["spmd-types"] = lambda: spmd.reduce_scatter(
            x, world, src=spmd.P, dst=spmd.S(0)
        )
        found["all_to_all_single"]["spmd-types"] = lambda: spmd.all_to_all(
            x, world, src=spmd.S(0), dst=spmd.S(0)
        )
    return found


def measure(
    rank: int,  # noqa: ARG001 - run_ranks gives it
    numel: int,
    repeats: int,
    before: str | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of every run of every call: in total, of the backward alone, and of processors."""
    warnings.simplefilter("ignore")  # the compared modules are deprecated
    size = dist.get_world_size()
    x = torch.randn(numel // size * size, requires_grad=True)
    calls = {
        f"{name} / {who}": call
        for name, group in sides(x, size, before).items()
        for who, call in group.items()
    }
    seconds: dict[str, list[float]] = {}
    for repeat in range(-2, repeats):  # the first rounds warm up
        for label in list(calls) if repeat % 2 else reversed(calls):
            x.grad = None
            dist.barrier()
            began, host = time.perf_counter(), time.process_time()
            result = calls[label]()
            outputs = list(result) if isinstance(result, (list, tuple)) else [result]
            forward = time.perf_counter()
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            done, host = time.perf_counter(), time.process_time() - host
            if repeat >= 0:
                seconds.setdefault(label, []).append(done - began)
                seconds.setdefault(f"{label}, backward", []).append(done - forward)
                if before:
                    seconds.setdefault(f"{label}, host", []).append(host)
    return seconds


def compare_messages(rank: int, numel: int, repeats: int) -> dict[str, list[float]]:  # noqa: ARG001
    """Return the seconds of forward calls by messages, by torch's collectives, and by what is chosen."""
    size = dist.get_world_size()
    x = torch.randn(numel // size * size)
    parts = list(x.view(size, -1).unbind(0))
    calls: dict[str, Call] = {
        "all_reduce": lambda: dac.all_reduce(x),
        "reduce": lambda: dac.reduce(x, 0),
        "broadcast": lambda: dac.broadcast(x, 0),
        "all_gather": lambda: dac.all_gather(x),
        "gather": lambda: dac.gather(x, 0),
        "scatter": lambda: dac.scatter(parts, 0, like=parts[0]),
        "reduce_scatter": lambda: dac.reduce_scatter_dim(x),
        "all_to_all": lambda: dac.all_to_all_dim(x, 0, 0),
    }
    chosen = backend.choose
    ways = {"pytorch": backend.native, "messages": backend.by_messages, "ours": chosen}
    seconds: dict[str, list[float]] = {}
    for repeat in range(-2, repeats):
        for name, call in calls.items():
            for way in list(ways) if repeat % 2 else reversed(ways):
                backend.choose = ways[way]
                dist.barrier()
                began = time.perf_counter()
                call()
                if repeat >= 0:
                    seconds.setdefault(f"{name} / {way}", []).append(time.perf_counter() - began)
    backend.choose = chosen
    return seconds


def layers(count: int, width: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return this rank's halves of square weights, and an input."""
    torch.manual_seed(0)
    weights = [torch.randn(width // dist.get_world_size(), width) / width**0.5 for _ in range(count)]
    return [weight.requires_grad_() for weight in weights], torch.randn(512, width)


def sharded_step(weights: list[torch.Tensor], x: torch.Tensor, *, ahead: int) -> float:
    """Run layers whose weights are gathered when needed, or started some layers ahead."""
    began = time.perf_counter()
    started = [dac.start(dac.all_gather_cat, part) for part in weights[:ahead]]
    for index, part in enumerate(weights):
        if ahead:
            started += [dac.start(dac.all_gather_cat, later) for later in weights[index + ahead :][:1]]
            weight = started.pop(0).wait()
        else:
            weight = dac.all_gather_cat(part)
        x = torch.relu(x @ weight)
    x.sum().backward()
    return time.perf_counter() - began


def overlap(width: int, count: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of both ways, and of computation and communication alone."""
    weights, x = layers(count, width)
    whole = [torch.randn(width, width, requires_grad=True) for _ in range(count)]

    def compute_alone() -> float:
        began = time.perf_counter()
        y = x
        for weight in whole:
            y = torch.relu(y @ weight)
        y.sum().backward()
        return time.perf_counter() - began

    def communicate_alone() -> float:
        began = time.perf_counter()
        sum(dac.all_gather_cat(part)[0, 0] for part in weights).backward()
        return time.perf_counter() - began

    ways: dict[str, Callable[[], float]] = {
        "computation alone": compute_alone,
        "communication alone": communicate_alone,
        "ours, gathered when needed": lambda: sharded_step(weights, x, ahead=0),
        "ours, started two layers ahead": lambda: sharded_step(weights, x, ahead=2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):
        for name in list(ways) if repeat % 2 else reversed(ways):
            dist.barrier()
            took = ways[name]()
            if repeat >= 0:
                seconds[name].append(took)
    return seconds


def host(rank: int, options: argparse.Namespace) -> None:
    """Run the rank of one emulated host."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=2)
    print(json.dumps(overlap(options.width, options.layers, options.repeats)))
    dist.barrier()
    dist.destroy_process_group()


def emulated() -> dict[str, Any]:
    """Run :func:`overlap` on two hosts."""
    with emulated_hosts(2, rate="1gbit") as hosts:
        ranks = [
            subprocess.Popen(
                [*host, sys.executable, __file__, "--host", str(rank), *sys.argv[1:]],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        outputs = [process.communicate(timeout=600)[0] for process in ranks]
    return slowest([json.loads(output.splitlines()[-1]) for output in outputs])


def print_table(title: str, table: dict[str, Any]) -> None:
    """Print medians, and ratios to PyTorch's."""
    print(f"\n{title}: ms, median [quartiles]")
    for label, entry in table.items():
        name, _, what = label.partition(" / ")
        part = next((part for part in (", backward", ", host") if what.endswith(part)), "")
        baseline = f"{name} / pytorch{part}"
        ratio = f"   / pytorch {entry['median_ms'] / table[baseline]['median_ms']:.2f}" if what else ""
        low, high = entry["quartiles_ms"]
        print(f"  {label:<52}{entry['median_ms']:9.2f} [{low:.2f}, {high:.2f}]{ratio}")


def draw(results: dict[str, Any]) -> None:
    """Draw the gain of starting a collective early, if it was measured."""
    if "overlap_ms" in results:
        panel = {"12 layers of 1536 x 1536, 1 Gbit/s": bars_of(results["overlap_ms"])}
        title = "Forward and backward with weights that are gathered from two emulated hosts"
        draw_bars(panel, "ms", RESULTS.with_suffix(".png"), title=title)


def main() -> None:
    """Measure everything, print and store it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--before", help="the name of a module: an earlier version of the package")
    parser.add_argument(
        "--messages", action="store_true", help="only compare messages with torch's collectives"
    )
    parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        draw(json.loads(RESULTS.read_text()))
        return
    if options.host is not None:
        host(options.host, options)
        return
    results: dict[str, Any] = {**describe_machine(), "repeats": options.repeats, "ms": {}}
    if importlib.util.find_spec("spmd_types"):
        results["versions"]["spmd_types"] = version("spmd_types")
    for world_size in (2, 4):
        for size, count in SIZES.items():
            title = f"{world_size} ranks, {size}"
            repeats = options.repeats * SHARES[size]
            if options.messages:
                times = run_ranks(compare_messages, world_size, count // 4, repeats, timeout=900)
            else:
                times = run_ranks(measure, world_size, count // 4, repeats, options.before, timeout=900)
            table = slowest(times)
            results["ms"][title] = table
            print_table(title, table)
    if options.before or options.messages:
        target = RESULTS.with_stem(f"{RESULTS.stem}_{'messages' if options.messages else 'before'}")
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwritten: {target}")
        return
    try:
        results["overlap_ms"] = emulated()
        shape = f"{options.layers} layers of {options.width} x {options.width}, two hosts, 1 Gbit/s"
        print_table(shape, results["overlap_ms"])
    except EmulationUnavailableError as error:
        print(f"\nno overlap measured: {error}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)
    print(f"\nwritten: {RESULTS}")


if __name__ == "__main__":
    main()
