"""The whole report, and how to get one in a program of your own."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks import kernels
from ddp_quant_hooks.measure.advice import (
    Advice,
    Estimate,
    Model,
    advise,
    estimate_steps,
    milliseconds,
    warn_of_links,
)
from ddp_quant_hooks.measure.links import Link, Ranks, describe_cluster, measure_links
from ddp_quant_hooks.measure.trials import Hooks, Progress, measure_hooks
from dist_utils import GroupLike, OrderedWorker, resolve_group
from dist_utils.process_groups import all_gather_plain

SIZES = (1 << 20, 5 << 20, 25 << 20)
"""Bytes of the measured buckets: DDP's first one, a middle one, DDP's others."""


@dataclass(frozen=True)
class Report:
    """What was measured between the ranks of a group; identical on all of them.

    Attributes:
        cluster: In words: one host with fast or slow links inside it, several hosts with several ranks, or
            several hosts with one rank each.
        hosts: For each rank the number of its host.
        backend: The backend of the group, as ``torch.distributed`` names it.
        device: The device of the buckets: ``"cpu"`` or ``"cuda"``.
        threads: The number of threads of rank 0.
        cores: The number of cores that rank 0 may use.
        cores_per_rank: How many of its host's cores a rank has, if the ranks share those that they may use.
        kernels: The kernels that quantize on rank 0.
        seconds: The time that measuring took.
        links: Between ranks.
        hooks: Of each hook the exchanges by rising size; hooks from the most exact to the fewest bytes.
        copy_per_byte: Seconds for copying a byte of a gradient, as DDP does to buckets and back.
        warnings: A sentence for each hook that moves more bytes over a host's link than plain DDP.
        advice: Which hook to take.
        estimate: The estimate of a model's steps, if a model was given.
    """

    cluster: str
    hosts: list[int]
    backend: str
    device: str
    threads: int
    cores: int
    cores_per_rank: float
    kernels: str
    seconds: float
    links: list[Link]
    hooks: Hooks
    copy_per_byte: float
    warnings: list[str]
    advice: Advice
    estimate: Estimate | None = None

    def for_model(self, model: Model) -> Report:
        """Return the report with the estimated steps of a model, and advice for it."""
        estimate = estimate_steps(self.hooks, model, self.copy_per_byte)
        advice = advise(self.links, self.hooks, estimate, cores_per_rank=self.cores_per_rank)
        return replace(self, estimate=estimate, advice=advice)

    def as_text(self) -> str:
        """Return everything in tables for people: what was measured where, estimate, warnings, advice."""
        links = [f"{link.place}|{1e6 * link.latency:.0f}|{link.gbit:.3g}" for link in self.links]
        parts = [
            f"{len(self.hosts)} ranks, {self.backend}, buckets on {self.device}, {self.threads} thread(s)",
            f"This is {self.cluster}. Measured in {self.seconds:.0f} s.",
            _table("Links, all ranks of a ring sending at once", "where|latency us|Gbit/s each way", links),
            _table(
                "Averages of one bucket",
                "hook|MiB|ms|quartiles|MB sent|MB on a host's link|error|ms beside|ms lost|runs",
                [
                    f"{name}|{one.size / 2**20:g}|{milliseconds(one.seconds)}|"
                    f"{' - '.join(map(milliseconds, one.quartiles))}|"
                    f"{one.bytes_sent / 1e6:.2f}|{one.bytes_on_host_link / 1e6:.2f}|{one.relative_error:.1e}|"
                    f"{milliseconds(one.seconds_beside)}|{milliseconds(one.seconds_lost)}|{one.repeats}"
                    for of_size in zip(*self.hooks.values(), strict=True)
                    for name, one in zip(self.hooks, of_size, strict=True)
                ],
            ),
        ]
        if self.estimate is not None:
            model, steps = self.estimate.model, self.estimate.steps
            known = f"{model.parameters / 1e6:g} M parameters, {milliseconds(model.step_seconds)} ms alone"
            heads = "hook|step ms|of that exposed communication|slower backward|copies"
            rows = ["|".join([name, *map(milliseconds, astuple(step))]) for name, step in steps.items()]
            parts.append(_table(f"Estimated: {known}", heads, rows))
        parts += [f"Warning: {warning}." for warning in self.warnings]
        return "\n\n".join([*parts, "\n  ".join([f"Take: {self.advice.hook}", *self.advice.reasons])])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain dictionaries, lists and numbers; times in seconds."""
        return asdict(self)

    def as_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.as_dict(), indent=1)


