"""The automatic choice against each of its candidates: whole training steps on networks of several speeds.

    python benchmarks/bench_auto.py              # everything, ten minutes; hosts need root
    python benchmarks/bench_auto.py loopback 1gbit --models mlp --repeats 15

Two ranks on Gloo: on loopback, or one on each of two emulated hosts. One job trains each model with every
candidate, and with the automatic state after its choice. Times are of the slowest rank, for zero_grad,
forward, backward and step. 4 bits are allowed (max_error=0.2), so that every candidate may be chosen. Writes
results/auto.json.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Benchmark, Found, in_pairs, in_turns, load, of_slowest, print_times, spread
from rank_processes import on_ranks
from tasks import Encoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import AutoState, auto_hook

AUTO = "auto"
LINKS = {"loopback": None, "10gbit": "10gbit", "1gbit": "1gbit", "100mbit": "100mbit"}
MAX_ERROR = 0.2
WORDS, WORDS_IN_ROW, WIDTH = 1000, 64, 256
ROWS = {"transformer": 4, "mlp": 8}
"""The rows of a batch, per model."""


def make_net(model: str) -> nn.Module:
    """Return a transformer, or layers so wide that communication takes longer than computation."""
    torch.manual_seed(0)
    if model == "transformer":
        return Encoder(WORDS, WIDTH, heads=4, layers=8)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))


def make_batch(model: str, seed: int) -> torch.Tensor:
    """Return a training batch for the model."""
    generator = torch.Generator().manual_seed(seed)
    if model == "transformer":
        return torch.randint(0, WORDS, (ROWS[model], WORDS_IN_ROW), generator=generator)
    return torch.randn(ROWS[model], 1024, generator=generator)


class Side:
    """A model in training with one hook; a call makes a step."""

    def __init__(self, model: str, state: object, hook: Any) -> None:
        self._ddp = DistributedDataParallel(make_net(model), bucket_cap_mb=4)
        self._ddp.register_comm_hook(state, hook)
        self._batch = make_batch(model, seed=dist.get_rank())
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-3)

    def __call__(self) -> None:
        """Make a step."""
        self._optimizer.zero_grad()
        self._ddp(self._batch).square().mean().backward()
        self._optimizer.step()


def measure(rank: int, model: str, repeats: int) -> dict[str, Any]:  # noqa: ARG001 - run_ranks gives it
    """Return the choice, the number of steps before it, and the seconds of all sides after it."""
    state, steps = AutoState(max_error=MAX_ERROR), 0
    auto = Side(model, state, auto_hook)
    while (choice := state.choice) is None:
        auto()
        steps += 1
    sides = {name: Side(model, *candidate) for name, candidate in AutoState().candidates.items()}
    seconds = in_turns({**sides, AUTO: auto}, repeats, warm_up=4)
    return {"steps": steps, "choice": choice.candidate, "why": choice.why, "seconds": seconds}


def summarize(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's medians and quartiles in ms, and auto's time relative to the best."""
    times = of_slowest([rank["seconds"] for rank in ranks])
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in times if name != AUTO), key=lambda name: medians[name])
    return {
        **{name: value for name, value in ranks[0].items() if name != "seconds"},
        "load_1_5_15_min": load(),
        "repeats": len(times[AUTO]),
        "sides": {name: spread(values) for name, values in times.items()},
        "best": best,
        "auto_of_best": round(medians[AUTO] / medians[best], 3),
        "auto_of_best_in_pairs": round(statistics.median(in_pairs(times[AUTO], times[best])), 3),
    }


def on_link(link: str, options: Namespace) -> Iterator[Found]:
    """Measure every model on one network."""
    for model in options.models:
        found = summarize(on_ranks(measure, 2, model, options.repeats, rate=LINKS[link]))
        case = f"{model}, {link}"
        print_times(f"{case}: {found['why']}, in step {found['steps']}", found["sides"], found["best"])
        print(f"  in pairs {AUTO} takes {found['auto_of_best_in_pairs']} of {found['best']}, load {load()}")
        yield ("links", "cases", case), found


def main() -> None:
    """Run the requested parts."""
    benchmark = Benchmark(__file__, __doc__, repeats=31)
    benchmark.parser.add_argument("--models", nargs="+", default=list(ROWS), choices=list(ROWS))
    benchmark.run({link: partial(on_link, link) for link in LINKS})


if __name__ == "__main__":
    main()
