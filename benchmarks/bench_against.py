"""Compare this checkout with another one: the same cases in turns, to show the cost of a change.

    git worktree add ../before TAG
    python benchmarks/bench_against.py ../before            # hosts need root
    python benchmarks/bench_against.py ../before --worlds 2 --hosts --repeats 9 --cases "8 bits, 25 MiB"
    python benchmarks/bench_against.py ../before --worlds --hosts 4 --rates 10gbit --cases "bf16, 1 MiB"
    python benchmarks/bench_against.py ../before --worlds --hosts --one-host 2 4 8

Each checkout has its own ranks, which wait while the other's run. Averages of buckets run in DDP models
that stay, so that a bucket is agreed on once, as in training; their time is from the hook's call, on all
ranks at once, to the end of the backward pass. On emulated hosts each rank has a host with a limited link of
its own; with --one-host the states are told that all ranks are on one host, as on a box with slow links only.

Writes results/against.json: per case the quartiles of the slowest rank on both sides, the median of the
ratios of neighbors in time, the ratio of the fastest repeats, and the bytes that the busiest rank sent. Cases
that were not measured again keep their results, if they are of the same other checkout. It needs compiled
kernels (``python build_cpu_kernels.py src/ddp_quant_hooks/kernels/cpu_kernels.so`` in its
packages/ddp-quant-hooks), like this one.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from emulated_hosts import EmulationUnavailableError, Host, address, emulated_hosts
from machine import describe_machine, describe_tree
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks" / "results" / "against.json"
ELEMENTS = 25 * 2**20 // 4
SIZES = {"25 MiB": (ELEMENTS, 1), "1 MiB": (1 << 18, 5), "64 KiB": (1 << 14, 20)}
"""Values of a bucket, and how often it is averaged in one run of a case."""
ONE_HOST = "one host"

Case: TypeAlias = Callable[[], object]
"""Runs once; returns the seconds that count as a ``float``, if these are not all."""
Make: TypeAlias = Callable[[], Case]
"""Makes a case on a rank, just before it runs first."""


class Weighted(nn.Module):
    """One parameter, whose gradient is this rank's values."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(len(values)))
        self._values = values

    def forward(self) -> torch.Tensor:
        """Return the sum of the weighted values."""
        return (self.parameter * self._values).sum()


def average(make: Callable[[], tuple[Any, Any]], size: str) -> Case:
    """Return the average of a bucket in a DDP model with a hook, made with its state."""
    values, count = SIZES[size]
    hook, state = make()
    began = 0.0

    def at_once(state: Any, bucket) -> Any:  # type: ignore[no-untyped-def] # noqa: ANN001
        nonlocal began
        dist.barrier()
        began = time.perf_counter()
        return hook(state, bucket)

    at_once.__annotations__.clear()  # strings here, which register_comm_hook refuses
    model = DistributedDataParallel(
        Weighted(torch.randn(values)), bucket_cap_mb=64, gradient_as_bucket_view=True
    )
    model.register_comm_hook(state, at_once)

    def run() -> float:
        seconds = 0.0
        for _ in range(count):
            model.zero_grad()
            model().backward()
            seconds += time.perf_counter() - began
        return seconds

    return run


def hook_cases() -> dict[str, Make]:
    """Average one bucket."""
    import ddp_compress_hooks as compress  # noqa: PLC0415 - from this rank's checkout
    import ddp_quant_hooks as quant  # noqa: PLC0415

    def quantized(**options: Any) -> Callable[[], tuple[Any, Any]]:
        return lambda: (
            quant.quantized_allreduce_hook,
            quant.QuantizedAllreduceState(min_bytes=0, **options),
        )

    # Before there was the option, a state took all ranks for one host's, or for as many hosts.
    known = "intra_node" in inspect.signature(quant.QuantizedAllreduceState).parameters
    hooks: dict[str, Callable[[], tuple[Any, Any]]] = {
        "fp32": lambda: (compress.allreduce_hook, None),
        "fp16": lambda: (compress.fp16_compress_hook, None),
        "bf16": lambda: (compress.bf16_compress_hook, None),
        "bf16, sum in fp32": lambda: (
            compress.bf16_compress_hook,
            compress.CompressState(accumulate="fp32"),
        ),
        "per channel": lambda: (quant.quantization_perchannel_hook, None),
        "8 bits": quantized(),
        "8 bits, feedback both": quantized(error_feedback="both"),
        "4 bits": quantized(bits=4),
        f"8 bits, {ONE_HOST}": quantized(**({"intra_node": "flat"} if known else {})),
    }
    return {f"{name}, {size}": partial(average, make, size) for name, make in hooks.items() for size in SIZES}


