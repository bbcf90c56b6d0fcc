"""FSDP2 with parameters and gradients in few bits against native FSDP2: forward and backward on slow links.

    python benchmarks/bench_fsdp_gather.py

Two emulated hosts of two ranks, and four of one; 8.4 million parameters in 8 layers, each with
``fully_shard`` over all ranks. Times are of the slowest rank, for one forward and backward pass. Bytes are
what passes a host's interface in one pass, in the busier direction, headers and acknowledgments included, for
each parameter. ``small`` are gathers of one small module on loopback. ``calls`` is the time of the calls that
encode and decode a module of many ranks, without any communication. ``inside`` compares what ranks of a host
can send each other, for one module: the messages of 8 bits, or what these decode to. Writes
results/fsdp_gather.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fsdp_steps import BATCH, PARAMETERS, RATES, WIDTH, model, times_of
from harness import Benchmark, Found, in_turns, load, print_times, slowest, spread
from rank_processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_gather, quantize_reduce_scatter
from ddp_quant_hooks.fsdp.gather_plan import Route, ShardFormat, plan_route, shard_format
from ddp_quant_hooks.kernels import Layout
from dist_utils import start_messages

PLACEMENTS = {"2 hosts of 2 ranks": (0, 0, 1, 1), "4 hosts of 1 rank": (0, 1, 2, 3)}
NATIVE = "native FSDP2, fp32"
RESHARDED = "resharded to 2 ranks"
SIDES: dict[str, dict[str, Any]] = {
    NATIVE: {},
    f"native, {RESHARDED}": {"reshard": 2},
    "gradients in 8 bits": {"gradients": {}},
    "both in 8 bits": {"gradients": {}, "parameters": {}},
    f"both in 8 bits, {RESHARDED}": {"gradients": {}, "parameters": {}, "reshard": 2},
    f"weights in 8 bits, gradients in 4, {RESHARDED}": {
        "gradients": {"bits": 4, "error_feedback": "none"},
        "parameters": {},
        "reshard": 2,
    },
    "both in 8 bits, kept for backward": {"gradients": {}, "parameters": {"keep_for_backward": True}},
    "differences in 4 bits, gradients in 8": {"gradients": {}, "parameters": {"differences": True}},
    "differences and gradients in 4 bits": {
        "gradients": {"bits": 4, "error_feedback": "none"},
        "parameters": {"differences": True},
    },
    "gradients in 16 bits": {"gradients": {"bits": 16}},
}
SMALL = (32, 64, 128, 256, 512, 1024)
"""KiB of a module in fp32."""
INSIDE = {
    "1 host of 2 ranks": ((0, 0), None),
    "2 hosts of 2 ranks": ((0, 0, 1, 1), "1gbit"),
}
"""For each placement the hosts of ranks, and the rate between them."""
CALLS = {
    "64 ranks, 9 parameters in one run": [4096] * 9,
    "64 ranks, 9 parameters, a run for each": [4100] * 9,
}


def models(names: list[str]) -> dict[str, torch.nn.Module]:
    """Return the models of some sides."""
    mesh, found = init_device_mesh("cpu", (4,)), {}
    for name in names:
        found[name] = model(mesh, SIDES[name].get("reshard", True))
        if "gradients" in SIDES[name]:
            quantize_reduce_scatter(found[name], QuantizedAllreduceState(mesh, **SIDES[name]["gradients"]))
        if "parameters" in SIDES[name]:
            quantize_all_gather(found[name], **SIDES[name]["parameters"])
    return found


def times(rate: str, repeats: int, where: str, names: Sequence[str] = tuple(SIDES)) -> dict[str, Any]:
    """Return times and bytes of some sides with one rate of the links and one placement."""
    inside = where != "4 hosts of 1 rank"
    make = partial(models, [name for name in names if inside or RESHARDED not in name])
    return times_of(make, lambda _: NATIVE, rate=rate, repeats=repeats, placement=PLACEMENTS[where])


def cases(rate: str, where: str, options: Namespace) -> Iterator[Found]:
    """Measure with one rate of the links and one placement."""
    found = times(rate, options.repeats, where)
    print_times(f"{where}, {RATES[rate]}, load {load()}", found, NATIVE)
    for name, entry in found.items():
        print(f"  {name:<48}{entry['bytes_a_parameter']:6.2f} bytes a parameter")
    yield ("times", where, rate), found


def measure_small(_: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of gathers of small modules, natively and in 8 bits."""
    gathers: dict[str, Callable[[], None]] = {}
    for kib in SMALL:
        for name in ("native", "8 bits"):
            net = fully_shard(torch.nn.Linear(256, kib, bias=False))
            if name == "8 bits":
                quantize_all_gather(net, min_bytes=0)

            def gather(net: Any = net) -> None:
                for _ in range(10):
                    net.unshard()
                    net.reshard()

            gathers[f"{kib} KiB, {name}"] = gather
    return in_turns(gathers, repeats)


def small(options: Namespace) -> Iterator[Found]:
    """Measure gathers of small modules on loopback."""
    for ranks in (2, 4):
        found = slowest(on_ranks(measure_small, ranks, 4 * options.repeats))
        title = f"10 gathers of a module, {ranks} ranks, load {load()}"
        print_times(title, found, lambda name: f"{name.split(',')[0]}, native")
        yield ("small", ranks), found


