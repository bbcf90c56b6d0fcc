"""dist_utils.apply_to_tensors against its peers: microseconds per tensor on realistic batches.

    pip install optree lightning-utilities accelerate
    python benchmarks/bench_containers.py

Every repeat runs all functions, in turns forwards and backwards. Writes results/containers.json beside
this file. "keep" returns each tensor itself, so only the function's own cost is left; "cast" makes new
tensors. A peer that leaves the batch's tensors unchanged, or returns another type, gets no number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optree
import torch
from accelerate.utils import recursively_apply
from lightning_utilities.core.apply_func import apply_to_collection
from machine import describe_machine
from torch.distributed import utils as pytorch
from torch.utils import _pytree as pytree

from dist_utils import apply_to_tensors, recursive_to

RESULTS = Path(__file__).parent / "results" / "containers.json"


class ModelOutput(OrderedDict[str, Any]):
    """Like Hugging Face's: its items are also attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Set the item and the attribute."""
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class Sample:
    """One sample of a batch."""

    image: torch.Tensor
    label: torch.Tensor
    meta: dict[str, Any]


@dataclasses.dataclass
class Batch:
    """Dataclasses inside a dataclass."""

    samples: list[Sample]
    name: str


def tensor() -> torch.Tensor:
    """Return a small tensor, so that only the walk is measured."""
    return torch.ones(1)


def model_output() -> ModelOutput:
    """Return an output with 100 tensors."""
    return ModelOutput(
        loss=tensor(),
        logits=tensor(),
        hidden_states=tuple(tensor() for _ in range(49)),
        attentions=tuple(tensor() for _ in range(49)),
    )


BATCHES: dict[str, Callable[[], Any]] = {
    "dict of lists": lambda: {
        "x": [tensor() for _ in range(100)],
        "y": [tensor() for _ in range(100)],
        "n": 2,
    },
    "ModelOutput": model_output,
    "dataclasses": lambda: Batch(
        [Sample(tensor(), tensor(), {"mask": tensor(), "id": 7}) for _ in range(60)], "train"
    ),
}


def on_tensors(fn: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Return ``fn`` for functions that pass every leaf to it."""
    return lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf


PEERS: dict[str, Callable[[Callable[[torch.Tensor], Any], Any], Any]] = {
    "dist_utils": apply_to_tensors,
    "torch": pytorch._apply_to_tensors,  # noqa: SLF001 - it is compared
    "torch pytree": lambda fn, batch: pytree.tree_map(on_tensors(fn), batch),
    "optree": lambda fn, batch: optree.tree_map(on_tensors(fn), batch),
    "lightning-utilities": lambda fn, batch: apply_to_collection(batch, torch.Tensor, fn),
    "accelerate": recursively_apply,
}
TASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "keep": lambda tensor: tensor,
    "cast": lambda tensor: tensor.to(torch.bfloat16),
}
# "move" is recursive_to; only PyTorch has a counterpart.
MOVERS: dict[str, Callable[[Any], Any]] = {
    "dist_utils": lambda batch: recursive_to(batch, torch.device("meta"), False)[0],
    "torch": lambda batch: pytorch._recursive_to(batch, torch.device("meta"), False)[0],  # noqa: SLF001
}


def count(batch: Any) -> int:
    """Return the number of tensors."""
    found = []
    apply_to_tensors(found.append, batch)
    return len(found)


def works(run: Callable[[Any], Any], batch: Any) -> bool:
    """Whether ``run`` reaches all tensors and keeps the type of the batch."""
    try:
        result = run(batch)
    except Exception:  # noqa: BLE001 - a peer that raises anything does not work
        return False
    reached: list[bool] = []
    apply_to_tensors(lambda tensor: reached.append(tensor.dtype == torch.bfloat16 or tensor.is_meta), result)
    return type(result) is type(batch) and len(reached) == count(batch) and all(reached)


def measure(sides: dict[str, Callable[[Any], Any]], batch: Any, repeats: int) -> dict[str, Any]:
    """Return median and quartiles in microseconds per tensor."""
    tensors = count(batch)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-5, repeats):  # the first rounds warm up
        for name in list(sides) if repeat % 2 else reversed(sides):
            began = time.perf_counter()
            sides[name](batch)
            if repeat >= 0:
                times[name].append((time.perf_counter() - began) * 1e6 / tensors)
    summary = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        summary[name] = {"median_us": round(median, 3), "quartiles_us": [round(low, 3), round(high, 3)]}
    return summary


def main() -> None:
    """Measure everything, print and store it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        **describe_machine(),
        "peers": {name: version(name) for name in ("optree", "lightning-utilities", "accelerate")},
        "repeats": options.repeats,
        "us_per_tensor": {},
    }
    for batch_name, make in BATCHES.items():
        batch = make()
        fit = [name for name, run in PEERS.items() if works(lambda b, run=run: run(TASKS["cast"], b), batch)]
        table = {
            task: measure(
                {name: lambda b, run=PEERS[name], fn=fn: run(fn, b) for name in fit}, batch, options.repeats
            )
            for task, fn in TASKS.items()
        }
        movers = {name: run for name, run in MOVERS.items() if works(run, batch)}
        table["move"] = measure(movers, batch, options.repeats)
        results["us_per_tensor"][batch_name] = table
        print(f"\n{batch_name}, {count(batch)} tensors: us a tensor, median [quartiles]")
        for task, row in table.items():
            ours = row["dist_utils"]["median_us"]
            for name in PEERS if task != "move" else MOVERS:
                if (entry := row.get(name)) is None:
                    print(f"  {task:<6}{name:<22}does not work")
                    continue
                low, high = entry["quartiles_us"]
                print(
                    f"  {task:<6}{name:<22}{entry['median_us']:6.2f} [{low:.2f}, {high:.2f}]"
                    f"   ours is {ours / entry['median_us']:.2f} of it"
                )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {RESULTS}")


if __name__ == "__main__":
    main()
