"""dist-autograd-collectives against torch.distributed.nn.functional and spmd-types, on Gloo.

    python benchmarks/bench_autograd_collectives.py            # everything but messages
    python benchmarks/bench_autograd_collectives.py ms --repeats 21 --only "2 ranks"
    python benchmarks/bench_autograd_collectives.py ms links --repeats 3 --alike   # ten minutes
    python benchmarks/bench_autograd_collectives.py --messages

* ms: forward and backward of every function on loopback, 2 and 4 ranks, 1 KiB to 64 MiB. Times are of the
  slowest rank. "backward" is the backward alone. spmd-types is compared if it is installed, and an older
  version of the package if it can be imported as ``dac_before``: a copy of its sources, in which this name
  replaces the package's.
* links: the same on emulated hosts of one rank each, with links of 1 Gbit/s.
* overlap: weights are gathered during a computation, started early or not, on two emulated hosts with links
  of 1 Gbit/s.

With ``--alike`` the first two compare only what the sides call alike. Writes
results/autograd_collectives.json and .png. With ``--messages`` instead: messages on Gloo in turns with
torch's own collectives, forward, into results/autograd_collectives_messages.json.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawing import bars_of, draw_bars
from harness import RESULTS, Benchmark, Found, Seconds, in_turns, print_times, slowest
from rank_processes import on_ranks

import dist_autograd_collectives as dac
from dist_autograd_collectives import backend
from dist_autograd_collectives.maps import members
from dist_utils.testing import run_ranks

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "64 MiB": 64 << 20}
# Multiples of the default number of repeats.
SHARES = {"1 KiB": 20, "1 MiB": 5, "4 MiB": 3, "64 MiB": 1}

TWIN = "pytorch, again"
"""The same code as the side that ratios are relative to: what differs between the two is noise."""
BEFORE = "dac_before"
"""An older version of this package, under another name."""
WIDTH, LAYERS, BATCH = 1536, 12, 512
"""Of the layers whose weights are gathered."""

Call = Callable[[], Any]


def calls_of(x: torch.Tensor, size: int, *, alike: bool) -> dict[str, Call]:
    """Return the calls, named ``FUNCTION / WHOSE``; of those ``alike``, PyTorch's only once."""
    import torch.distributed.nn.functional as nnf  # noqa: PLC0415 - warns that it is deprecated

    parts = x.view(size, -1)
    own = torch.empty(parts.shape[1])
    out = torch.empty_like(x)
    outs = list(torch.empty_like(x).view(size, -1).unbind(0))
    found: dict[str, Call] = {}
    modules = {"pytorch": nnf, TWIN: nnf, "ours": dac}
    if importlib.util.find_spec(BEFORE):
        modules[BEFORE] = importlib.import_module(BEFORE)
    if alike:
        del modules[TWIN]
    for who, module in modules.items():
        for name, call in {
            "all_reduce": lambda module=module: module.all_reduce(x),
            "broadcast": lambda module=module: module.broadcast(x, 0),
            "reduce": lambda module=module: module.reduce(x, 0),
            "all_gather": lambda module=module: module.all_gather(x),
            "gather": lambda module=module: module.gather(x, 0),
            "scatter": lambda module=module: module.scatter(list(parts.unbind(0)), 0),
            "reduce_scatter": lambda module=module: module.reduce_scatter(own, list(parts.unbind(0))),
            "all_to_all": lambda module=module: module.all_to_all(outs, list(parts.unbind(0))),
            "all_to_all_single": lambda module=module: module.all_to_all_single(out, x),
        }.items():
            found[f"{name} / {who}"] = call
        if alike or who in (TWIN, BEFORE):
            continue
        # PyTorch returns the caller's buffer, so it must be a new one while anything still needs the last.
        found[f"all_to_all / {who}, new buffer"] = lambda module=module: module.all_to_all(
            list(torch.empty_like(x).view(size, -1).unbind(0)), list(parts.unbind(0))
        )
        found[f"all_to_all_single / {who}, new buffer"] = lambda module=module: module.all_to_all_single(
            torch.empty_like(x), x
        )
    if alike:
        return found
    # PyTorch has nothing that takes as little memory: no buffer, no list.
    found["all_gather / ours, all_gather_stack"] = lambda: dac.all_gather_stack(x)
    found["reduce_scatter / ours, reduce_scatter_dim"] = lambda: dac.reduce_scatter_dim(x)
    found["all_to_all_single / ours, all_to_all_dim"] = lambda: dac.all_to_all_dim(x, 0, 0)
    if importlib.util.find_spec("spmd_types"):
        import spmd_types as spmd  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415

        world, whole, shards = dist.group.WORLD, {"src": spmd.P, "dst": spmd.R}, spmd.S(0)
        found["all_reduce / spmd-types"] = lambda: spmd.all_reduce(x, world, **whole)
        found["all_gather / spmd-types"] = lambda: spmd.all_gather(x, world, src=shards, dst=spmd.R)
        found["reduce_scatter / spmd-types"] = lambda: spmd.reduce_scatter(x, world, src=spmd.P, dst=shards)
        found["all_to_all_single / spmd-types"] = lambda: spmd.all_to_all(x, world, src=shards, dst=shards)
    return found


