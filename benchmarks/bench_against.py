"""Compare this checkout with another one: the same cases in turns, to show the cost of a change.

    git worktree add ../before TAG
    python benchmarks/bench_against.py ../before            # hosts need root
    python benchmarks/bench_against.py ../before --worlds 2 --repeats 9 --cases "8 bits"

Each checkout has its own ranks, which wait while the other's run. Writes results/against.json: per case the
median and quartiles of the slowest rank on both sides, and the ratio. The other checkout needs compiled
kernels (``python build_cpu_kernels.py src/ddp_quant_hooks/kernels/cpu_kernels.so`` in its
packages/ddp-quant-hooks), like this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_hosts import EmulationUnavailableError, Host, address, emulated_hosts
from machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
ELEMENTS = 25 * 2**20 // 4
Case = Callable[[], object]


def hook_cases() -> dict[str, Case]:
    """Average one bucket."""
    from ddp_compress_hooks import (  # noqa: PLC0415 - from this rank's checkout
        CompressState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
    )
    from ddp_quant_hooks import (  # noqa: PLC0415
        QuantizedAllreduceState,
        quantization_perchannel_hook,
        quantized_allreduce_hook,
    )
    from dist_utils.testing import grad_bucket  # noqa: PLC0415

    large, small = (grad_bucket([torch.zeros(count)]) for count in (ELEMENTS, 1 << 14))
    for bucket in (large, small):
        bucket.buffer().normal_()
    cases: dict[str, Case] = {
        "fp32, 25 MiB": lambda: allreduce_hook(None, large).wait(),
        "fp16, 25 MiB": lambda: fp16_compress_hook(None, large).wait(),
        "bf16, 25 MiB": lambda: bf16_compress_hook(None, large).wait(),
        "per channel, 25 MiB": lambda: quantization_perchannel_hook(None, large).wait(),
    }
    in_fp32 = CompressState(accumulate="fp32")
    cases["bf16, sum in fp32, 25 MiB"] = lambda: bf16_compress_hook(in_fp32, large).wait()
    for name, options in {
        "8 bits": {},
        "8 bits, feedback both": {"error_feedback": "both"},
        "4 bits": {"bits": 4},
    }.items():
        state = QuantizedAllreduceState(min_bytes=0, **options)  # type: ignore[arg-type]
        cases[f"{name}, 25 MiB"] = lambda state=state: quantized_allreduce_hook(state, large).wait()
        cases[f"{name}, 64 KiB"] = lambda state=state: _times(
            20, lambda: quantized_allreduce_hook(state, small).wait()
        )
    return cases


def collective_cases() -> dict[str, Case]:
    """Run collectives forward and backward."""
    import dist_autograd_collectives as dac  # noqa: PLC0415

    calls = {
        "all_reduce": dac.all_reduce,
        "all_to_all_single": lambda x: dac.all_to_all_single(torch.empty_like(x), x),
        "all_gather_cat": dac.all_gather_cat,
        "reduce to 0": lambda x: dac.reduce(x, 0),
    }
    cases: dict[str, Case] = {}
    for kib, count in ((1, 20), (64, 20), (4096, 2)):
        for name, call in calls.items():
            x = torch.ones(kib * 256, requires_grad=True)
            cases[f"{name}, {kib} KiB"] = lambda x=x, call=call, count=count: _times(
                count, lambda: call(x).sum().backward()
            )
    return cases


def overlap_cases() -> dict[str, Case]:
    """Train for one step."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    from ddp_optim_overlap import overlap_optimizer  # noqa: PLC0415

    cases: dict[str, Case] = {}
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        layers = [torch.nn.Linear(512, 512) for _ in range(10)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1.5)
        optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
        overlap_optimizer(model, optimizer)
        batch = torch.randn(16, 512)

        def step(model: Any = model, optimizer: Any = optimizer, batch: Any = batch) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        cases[f"overlapped step, 10 MB, {name}"] = lambda step=step: _times(5, step)
    return cases


