"""dist_utils.apply_to_tensors against its peers: microseconds per tensor on realistic batches.

    pip install optree lightning-utilities accelerate
    python benchmarks/bench_containers.py

"keep" returns each tensor itself, so only the function's own cost is left; "cast" makes new tensors. A peer
that leaves the batch's tensors unchanged, or returns another type, gets no number. Writes
results/containers.json.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import optree
import torch
from accelerate.utils import recursively_apply
from harness import Benchmark, Found, in_turns, print_times, spread
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed import utils as pytorch
from torch.utils import _pytree as pytree

from dist_utils import apply_to_tensors, recursive_to


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
    walks = {name: lambda walk=walk: walk(batch) for name, walk in sides.items()}
    return {
        name: spread([1e6 * one / tensors for one in seconds], "_us", digits=3)
        for name, seconds in in_turns(walks, repeats, warm_up=5).items()
    }


def cases(options: Namespace) -> Iterator[Found]:
    """Measure every batch."""
    for batch_name, make in BATCHES.items():
        batch = make()
        fit = [name for name, run in PEERS.items() if works(lambda b, run=run: run(TASKS["cast"], b), batch)]
        tasks = {
            task: {name: lambda b, run=PEERS[name], fn=fn: run(fn, b) for name in fit}
            for task, fn in TASKS.items()
        }
        tasks["move"] = {name: run for name, run in MOVERS.items() if works(run, batch)}
        for task, sides in tasks.items():
            times = measure(sides, batch, options.repeats)
            print_times(f"{batch_name}, {count(batch)} tensors, {task}, each", times, "torch", unit="us")
            missing = ", ".join(PEERS.keys() - fit) or "none"
            print(f"  do not work: {missing}")
            yield ("us_per_tensor", batch_name, task), times


if __name__ == "__main__":
    torch.set_num_threads(1)
    peers = {name: version(name) for name in ("optree", "lightning-utilities", "accelerate")}
    benchmark = Benchmark(__file__, __doc__, repeats=300)
    benchmark.run({"us_per_tensor": cases}, facts={"peers": peers})