def collective_cases() -> dict[str, Make]:
    """Run collectives forward and backward."""
    import dist_autograd_collectives as dac  # noqa: PLC0415

    calls = {
        "all_reduce": dac.all_reduce,
        "all_to_all_single": lambda x: dac.all_to_all_single(torch.empty_like(x), x),
        "all_gather_cat": dac.all_gather_cat,
        "reduce to 0": lambda x: dac.reduce(x, 0),
    }

    def make(call: Callable[[torch.Tensor], torch.Tensor], kib: int, count: int) -> Case:
        x = torch.ones(kib * 256, requires_grad=True)
        return partial(_times, count, lambda: call(x).sum().backward())

    return {
        f"{name}, {kib} KiB": partial(make, call, kib, count)
        for kib, count in ((1, 20), (64, 20), (4096, 2))
        for name, call in calls.items()
    }


def overlap_cases() -> dict[str, Make]:
    """Train for one step."""
    from ddp_optim_overlap import overlap_optimizer  # noqa: PLC0415

    def make(**options: Any) -> Case:
        layers = [nn.Linear(512, 512) for _ in range(10)]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1.5)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        overlap_optimizer(model, optimizer)
        batch = torch.randn(16, 512)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return partial(_times, 5, step)

    return {f"overlapped step, 10 MB, {kind}": partial(make, **{kind: True}) for kind in ("fused", "foreach")}


def local_cases() -> dict[str, Make]:
    """Run what needs no other rank, and sync_module_states."""
    from ddp_quant_hooks import kernels  # noqa: PLC0415
    from dist_utils import apply_to_tensors, sync_module_states  # noqa: PLC0415

    layout = kernels.Layout("int8", 128)

    def kernel(name: str) -> Case:
        values, message = (
            torch.randn(ELEMENTS),
            torch.zeros(layout.message_bytes(ELEMENTS), dtype=torch.uint8),
        )
        if name == "encode":
            return lambda: kernels.encode(values, message, layout)
        return lambda: kernels.decode([message], layout, values)

    def containers() -> Case:
        batch = {str(index): [torch.ones(1)] * 8 for index in range(100)}
        return lambda: apply_to_tensors(lambda tensor: tensor, batch)

    def sync() -> Case:
        module, world = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10))), dist.group.WORLD
        return lambda: sync_module_states(module, world, 1 << 20, 0, [])

    return {
        "kernel: encode 25 MiB": partial(kernel, "encode"),
        "kernel: decode 25 MiB": partial(kernel, "decode"),
        "containers: 800 tensors": containers,
        "sync_module_states, 1 KiB": sync,
    }