def local_cases() -> dict[str, Case]:
    """Run what needs no other rank, and sync_module_states."""
    from ddp_quant_hooks import kernels  # noqa: PLC0415
    from ddp_quant_hooks.kernels import Layout  # noqa: PLC0415
    from dist_utils import apply_to_tensors, sync_module_states  # noqa: PLC0415

    layout, values = Layout("int8", 128), torch.randn(ELEMENTS)
    message = torch.empty(layout.message_bytes(ELEMENTS), dtype=torch.uint8)
    batch = {str(index): [torch.ones(1)] * 8 for index in range(100)}
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(10)))
    world: Any = dist.group.WORLD
    return {
        "kernel: encode 25 MiB": lambda: kernels.encode(values, message, layout),
        "kernel: decode 25 MiB": lambda: kernels.decode([message], layout, values),
        "containers: 800 tensors": lambda: apply_to_tensors(lambda tensor: tensor, batch),
        "sync_module_states, 1 KiB": lambda: sync_module_states(module, world, 1 << 20, 0, []),
    }


def _times(count: int, call: Case) -> None:
    for _ in range(count):
        call()


def be_a_rank() -> None:
    """Run the case named by each line of standard input, and print the seconds that it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    cases = {**hook_cases(), **collective_cases(), **overlap_cases(), **local_cases()}
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        cases[line.strip()]()
        print(time.perf_counter() - began, flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """The ranks of one checkout, which run cases on demand."""

    def __init__(self, checkout: Path, world_size: int, port: int, hosts: list[Host]) -> None:
        sources = os.pathsep.join(map(str, sorted(checkout.glob("packages/*/src"))))
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
        line = [sys.executable, "-W", "ignore", __file__, "--rank"]
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
        self.cases: list[str] = json.loads(greetings[0])

    def seconds(self, case: str) -> float:
        """Run a case once and return the time of the slowest rank."""
        for process in self._processes:
            print(case, file=process.stdin, flush=True)
        return max(float(self._answer(process)) for process in self._processes)

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
    def _answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line[0] in "[0123456789" and "Gloo" not in line:  # some versions of Gloo print, too
                return line
        raise RuntimeError("a rank has ended")


@contextlib.contextmanager
def both(other: Path, world_size: int, hosts: list[Host]) -> Iterator[tuple[Ranks, Ranks]]:
    """Start the ranks of both checkouts."""
    with contextlib.ExitStack() as stack:
        sides = []
        for port, checkout in ((29821, ROOT), (29822, other)):
            sides.append(Ranks(checkout, world_size, port, hosts))
            stack.callback(sides[-1].end)
        yield sides[0], sides[1]


def compare(this: Ranks, other: Ranks, wanted: str, repeats: int) -> dict[str, Any]:
    """Return both sides' times of every case that has ``wanted`` in its name, in ms, and their ratio."""
    found = {}
    for case in this.cases:
        if wanted not in case:
            continue
        times: tuple[list[float], list[float]] = [], []
        for repeat in range(-2, repeats):  # the first rounds warm up
            order = (0, 1) if repeat % 2 else (1, 0)
            for side in order:
                seconds = (this, other)[side].seconds(case)
                if repeat >= 0:
                    times[side].append(1e3 * seconds)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(*times, strict=True))
        found[case] = {
            "this_ms": _summary(times[0]),
            "other_ms": _summary(times[1]),
            "ratio": round(ratio, 3),
        }
        print(f"{case:42} {found[case]['this_ms'][1]:9.2f} {found[case]['other_ms'][1]:9.2f}  {ratio:.2f}")
    return found


def _summary(times: list[float]) -> list[float]:
    return [round(quartile, 3) for quartile in statistics.quantiles(times, n=4)]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--hosts", type=int, nargs="*", default=[2])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--cases", default="")
    options = parser.parse_args()
    result: dict[str, Any] = describe_machine()
    revision = ["git", "-C", str(options.other), "rev-parse", "--short", "HEAD"]
    result["other"] = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    result["repeats"] = options.repeats
    for world_size in options.worlds:
        print(f"{world_size} ranks on loopback: ms here, ms there, ratio")
        with both(options.other.resolve(), world_size, []) as sides:
            result[f"{world_size} ranks, loopback"] = compare(*sides, options.cases, options.repeats)
    for count in options.hosts:
        print(f"{count} hosts with 1 Gbit/s: ms here, ms there, ratio")
        try:
            with emulated_hosts(count) as hosts, both(options.other.resolve(), count, hosts) as sides:
                result[f"{count} hosts, 1 Gbit/s"] = compare(
                    *sides, options.cases or "25 MiB", options.repeats
                )
        except EmulationUnavailableError as error:
            result[f"{count} hosts, 1 Gbit/s"] = str(error)
    result["load_average"] = os.getloadavg()
    (ROOT / "benchmarks/results/against.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_a_rank()
    else:
        main()