def measure(rank: int, numel: int, repeats: int, alike: bool) -> dict[str, list[float]]:  # noqa: ARG001 - run_ranks gives it
    """Return the seconds of every run of every call, in total and of the backward alone."""
    warnings.simplefilter("ignore")  # the compared modules are deprecated
    size = dist.get_world_size()
    x = torch.randn(numel // size * size, requires_grad=True)

    def both_passes(label: str, call: Call) -> Seconds:
        result = call()
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        forward = time.perf_counter()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return Seconds({f"{label}, backward": time.perf_counter() - forward})

    def forget(_: str) -> None:
        x.grad = None

    sides = {
        label: lambda label=label, call=call: both_passes(label, call)
        for label, call in calls_of(x, size, alike=alike).items()
    }
    return in_turns(sides, repeats, prepare=forget)


def compare_messages(rank: int, numel: int, repeats: int, _: bool) -> dict[str, list[float]]:  # noqa: ARG001
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
    ways: dict[str, Callable[..., Any]] = {
        "pytorch": lambda linear_map, _: partial(backend.begin_native, linear_map),
        "messages": backend.messages,
        "ours": backend.best_way,
    }
    plans: dict[str, dict[Any, Any]] = {way: {} for way in ways}

    def choose(label: str) -> None:
        way = label.rpartition(" / ")[2]
        backend.best_way, members(None).plans = ways[way], plans[way]

    sides = {f"{name} / {way}": call for name, call in calls.items() for way in ways}
    return in_turns(sides, repeats, prepare=choose)


def found(part: str, case: str, ranks: list[dict[str, list[float]]]) -> Found:
    """Print and return the summary of all ranks' seconds."""
    times = slowest(ranks)
    print_times(case, times, pytorch_of)
    return (part, case), times


def cases(options: Namespace) -> Iterator[Found]:
    """Measure every size among two and four ranks."""
    function = compare_messages if options.messages else measure
    for world_size in (2, 4):
        for size, count in SIZES.items():
            case = f"{world_size} ranks, {size}"
            if options.only in case:
                repeats = options.repeats * SHARES[size]
                given = count // 4, repeats, options.alike
                yield found("ms", case, run_ranks(function, world_size, *given, timeout=900))


def links(options: Namespace) -> Iterator[Found]:
    """Measure between hosts."""
    for hosts, sizes in ((2, ("1 KiB", "1 MiB", "4 MiB", "64 MiB")), (4, ("1 KiB", "1 MiB", "4 MiB"))):
        for size in sizes:
            case = f"{hosts} hosts, {size}"
            if options.only in case:
                repeats = options.repeats * (20 if size == "1 KiB" else 1)
                given = SIZES[size] // 4, repeats, options.alike
                ranks = on_ranks(measure, hosts, *given, rate="1gbit")
                yield found("links_ms", case, ranks)


def pytorch_of(label: str) -> str:
    """Return the label of PyTorch's time of the same function."""
    backward = ", backward" if label.endswith(", backward") else ""
    return f"{label.partition(' / ')[0]} / pytorch{backward}"


def sharded_step(weights: list[torch.Tensor], x: torch.Tensor, *, ahead: int) -> None:
    """Run layers whose weights are gathered when needed, or started some layers ahead."""
    started = [dac.start(dac.all_gather_cat, part) for part in weights[:ahead]]
    for index, part in enumerate(weights):
        if ahead:
            started += [dac.start(dac.all_gather_cat, later) for later in weights[index + ahead :][:1]]
            weight = started.pop(0).wait()
        else:
            weight = dac.all_gather_cat(part)
        x = torch.relu(x @ weight)
    x.sum().backward()


def measure_overlap(rank: int, repeats: int) -> dict[str, list[float]]:  # noqa: ARG001
    """Return the seconds of both ways, and of computation and communication alone."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH // dist.get_world_size(), WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    weights = [weight.requires_grad_() for weight in weights]
    x = torch.randn(BATCH, WIDTH)
    whole = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(LAYERS)]

    def compute_alone() -> None:
        y = x
        for weight in whole:
            y = torch.relu(y @ weight)
        y.sum().backward()

    ways: dict[str, Call] = {
        "computation alone": compute_alone,
        "communication alone": lambda: sum(dac.all_gather_cat(part)[0, 0] for part in weights).backward(),
        "ours, gathered when needed": lambda: sharded_step(weights, x, ahead=0),
        "ours, started two layers ahead": lambda: sharded_step(weights, x, ahead=2),
    }
    return in_turns(ways, repeats, warm_up=1)


def overlap(options: Namespace) -> Iterator[Found]:
    """Measure what starting early gains on two hosts."""
    times = slowest(on_ranks(measure_overlap, 2, options.repeats, rate="1gbit"))
    print_times(f"{LAYERS} layers of {WIDTH} x {WIDTH}, two hosts, 1 Gbit/s", times)
    for name, entry in times.items():
        yield ("overlap_ms", name), entry


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the gain of starting a collective early, if it was measured."""
    if "overlap_ms" in results:
        panel = {"12 layers of 1536 x 1536, 1 Gbit/s": bars_of(results["overlap_ms"])}
        title = "Forward and backward with weights that are gathered from two emulated hosts"
        draw_bars(panel, "ms", path, title=title)


def main() -> None:
    """Measure everything, print and store it."""
    benchmark = Benchmark(__file__, __doc__, repeats=11)
    benchmark.parser.add_argument("--messages", action="store_true", help="instead of all else")
    benchmark.parser.add_argument("--only", default="", help="only cases with this text in their names")
    benchmark.parser.add_argument("--alike", action="store_true", help="only functions that all sides have")
    if "--messages" in sys.argv:
        benchmark.parser.set_defaults(output=RESULTS / "autograd_collectives_messages.json")
        benchmark.run({"ms": cases})
        return
    peers = {"spmd_types": version("spmd_types")} if importlib.util.find_spec("spmd_types") else {}
    if importlib.util.find_spec(BEFORE):
        peers[BEFORE] = importlib.import_module(BEFORE).__version__
    benchmark.run({"ms": cases, "links": links, "overlap": overlap}, facts={"peers": peers}, draw=draw)


if __name__ == "__main__":
    main()
