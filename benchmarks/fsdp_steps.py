"""Passes of a model under FSDP2 on slow links: their times, and the bytes on a host's link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from harness import bytes_on_link, in_turns, slowest
from rank_processes import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, BATCH = 8, 1024, 64
PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH
PASSES = 3
"""Passes whose bytes are counted together."""
RATES = {"1gbit": "1 Gbit/s", "200mbit": "0.2 Gbit/s"}

MakeModels: TypeAlias = Callable[[], Mapping[str, torch.nn.Module]]
"""Makes the model of every side where it runs; of a module's level, so that it can be pickled."""


def model(mesh: DeviceMesh, reshard: int | bool = True) -> torch.nn.Module:
    """Return the model, sharded layer by layer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def measure(
    rank: int, make_models: MakeModels, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each side's passes, and its bytes for each parameter on this host's link."""
    models = make_models()
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def both_passes(model: torch.nn.Module) -> Callable[[], None]:
        return lambda: model(batch).square().mean().backward()

    sides = {name: both_passes(model) for name, model in models.items()}
    seconds = in_turns(sides, repeats, prepare=lambda name: models[name].zero_grad())
    # The gradients of all counted passes add up, which changes no byte.
    moved = {name: bytes_on_link(both, PASSES) / PARAMETERS for name, both in sides.items()}
    return seconds, moved


def times_of(
    make_models: MakeModels,
    native_of: Callable[[str], str],
    *,
    rate: str,
    repeats: int,
    placement: Sequence[int] = (0, 0, 1, 1),
) -> dict[str, Any]:
    """Return times and bytes of all sides.

    Args:
        make_models: Makes the models.
        native_of: Returns the side that a side is compared with.
        rate: Of the links.
        repeats: How often each side runs.
        placement: The host of each rank.
    """
    ranks = on_ranks(measure, len(placement), make_models, repeats, rate=rate, placement=placement)
    times = slowest([seconds for seconds, _ in ranks])
    for name, entry in times.items():
        entry["bytes_a_parameter"] = round(max(moved[name] for _, moved in ranks), 2)
        entry["times_faster"] = round(times[native_of(name)]["median_ms"] / entry["median_ms"], 2)
    return times