def _times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def be_a_rank(wanted: Sequence[str]) -> None:
    """Run the case named by each line of standard input; print the seconds it took and the bytes it sent."""
    from dist_utils.testing import tcp_bytes_sent  # noqa: PLC0415 - from this rank's checkout

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    makes: dict[str, Make] = {
        name: make
        for cases in (hook_cases, collective_cases, overlap_cases, local_cases)
        for name, make in cases().items()
        if not wanted or any(part in name for part in wanted)
    }
    made: dict[str, Case] = {}
    print(json.dumps(list(makes)), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            made[name] = makes[name]()
        dist.barrier()
        sent, began = tcp_bytes_sent(), time.perf_counter()
        seconds = made[name]()
        took = seconds if isinstance(seconds, float) else time.perf_counter() - began
        print(json.dumps([took, tcp_bytes_sent() - sent]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """The ranks of one checkout, which run cases on demand."""

    def __init__(self, checkout: Path, world_size: int, hosts: list[Host], wanted: Sequence[str]) -> None:
        sources = os.pathsep.join(map(str, sorted(checkout.glob("packages/*/src"))))
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        shared = {
            **os.environ,
            "PYTHONPATH": sources,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "MASTER_ADDR": address(0) if hosts else "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            **({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}),
        }
        line = [sys.executable, "-W", "ignore", __file__, "--rank", *wanted]
        self._processes = [
            subprocess.Popen(
                [*hosts[rank], *line] if hosts else line,
                env={**shared, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        greetings = [self._answer(process) for process in self._processes]
        self.cases: list[str] = greetings[0]

    def run(self, case: str) -> tuple[float, int]:
        """Run a case once; return the seconds of the slowest rank, and the bytes of the busiest."""
        for process in self._processes:
            print(case, file=process.stdin, flush=True)
        answers = [self._answer(process) for process in self._processes]
        return max(seconds for seconds, _ in answers), max(sent for _, sent in answers)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line[0] == "[" and "Gloo" not in line:  # some versions of Gloo print, too
                return json.loads(line)
        raise RuntimeError("a rank has ended")


@contextlib.contextmanager
def both(
    other: Path, world_size: int, hosts: list[Host], wanted: Sequence[str]
) -> Iterator[tuple[Ranks, Ranks]]:
    """Start the ranks of both checkouts."""
    with contextlib.ExitStack() as stack:
        sides = []
        for checkout in (ROOT, other):
            sides.append(Ranks(checkout, world_size, hosts, wanted))
            stack.callback(sides[-1].end)
        yield sides[0], sides[1]


def compare(this: Ranks, other: Ranks, repeats: int) -> dict[str, Any]:
    """Return both sides' times of every case in ms, their ratios, and the bytes of the busiest rank."""
    found = {}
    for case in this.cases:
        times: tuple[list[float], list[float]] = [], []
        sent = [0, 0]
        for repeat in range(-2, repeats):  # the first rounds warm up
            order = (0, 1) if repeat % 2 else (1, 0)
            for side in order:
                seconds, sent[side] = (this, other)[side].run(case)
                if repeat >= 0:
                    times[side].append(1e3 * seconds)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(*times, strict=True))
        fastest = min(times[0]) / min(times[1])
        found[case] = {
            "this_ms": _summary(times[0]),
            "other_ms": _summary(times[1]),
            "ratio": round(ratio, 3),
            "ratio_of_fastest": round(fastest, 3),
            "this_bytes": sent[0],
            "other_bytes": sent[1],
            "repeats": repeats,
            "this": describe_tree(),
        }
        print(
            f"  {case:40}{found[case]['this_ms'][1]:9.2f}{found[case]['other_ms'][1]:9.2f}{ratio:7.2f}"
            f"{fastest:7.2f}{sent[0]:12}{sent[1]:12}",
            flush=True,
        )
    return found


def _summary(times: list[float]) -> list[float]:
    return [round(quartile, 3) for quartile in statistics.quantiles(times, n=4)]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4], help="ranks on loopback")
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="hosts of one rank each")
    parser.add_argument("--one-host", type=int, nargs="*", default=[], help="such, told to be one host")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of each host's link")
    parser.add_argument("--repeats", type=int, default=25, help="at least 2")
    parser.add_argument("--cases", nargs="+", help="parts of the names of cases")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    other = options.other.resolve()
    revision = ["git", "-C", str(other), "rev-parse", "--short", "HEAD"]
    named = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    tables = known.get("tables", {}) if known.get("other") == named else {}

    def add(name: str, count: int, hosts: list[Host], wanted: Sequence[str]) -> None:
        print(f"{name}: ms here, there, ratio, of the fastest; bytes of the busiest rank here, there")
        with both(other, count, hosts, wanted) as sides:
            tables[name] = {**tables.get(name, {}), **compare(*sides, options.repeats)}
        result = {**describe_machine(), "other": named, "load_average": os.getloadavg(), "tables": tables}
        options.output.write_text(json.dumps(result, indent=1) + "\n")

    for count in options.worlds:
        add(f"{count} ranks, loopback", count, [], options.cases or [])
    emulated = [
        (count, f"{count} hosts", [f", {size}" for size in ("25 MiB", "1 MiB")]) for count in options.hosts
    ]
    emulated += [(count, f"{count} ranks, {ONE_HOST}", [ONE_HOST]) for count in options.one_host]
    try:
        for rate in options.rates:
            for count, name, usual in emulated:
                with emulated_hosts(count, rate=rate) as hosts:
                    add(f"{name}, {rate}", count, hosts, options.cases or usual)
    except EmulationUnavailableError as error:
        print(f"SKIPPED the emulated hosts: {error}")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_a_rank(sys.argv[sys.argv.index("--rank") + 1 :])
    else:
        main()
