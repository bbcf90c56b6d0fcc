"""The whole report, and how to get one in a program of your own."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks import kernels
from ddp_quant_hooks.candidates import default_candidates
from ddp_quant_hooks.measure.advice import Advice, advise
from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.estimate import Estimate, Model, estimate_steps
from ddp_quant_hooks.measure.links import Link, measure_links
from ddp_quant_hooks.measure.nodes import grid_of, nodes_of
from ddp_quant_hooks.measure.prediction import Cluster, Prediction, predict
from ddp_quant_hooks.measure.schedule import Progress
from ddp_quant_hooks.measure.timing import HookTimes, measure_hooks
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import GroupLike, require_same_terms, resolve_group
from dist_utils.process_groups import all_gather_plain

__all__ = ["SIZES", "Report", "measure"]

SIZES = (1 << 20, 5 << 20, 25 << 20)
"""Bytes of the measured buckets: DDP's first one, a middle one, DDP's others."""


@dataclass(frozen=True)
class Report:
    """What was measured between the ranks of a group; identical on all of them.

    Attributes:
        world_size: Number of ranks.
        nodes: The ranks of each node.
        backend: The backend of the group, as ``torch.distributed`` names it.
        device: The device of the buckets: ``"cpu"`` or ``"cuda"``.
        threads: The number of threads of rank 0.
        cores: The number of cores that rank 0 may use.
        kernels: The kernels that quantize on rank 0.
        seconds: The time that measuring took.
        links: Between ranks.
        hooks: From the most exact to the fewest bytes.
        copy_per_byte: Seconds for copying a byte of a gradient, as DDP does to buckets and back.
        advice: Which hook to take.
        estimate: The estimate of a model's steps, if a model was given.
        prediction: For another cluster, if one was given.
    """

    world_size: int
    nodes: list[list[int]]
    backend: str
    device: str
    threads: int
    cores: int
    kernels: str
    seconds: float
    links: list[Link]
    hooks: list[HookTimes]
    copy_per_byte: float
    advice: Advice
    estimate: Estimate | None = None
    prediction: Prediction | None = None

    @property
    def cores_per_rank(self) -> float:
        """How many cores a rank has, if its node's ranks share them."""
        return _share(self.cores, self.nodes)

    def for_model(self, model: Model) -> Report:
        """Return the report with the estimated steps of a model, and advice for it."""
        estimate = estimate_steps(self.hooks, model, self.copy_per_byte)
        advice = advise(self.links, self.hooks, estimate, cores_per_rank=self.cores_per_rank)
        return replace(self, estimate=estimate, advice=advice)

    def for_cluster(self, cluster: Cluster) -> Report:
        """Return the report with predictions for another cluster; of steps, too, if there is an estimate."""
        model = None if self.estimate is None else self.estimate.model
        return replace(
            self,
            prediction=predict(self.links, self.hooks, self.nodes, cluster, model, self.copy_per_byte),
        )

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
    node: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure the links between ranks and every hook on buckets of 1, 5 and 25 MiB.

    Args:
        process_group: As in :func:`dist_utils.resolve_group`; of all ranks, which make buckets and groups
            together.
        device: The device of the buckets.
        budget: Seconds for all of it; hooks get half of them at least. What does not fit is left out, on all
            ranks alike; the smallest bucket is measured in any case.
        node: A name that the ranks of this node share; ``None``: the host's name.
        progress: Called with the share that is done and a text about what comes next.

    Returns:
        The report, identical on all ranks.

    Raises:
        AgreementError: The ranks call with different arguments, or some do not call.
        TypeError, ValueError: The group has one rank only, or not all; the budget is not a number, or not
            positive and finite; there is no such device; and as :func:`dist_utils.resolve_group`.
        RuntimeError: A rank fails; raised on every rank.

    Cost:
        Collective, for the budget and some seconds. 25 MiB of memory, and what the hooks' states keep.

    Example:
        >>> report = measure(budget=20)  # doctest: +SKIP
        >>> print(report.advice.hook)  # doctest: +SKIP
    """
    began = time.perf_counter()
    group = resolve_group(process_group)
    kind, problem = _device_of(device)
    terms = {"budget": budget, "device": kind.type}
    require_same_terms(group, "measure", terms, problem=_problem(group, budget) or problem)
    tell = progress or (lambda *_: None)
    nodes = nodes_of(_gathered(group, node or os.uname().nodename))
    tell(0.0, "links")
    # Buckets come from backward passes, whatever mode the caller is in.
    with torch.inference_mode(mode=False), torch.enable_grad():
        links = measure_links(group, nodes, kind)
        guess = 2 / min(link.bandwidth for link in links)
        with grid_of(nodes, kind.type) as mesh:
            candidates = default_candidates(group, mesh=mesh)
            (used,) = largest_of_ranks(group, [time.perf_counter() - began])
            left = max(budget / 2, budget - used)
            try:
                hooks, copy_per_byte = measure_hooks(
                    group, candidates, SIZES, kind, budget=left, guess=guess, progress=tell
                )
            finally:
                for candidate in candidates.values():
                    if isinstance(candidate.state, QuantizedAllreduceState):
                        candidate.state.close()
    head = (time.perf_counter() - began, torch.get_num_threads(), _usable_cores(), kernels.describe())
    seconds, threads, cores, described = _of_first(group, head)
    return Report(
        world_size=group.size(),
        nodes=nodes,
        backend=dist.get_backend_config(group),
        device=kind.type,
        threads=threads,
        cores=cores,
        kernels=described,
        seconds=seconds,
        links=links,
        hooks=hooks,
        copy_per_byte=copy_per_byte,
        advice=advise(links, hooks, cores_per_rank=_share(cores, nodes)),
    )


def _device_of(given: Any) -> tuple[torch.device, Exception | None]:
    """Return the device of the buckets, and what is wrong with it."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        return torch.device("cpu"), ValueError(f"device is {given!r}: {error}")
    if device.type == "meta":
        return device, ValueError("device is 'meta', which computes nothing")
    return device, None


def _problem(group: dist.ProcessGroup, budget: Any) -> Exception | None:
    """Return what is wrong with the arguments of this rank."""
    if not isinstance(budget, int | float):
        return TypeError(f"budget must be a number, got {type(budget).__name__}")
    if not 0 < budget < math.inf:
        return ValueError(f"budget must be positive and finite, got {budget}")
    if group.size() < 2:
        return ValueError("measuring needs at least two ranks, got one")
    if group.size() < dist.get_world_size():
        everyone = dist.get_world_size()
        return ValueError(f"measuring needs all {everyone} ranks, process_group has {group.size()}")
    return None


def _share(cores: int, nodes: Sequence[Sequence[int]]) -> float:
    return cores / max(map(len, nodes))


def _gathered(group: dist.ProcessGroup, own: str) -> list[str]:
    return list(map(str, all_gather_plain(group, own)))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _of_first(group: dist.ProcessGroup, own: tuple[float, int, int, str]) -> tuple[float, int, int, str]:
    seconds, threads, cores, described = all_gather_plain(group, own)[0]
    return float(seconds), int(threads), int(cores), str(described)