def measure(
    process_group: GroupLike = None,
    *,
    device: torch.device | str = "cpu",
    budget: float = 40.0,
    progress: Progress | None = None,
) -> Report:
    """Measure the links between ranks and every hook on buckets of 1, 5 and 25 MiB.

    Args:
        process_group: As in :func:`dist_utils.resolve_group`.
        device: The device of the buckets.
        budget: Seconds for all of it; hooks get half of them at least. What does not fit is left out, on all
            ranks alike; the smallest bucket is measured in any case.
        progress: Called with the share that is done and a text about what comes next.

    Returns:
        The report, identical on all ranks.

    Raises:
        AgreementError: The ranks call with different arguments, or some do not call.
        TypeError, ValueError: The group has one rank only; the budget is not a number, or not positive and
            finite; there is no such device; and as :func:`dist_utils.resolve_group`.
        RuntimeError: A rank fails; raised on every rank.

    Cost:
        Collective, for the budget and some seconds. 25 MiB of memory, and what the hooks' states keep.

    Example:
        >>> report = measure(budget=20)  # doctest: +SKIP
        >>> print(report.advice.hook)  # doctest: +SKIP
    """
    began, group = time.perf_counter(), resolve_group(process_group)
    hosts = OrderedWorker(group, name="measure", terms=lambda: _terms(group, budget, device)).hosts()
    ranks, tell = Ranks(group, hosts, torch.device(device)), progress or (lambda *_: None)
    tell(0.0, "links")
    # Buckets come from backward passes, whatever mode the caller is in.
    with torch.inference_mode(mode=False), torch.enable_grad():
        links = measure_links(ranks)
        (used,) = ranks.largest([time.perf_counter() - began])
        hooks, copy_per_byte = measure_hooks(ranks, SIZES, max(budget / 2, budget - used), tell)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    own = [time.perf_counter() - began, torch.get_num_threads(), sorted(usable), kernels.describe()]
    everyone = all_gather_plain(group, own)
    seconds, threads, cores, described = everyone[0]
    cores_per_rank = _cores_per_rank([each[2] for each in everyone], hosts)
    return Report(
        cluster=describe_cluster(hosts, links),
        hosts=hosts,
        backend=dist.get_backend_config(group),
        device=ranks.device.type,
        threads=threads,
        cores=len(cores),
        cores_per_rank=cores_per_rank,
        kernels=described,
        seconds=seconds,
        links=links,
        hooks=hooks,
        copy_per_byte=copy_per_byte,
        warnings=warn_of_links(hooks),
        advice=advise(links, hooks, cores_per_rank=cores_per_rank),
    )


def _table(title: str, heads: str, rows: Sequence[str]) -> str:
    """Return lines of aligned cells, the first column to the left and the others to the right."""
    columns = list(zip(*(row.split("|") for row in (heads, *rows)), strict=True))
    widths = [-max(map(len, columns[0])), *(max(map(len, column)) for column in columns[1:])]
    cells = [[f"%{width}s" % cell for cell in column] for width, column in zip(widths, columns, strict=True)]
    return "\n".join([title, *("  ".join(row).rstrip() for row in zip(*cells, strict=True))])


def _terms(group: dist.ProcessGroup, budget: Any, device: Any) -> dict[str, object]:
    """Return what must be equal on all ranks; raise if an argument of this one is wrong."""
    if not 0 < budget < math.inf:
        raise ValueError(f"budget must be positive and finite, got {budget}")
    if group.size() < 2:
        raise ValueError("measuring needs at least two ranks, got one")
    try:
        torch.empty(1, device=device).tolist()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device is {device!r}: {error}") from None
    return {"budget": budget, "device": torch.device(device).type}


def _cores_per_rank(cores: Sequence[Sequence[int]], hosts: Sequence[int]) -> float:
    """Return how many cores a rank has, if the ranks of a host share those that they may use; the fewest."""
    of_hosts: defaultdict[int, set[int]] = defaultdict(set)
    for host, usable in zip(hosts, cores, strict=True):
        of_hosts[host].update(usable)
    return min(len(of_hosts[host]) / count for host, count in Counter(hosts).items())
