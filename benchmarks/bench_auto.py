"""The automatic choice against each of its candidates: whole training steps on networks of several speeds.

    python benchmarks/bench_auto.py              # everything, ten minutes; hosts need root
    python benchmarks/bench_auto.py --links loopback 1gbit --models mlp --repeats 15

Two ranks on Gloo: on loopback, or one on each of two emulated hosts. One job trains each model with every
candidate, and with the automatic state after its choice: each repeat makes one step of each, in turns
forwards and backwards. Times are of the slowest rank, for zero_grad, forward, backward and step. 4 bits are
allowed (max_error=0.2), so that every candidate may be chosen.

Writes results/auto.json beside this file; running some cases replaces only their numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_hosts import EmulationUnavailableError
from hook_harness import run_on_hosts
from machine import describe_machine
from models import Transformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import AutoState, auto_hook
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "auto.json"
AUTO = "auto"
LINKS = ("loopback", "10gbit", "1gbit", "100mbit")
MAX_ERROR = 0.2
WARM_UP = 4
WORDS, WORDS_IN_ROW, WIDTH = 1000, 64, 256
ROWS = {"transformer": 4, "mlp": 8}
"""The rows of a batch, per model."""


def make_net(model: str) -> nn.Module:
    """Return a transformer, or layers so wide that communication takes longer than computation."""
    torch.manual_seed(0)
    if model == "transformer":
        return Transformer(WORDS, WIDTH, heads=4, layers=8)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))


def make_batch(model: str, seed: int) -> torch.Tensor:
    """Return a training batch for the model."""
    generator = torch.Generator().manual_seed(seed)
    if model == "transformer":
        return torch.randint(0, WORDS, (ROWS[model], WORDS_IN_ROW), generator=generator)
    return torch.randn(ROWS[model], 1024, generator=generator)


class Side:
    """A model in training with one hook.

    Args:
        model: The model's name.
        state: The hook's state.
        hook: The hook.
    """

    def __init__(self, model: str, state: object, hook: Any) -> None:
        self.ddp = DistributedDataParallel(make_net(model), bucket_cap_mb=4)
        self.ddp.register_comm_hook(state, hook)
        self._batch = make_batch(model, seed=dist.get_rank())
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def step(self) -> float:
        """Make a step; return its seconds."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self.ddp(self._batch).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - began


def until_chosen(side: Side, state: AutoState) -> int:
    """Train until there is a choice; return the number of steps."""
    steps = 0
    while state.choice is None:
        side.step()
        steps += 1
    return steps


def in_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every side's steps."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-WARM_UP, repeats):
        for name in list(sides) if repeat % 2 else reversed(list(sides)):
            dist.barrier()
            took = sides[name].step()
            if repeat >= 0:
                seconds[name].append(took)
    return seconds


def measure(rank: int, model: str, repeats: int) -> dict[str, Any]:
    """Return the choice, the number of steps before it, and the seconds of all sides after it."""
    del rank
    torch.set_num_threads(1)
    state = AutoState(max_error=MAX_ERROR)
    auto = Side(model, state, auto_hook)
    steps, choice = until_chosen(auto, state), state.choice
    assert choice is not None
    sides = {name: Side(model, *candidate) for name, candidate in AutoState().candidates.items()}
    seconds = in_turns({**sides, AUTO: auto}, repeats)
    return {"steps": steps, "choice": choice.candidate, "why": choice.why, "seconds": seconds}


def summarize(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's medians and quartiles in ms, and auto's time relative to the best."""
    times = {
        name: [1e3 * max(repeat) for repeat in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["seconds"]
    }
    sides = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        sides[name] = {"median_ms": round(median, 2), "quartiles_ms": [round(low, 2), round(high, 2)]}
    best = min((name for name in times if name != AUTO), key=lambda name: statistics.median(times[name]))
    # Ratios within one turn: whatever slows the machine for a while slows both.
    paired = statistics.median(own / other for own, other in zip(times[AUTO], times[best], strict=True))
    facts = {name: value for name, value in ranks[0].items() if name != "seconds"}
    return {
        **facts,
        "load_1_5_15_min": [round(value, 1) for value in os.getloadavg()],
        "repeats": len(times[AUTO]),
        "sides": sides,
        "best": best,
        "auto_of_best": round(statistics.median(times[AUTO]) / statistics.median(times[best]), 3),
        "auto_of_best_in_pairs": round(paired, 3),
    }


def be_a_rank(folder: Path, options: argparse.Namespace) -> None:
    """Run one rank on an emulated host."""
    dist.init_process_group("gloo")
    seen = measure(dist.get_rank(), options.models[0], options.repeats)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def run_case(link: str, model: str, repeats: int) -> dict[str, Any]:
    """Return the summary of one model on one network."""
    if link == "loopback":
        return summarize(run_ranks(measure, 2, model, repeats, timeout=600))
    options = [f"--models={model}", f"--repeats={repeats}"]
    ranks: Any = run_on_hosts([__file__, "rank"], options, 2, rate=link)
    return summarize(ranks)


def show(case: str, summary: dict[str, Any]) -> None:
    """Print a summary."""
    print(f"{case}: {summary['why']} (load {summary['load_1_5_15_min']})")
    for name, side in summary["sides"].items():
        print(f"  {name:<10}{side['median_ms']:>9} ms {side['quartiles_ms']}")
    print(
        f"  chosen in step {summary['steps']}; {AUTO} takes {summary['auto_of_best']} of {summary['best']}, "
        f"{summary['auto_of_best_in_pairs']} in pairs",
        flush=True,
    )


def main() -> None:
    """Run the requested parts, and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=("all", "rank"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument("--models", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    if options.part == "rank":
        be_a_rank(options.folder, options)
        return
    for link, model in itertools.product(options.links, options.models):
        try:
            summary = run_case(link, model, options.repeats)
        except EmulationUnavailableError as error:
            print(f"no emulated hosts: {error}", file=sys.stderr)
            continue
        case = f"{model}, {link}"
        show(case, summary)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        cells = results.get("links", {}).get("cases", {})
        results["links"] = {**describe_machine(), "cases": {**cells, case: summary}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