def gather_messages(route: Route, form: ShardFormat, shard: torch.Tensor, output: torch.Tensor) -> None:
    """Gather in 8 bits between hosts and inside of them."""
    group, rows = dist.group.WORLD, torch.empty(len(route.order), form.message_bytes, dtype=torch.uint8)
    place = dict(zip(route.order, rows, strict=True))
    mine = place[dist.get_rank()]
    form.encode(shard, mine)
    receives = [(rank, place[rank]) for rank in route.receives]
    for work in start_messages(group, receives=receives, sends=[(rank, mine) for rank in route.sends]):
        work.wait()
    receives = [(rank, rows[span.start : span.stop]) for rank, span in route.handed_on]
    handed_on = rows[route.hands_on.start : route.hands_on.stop]
    for work in start_messages(group, receives=receives, sends=[(rank, handed_on) for rank in route.inside]):
        work.wait()
    form.decode(rows.flatten(), route.order, output.flatten())


def gather_values(route: Route, form: ShardFormat, shard: torch.Tensor, output: torch.Tensor) -> None:
    """Gather in 8 bits between hosts; inside of them whoever got a message sends what it decodes to."""
    group, me = dist.group.WORLD, dist.get_rank()
    message = torch.empty(form.message_bytes, dtype=torch.uint8)
    entering = torch.empty(len(route.entering), form.message_bytes, dtype=torch.uint8)
    form.encode(shard, message)
    works = start_messages(
        group,
        receives=zip(route.entering, entering, strict=True),
        sends=[(rank, message) for rank in route.leaving],
    )
    form.decode(message, (0,), output[me])
    known = [me, *route.entering]
    for work in works:
        work.wait()
    for rank, received in zip(route.entering, entering, strict=True):
        form.decode(received, (0,), output[rank])
    columns = [(peer, (peer, *route.order[span.start : span.stop])) for peer, span in route.handed_on]
    works = start_messages(
        group,
        receives=[(peer, output[rank].view(torch.uint8)) for peer, ranks in columns for rank in ranks],
        sends=[(peer, output[rank].view(torch.uint8)) for peer in route.inside for rank in known],
    )
    for work in works:
        work.wait()


def measure_inside(rank: int, repeats: int, hosts: tuple[int, ...]) -> dict[str, list[float]]:
    """Return the seconds of gathers of one module, by what the ranks of a host send each other."""
    route, length = plan_route(hosts, rank), WIDTH * WIDTH // len(hosts)
    gathers: dict[str, Callable[[], None]] = {}
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        form = shard_format(((length, False),), Layout("int8", 128, rotate=True), dtype.itemsize)
        shard = torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for what, gather in (("messages of 8 bits", gather_messages), ("values", gather_values)):
            name = f"{what}, {str(dtype).removeprefix('torch.')}"
            outputs[name] = torch.empty(len(hosts), length, dtype=dtype)
            gathers[name] = partial(gather, route, form, shard, outputs[name])
    seconds = in_turns(gathers, repeats)
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(outputs[f"messages of 8 bits, {dtype}"], outputs[f"values, {dtype}"])
    return seconds


def inside(options: Namespace) -> Iterator[Found]:
    """Measure what the ranks of a host send each other."""
    for where, (hosts, rate) in INSIDE.items():
        ranks = on_ranks(measure_inside, len(hosts), 10 * options.repeats, hosts, rate=rate, placement=hosts)
        found = slowest(ranks)
        title = f"a module of {WIDTH} x {WIDTH}, {where}, load {load()}"
        print_times(title, found, lambda name: f"messages of 8 bits, {name.split(', ')[1]}")
        yield ("inside", where), found


def calls(options: Namespace) -> Iterator[Found]:
    """Measure the calls for a module of many ranks, without communication."""
    torch.set_num_threads(1)
    for name, lengths in CALLS.items():
        form = shard_format(tuple((length, False) for length in lengths), Layout("int8", 128, rotate=True), 2)
        ranks, shard = 64, torch.randn(sum(lengths)).bfloat16()
        memory = torch.zeros(ranks * form.message_bytes, dtype=torch.uint8)
        output, order = torch.empty(ranks * shard.numel(), dtype=torch.bfloat16), tuple(range(ranks))
        for row in memory.view(ranks, -1):
            form.encode(shard, row)
        decode = partial(form.decode, memory, order, output)
        seconds = in_turns({"decode": decode}, 10 * options.repeats)["decode"]
        entry = {"runs": len(form.runs), "values": output.numel(), **spread([1e3 * one for one in seconds])}
        print(f"{name}: {entry}")
        yield ("calls", name), entry


if __name__ == "__main__":
    parts = {
        f"{len(set(PLACEMENTS[where]))}-hosts-{rate}": partial(cases, rate, where)
        for where in PLACEMENTS
        for rate in RATES
    }
    facts = {"parameters": PARAMETERS, "batch": BATCH}
    Benchmark(__file__, __doc__, repeats=5).run(
        {**parts, "small": small, "calls": calls, "inside": inside}, facts=facts
    )
