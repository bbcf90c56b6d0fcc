"""What another number of ranks has saved, for ranks that go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def divide(saved: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return what each of so many ranks loads: the mean of all residuals, so that nothing is lost of it.

    Right factors are equal on all ranks, so each goes on with them.

    Args:
        saved: What each rank has saved.
        world_size: The number of ranks that go on.

    Raises:
        ValueError: These are not what ranks save.
    """
    try:
        kinds = {kind: _means(saved, kind, world_size) for kind in ("parameters", "keys")}
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"these are not residuals that gather_state_dict() returned: {error!r:.200}"
        ) from error
    return [{**saved[0], "rank": rank, "world_size": world_size, **kinds} for rank in range(world_size)]


def _means(saved: Sequence[Mapping[str, Any]], kind: str, world_size: int) -> dict[str, Any]:
    return {
        name: {
            **entry,
            "slots": {
                "own": _mean([rank[kind][name]["slots"].get("own") for rank in saved], world_size),
                **{slot: kept for slot, kept in entry["slots"].items() if slot == "factor"},
            },
        }
        for name, entry in saved[0][kind].items()
    }


def _mean(slots: Sequence[Mapping[str, Any] | None], world_size: int) -> dict[str, Any]:
    """Return the mean of an owner's residuals over the ranks that have saved them."""
    length = max(0 if slot is None else slot["length"] for slot in slots)
    total = torch.zeros(length)
    for slot in slots:
        for start, _, values in () if slot is None else slot["pieces"]:
            total[start : start + len(values)] += values.float() / len(slots)
    return {"length": length, "pieces": [(0, 1.0 / world_size, total.bfloat16())] if length else []}
