"""The cells of the table: which model trains on how many hosts, and the jobs that measure it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rank_processes import on_ranks
from tasks import MODELS
from whole_steps.ranks import MOST_TRIALS, WARM_UP, Job, measure
from whole_steps.sides import FRAGILE, PLAIN

LOOPBACK = "loopback"
RATES = {
    name: 1e9 / 8 * float(name.removesuffix("gbit"))
    for name in ("0.01gbit", "0.1gbit", "0.2gbit", "1gbit", "10gbit")
}
"""Bytes per second of the emulated links, by their names on the command line."""


@dataclass(frozen=True)
class Cell:
    """A model and the place where it trains.

    Args:
        model: The model's name.
        hosts: How many hosts; on loopback, how many ranks.
        rate: A name of RATES, or LOOPBACK.
        ranks_per_host: How many ranks each host has.
    """

    model: str
    hosts: int
    rate: str
    ranks_per_host: int = 1

    @property
    def name(self) -> str:
        """The cell's name in results and tables."""
        if self.rate == LOOPBACK:
            return f"{self.model}, {self.world_size} ranks, loopback"
        ranks = "" if self.ranks_per_host == 1 else f" of {self.ranks_per_host} ranks"
        return f"{self.model}, {self.hosts} hosts{ranks}, {self.rate.replace('gbit', ' Gbit/s')}"

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return self.hosts * self.ranks_per_host

    @property
    def plain_seconds(self) -> float:
        """A rough estimate of a step of plain DDP."""
        model, size = MODELS[self.model], self.world_size
        wire = 0.0 if self.rate == LOOPBACK else model.plain_bytes * 2 * (size - 1) / size / RATES[self.rate]
        # Several ranks of a host share its link, and all ranks two cores.
        return wire * self.ranks_per_host + model.step_seconds * max(1, size / 2)


CELLS = (
    # Ranks with links of their own. With four, plain DDP's communication takes about 1.7 times as long as
    # backward(): the ratio that users report of boxes without NVLink.
    Cell("7M", 2, "1gbit"),
    Cell("7M", 4, "1gbit"),
    Cell("7M", 8, "1gbit"),
    # Hosts of several ranks.
    Cell("7M", 2, "1gbit", 2),
    Cell("7M", 2, "0.2gbit", 2),
    Cell("7M", 2, "0.1gbit", 2),
    Cell("7M", 2, "1gbit", 4),
    Cell("7M", 2, "0.2gbit", 4),
    Cell("7M", 2, "0.1gbit", 4),
    # Faster and slower links, and other models.
    Cell("7M", 2, LOOPBACK),
    Cell("7M", 2, "10gbit"),
    Cell("7M", 2, "0.2gbit"),
    Cell("7M", 2, "0.1gbit"),
    Cell("7M", 2, "0.01gbit"),
    Cell("MLP", 2, "1gbit"),
    Cell("60M", 2, "1gbit"),
    Cell("conv", 2, "1gbit"),
)
"""All cells, in the order of the tables."""


def chosen_cells(
    models: Sequence[str], hosts: Sequence[int], rates: Sequence[str], ranks_per_host: Sequence[int]
) -> list[Cell]:
    """Return the cells with these properties."""
    return [
        cell
        for cell in CELLS
        if cell.model in models
        and cell.hosts in hosts
        and cell.rate in rates
        and cell.ranks_per_host in ranks_per_host
    ]


def jobs_of(cell: Cell, names: Sequence[str], repeats: int, memory_gib: float) -> Iterator[Job]:
    """Divide the sides into jobs that fit into memory, each with plain DDP; fragile sides run alone."""
    fits = int(memory_gib * 2**30 / (MODELS[cell.model].bytes_of_a_side * cell.world_size))
    if fits < 2:
        raise MemoryError(f"{cell.name}: two models on every rank need more than {memory_gib} GiB")
    others = [name for name in names if name != PLAIN]
    sturdy = [name for name in others if name not in FRAGILE]
    size = fits - 1
    parts = [sturdy[begin : begin + size] for begin in range(0, len(sturdy), size)]
    parts += [[name] for name in others if name in FRAGILE]
    for part in parts or [[]]:
        yield Job(cell.model, (PLAIN, *part), repeats, 60 + 20 * cell.plain_seconds)


def run(cell: Cell, job: Job) -> list[dict[str, Any]]:
    """Return the measurements of every rank of a job.

    Raises:
        EmulationUnavailableError: Hosts cannot be emulated.
        RuntimeError: A rank failed, or the job took ten times as long as expected.
    """
    steps = (job.repeats + WARM_UP) * (len(job.sides) + 1)
    steps += MOST_TRIALS * sum(name.startswith("auto") for name in job.sides)
    try:
        return on_ranks(
            measure,
            cell.world_size,
            job,
            rate=None if cell.rate == LOOPBACK else cell.rate,
            placement=[rank // cell.ranks_per_host for rank in range(cell.world_size)],
            timeout=120 + 5 * steps * cell.plain_seconds,
            group_timeout=job.patience,
        )
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
