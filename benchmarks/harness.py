"""The command of every benchmark, its turns, its summaries and its result file.

A benchmark measures all sides in one process group, in turns forwards and backwards, so that they meet the
same load, and reports medians and quartiles of the slowest rank. Its result file in ``results/`` has the
date, the machine, the versions and the commit in its head. A run of some parts or cases replaces only their
numbers, whose head is then below ``"measured"``; a run of everything begins a new file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from emulated_hosts import EmulationUnavailableError, interface_bytes
from machine import describe_machine, describe_tree

RESULTS = Path(__file__).parent / "results"

_NO_FACTS = {"output", "parts", "plot"}
"""Options that say nothing of what was measured."""

Found: TypeAlias = tuple[tuple[Any, ...], Any]
"""The keys that lead to an entry of a result file, and the entry."""
Part: TypeAlias = Callable[[argparse.Namespace], Iterable[Found]]
"""Measures, prints, and yields what to store, entry by entry, so that an interrupted run keeps them."""


class Results:
    """A result file.

    Args:
        path: The file.
        head: The date, the machine, the versions, the commit, and what else is the same for all entries.
        fresh: Whether the first entry replaces all entries of the file.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], *, fresh: bool) -> None:
        self._path, self._head = path, head
        self.found: dict[str, Any] = {} if fresh or not path.exists() else json.loads(path.read_text())
        self._new = not self.found
        self.stored = 0
        """How many entries were put into the file."""

    @property
    def replaced(self) -> bool:
        """Whether the file has nothing of an older run any more."""
        return self._new and self.stored > 0

    def store(self, keys: Sequence[Any], entry: Any) -> None:
        """Put an entry into the file; entries of other keys stay."""
        self.stored += 1
        *parents, last = map(str, keys)
        if self._new:
            self.found |= self._head
        else:
            self.found.setdefault("measured", {})[" / ".join([*parents, last])] = self._head
        place = self.found
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = json.loads(json.dumps(entry))  # pictures are drawn of what a reader of the file meets
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")

    def take(self, part: str, entries: Iterable[Found]) -> bool:
        """Store a part's entries; return whether this machine can measure it."""
        try:
            for keys, entry in entries:
                self.store(keys, entry)
        except EmulationUnavailableError as error:
            print(f"SKIPPED {part}: {error}", file=sys.stderr)
            return False
        return True


class Benchmark:
    """The command of a benchmark.

    Args:
        script: The benchmark's file, ``bench_NAME.py``; its results are ``results/NAME.json`` and ``.png``.
        doc: Its description.
        repeats: The default number of repeats, for quartiles at least 2; ``None``: it has no such option.
    """

    def __init__(self, script: str, doc: str | None, repeats: int | None = None) -> None:
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        name = Path(script).stem.removeprefix("bench_")
        self.parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
        if repeats is not None:
            self.parser.add_argument("--repeats", type=int, default=repeats, help="at least 2")

    def run(
        self,
        parts: Mapping[str, Part],
        *,
        facts: Mapping[str, Any] | None = None,
        draw: Callable[[dict[str, Any], Path], None] | None = None,
    ) -> None:
        """Measure the parts that the command line names, or all, and store and draw them.

        Args:
            parts: The parts by name.
            facts: More for the head of the result file, which also has the options.
            draw: Draws the results into a file.
        """
        self.parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
        if draw is not None:
            self.parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
        options = self.parser.parse_args()
        if unknown := set(options.parts) - set(parts):
            self.parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        if getattr(options, "repeats", 2) < 2:
            self.parser.error("--repeats must be at least 2, for the quartiles")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks warn when a private group ends
        only_plot = getattr(options, "plot", False)
        chosen_options = {key: value for key, value in vars(options).items() if key not in _NO_FACTS}
        head = {**describe_machine(), "tree": describe_tree(), **(facts or {}), **chosen_options}
        results = Results(options.output, head, fresh=self._everything(options))
        chosen = [] if only_plot else options.parts or parts
        skipped = [name for name in chosen if not results.take(name, parts[name](options))]
        if draw is not None and results.found:
            draw(results.found, options.output.with_suffix(".png"))
        if results.stored:
            print(f"\nwritten: {options.output}")
        if skipped:
            before = "no longer in the file" if results.replaced else "in the file as before"
            sys.exit(f"not measured here, and {before}: {', '.join(skipped)}")

    def _everything(self, options: argparse.Namespace) -> bool:
        usual = vars(self.parser.parse_args([])) | {"output": options.output}
        return all(usual[name] == value for name, value in vars(options).items() if name != "repeats")


class Seconds(dict[str, float]):
    """Times that a side took itself, by name; under its own name it replaces what :func:`in_turns` took."""


def in_turns(
    sides: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warm_up: int = 2,
    prepare: Callable[[str], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Return the seconds of every run of every side, in turns forwards and backwards.

    Args:
        sides: The calls to measure. They may return :class:`Seconds`.
        repeats: How often each runs.
        warm_up: How often each runs before that, uncounted.
        prepare: Called with a side's name before its time begins. After that all ranks wait for each other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-warm_up, repeats):
        for name in list(sides) if repeat % 2 else reversed(list(sides)):
            prepare(name)
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            result = sides[name]()
            took = time.perf_counter() - began
            if repeat >= 0:
                parts = result if isinstance(result, Seconds) else {}
                for part, value in {name: took, **parts}.items():
                    seconds.setdefault(part, []).append(value)
    return seconds


def bytes_on_link(run: Callable[[], object], repeats: int) -> float:
    """Return the bytes of one run on this host's link, in the busier direction, headers included.

    Args:
        run: Called on every rank.
        repeats: How many runs are counted together.
    """
    dist.barrier()
    before = interface_bytes()
    dist.barrier()
    for _ in range(repeats):
        run()
    dist.barrier()
    moved = max(now - then for now, then in zip(interface_bytes(), before, strict=True))
    dist.barrier()  # nobody sends more before all have counted
    return moved / repeats


def of_slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the milliseconds of the slowest rank in every repeat, by side."""
    return {
        name: [1e3 * max(repeat) for repeat in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def spread(values: Sequence[float], unit: str = "_ms", digits: int = 2) -> dict[str, Any]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {
        f"median{unit}": round(median, digits),
        f"quartiles{unit}": [round(low, digits), round(high, digits)],
    }


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return median and quartiles of the slowest rank's times, in ms."""
    return {name: spread(times) for name, times in of_slowest(ranks).items()}


def in_pairs(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios within each turn: whatever slows the machine for a while slows both."""
    return [one / other for one, other in zip(over, under, strict=True)]


def load() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes."""
    return [round(value, 1) for value in os.getloadavg()]


def gpu_name() -> str | None:
    """Return the name of the first GPU, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def print_times(
    title: str,
    times: Mapping[str, Mapping[str, Any]],
    baseline: Callable[[str], str] | str = "",
    unit: str = "ms",
) -> None:
    """Print medians and quartiles, and each median as a share of its baseline's.

    Args:
        title: Of the table.
        times: Summaries by side.
        baseline: A side, or maps each side to the one that it is compared with.
        unit: The unit in the summaries' keys.
    """
    print(f"\n{title}: {unit}, median [quartiles]")
    for name, entry in times.items():
        low, high = entry[f"quartiles_{unit}"]
        median, base = entry[f"median_{unit}"], baseline if isinstance(baseline, str) else baseline(name)
        compared = base in times and base != name
        share = f"{median / times[base][f'median_{unit}']:7.2f} of {base}" if compared else ""
        print(f"  {name:<48}{median:10.2f} [{low:.2f}, {high:.2f}]{share}", flush=True)
