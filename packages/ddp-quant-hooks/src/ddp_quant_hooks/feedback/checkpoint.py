"""Residuals in files: their format, what is checked before they are loaded, and files sent between ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.feedback.residuals import (
    RESIDUAL_DTYPE,
    Key,
    Owner,
    OwnerResiduals,
    OwnerSlot,
    Piece,
    order_of,
    owner_length,
)
from dist_utils import start_messages
from dist_utils.process_groups import TensorClaim, all_gather_plain, collective_device, require_same_tensors

VERSION = 5
"""Version of the format: with an entry for each parameter or key, and in it one for each slot. Version 4, of
1.0, had two slots, of bf16 and one number a value; it is read, too. Earlier ones had several tables."""

_TAG = 1 << 20
"""The tag of messages with residuals. They are sent in the user's own group, where other messages are
unlikely to have it."""


@dataclass(frozen=True)
class Saved:
    """Residuals from a file that fit a state.

    Attributes:
        residuals: Of parameters, or of keys.
        steps: How many steps were made.
        coordinates: Those of the shards of FSDP that they belong to.
    """

    residuals: list[tuple[Owner, OwnerResiduals]]
    steps: int
    coordinates: list[str] | None


def entry_of(owner: Owner, residuals: OwnerResiduals) -> dict[str, Any]:
    """Return what a file has of an owner: tensors on the CPU in dicts, lists and tuples."""
    slots = {
        name: {
            "length": slot.length,
            "pieces": [(start, weight, values.cpu().clone()) for start, weight, values in slot.pieces],
        }
        for name, slot in residuals.slots.items()
    }
    return {"length": owner_length(owner), "order": residuals.order, "slots": slots}


def read(
    state: Mapping[str, Any],
    known: Mapping[str, torch.Tensor],
    identity: Mapping[str, Any],
    coordinates: list[str] | None,
    rank: int,
) -> Saved:
    """Return what a file has, of parameters with known names or of keys, if it fits a state.

    Args:
        state: What the file has.
        known: The parameters of the model, by name.
        identity: What must be equal when residuals are saved and when they are loaded.
        coordinates: Those of the shards that the state is used for, if there are any.
        rank: This rank, for messages.

    Raises:
        ValueError: It does not fit, or it is something else.
    """
    try:
        return _read(_of_this_version(state, known), known, identity, coordinates, rank)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"these are not residuals that state_dict() returned: {error!r:.200}") from error


def _read(
    state: Mapping[str, Any],
    known: Mapping[str, torch.Tensor],
    identity: Mapping[str, Any],
    coordinates: list[str] | None,
    rank: int,
) -> Saved:
    for name, value in identity.items():
        if state.get(name) != value:
            raise ValueError(
                f"the residuals are of {name} {state.get(name)!r:.200}, but here it is {value!r}, on "
                f"rank {rank}"
            )
    there = state["coordinates"]
    if None not in (coordinates, there) and there != coordinates:
        raise ValueError(f"the residuals are of shards {there!r:.200}, but this rank has {coordinates!r}")
    residuals: list[tuple[Owner, OwnerResiduals]] = []
    for name, entry in state["parameters"].items():
        residuals.append((_parameter(name, entry, known), _residuals(name, entry)))
    for name, entry in state["keys"].items():
        residuals.append((Key(name, [_count(entry["length"])]), _residuals(name, entry)))
    return Saved(residuals, _count(state["steps"]), there)


def _of_this_version(state: Mapping[str, Any], known: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """Return what a file has, in the format of this release."""
    version = state.get("version")
    if version == VERSION:
        return state
    if version != 4:
        raise ValueError(
            f"the residuals are of version {version!r:.200} of the format, and this release reads versions "
            f"4 and {VERSION} only: go on without them"
        )

    def entry_of_version_4(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        slots = {
            kind: {
                "length": entry["length"],
                "pieces": [(start, weight, one.to(RESIDUAL_DTYPE)) for start, weight, one in entry[kind]],
            }
            for kind in ("own", "shard")
        }
        return {
            "length": entry["length"],
            "order": order_of(known[name].shape, entry["strides"]) if name in known else (),
            "slots": slots,
        }

    kinds = {
        kind: {name: entry_of_version_4(name, entry) for name, entry in state[kind].items()}
        for kind in ("parameters", "keys")
    }
    return {**state, "coordinates": state["places"], **kinds}


def _count(number: object) -> int:
    """Return a count from a file; raises ``TypeError`` if it is none."""
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} is not a count")
    return number


def _parameter(name: str, entry: Any, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameter of this name, if it has as many values in the same order."""
    if name not in known or owner_length(known[name]) != entry["length"]:
        here = "not there" if name not in known else f"{owner_length(known[name])} long here"
        raise ValueError(
            f"the residuals are of a parameter {name!r:.200} of {entry['length']!r:.200} values, {here}"
        )
    order = order_of(known[name].shape, torch.empty_like(known[name], device="meta").stride())
    if entry["order"] != order:
        raise ValueError(
            f"the residuals of {name!r:.200} were saved in another memory format: with strides "
            f"{entry['order']!r:.200}, here {order}. Give the parameter that format before "
            "DistributedDataParallel"
        )
    return known[name]


def _residuals(name: str, entry: Any) -> OwnerResiduals:
    """Return the residuals of one owner from a file, if they are numbers to go on with."""
    slots = dict[str, OwnerSlot]()
    for kind, slot in entry["slots"].items():
        length = _count(slot["length"])
        slots[kind] = OwnerSlot(length, [_piece(name, length, *piece) for piece in slot["pieces"]])
    for kind, slot in slots.items():
        if len({one.values.dtype for one in slot.pieces}) > 1:
            raise TypeError(f"slot {kind!r:.200} has pieces of several dtypes")
    return OwnerResiduals(entry["order"], {kind: slot for kind, slot in slots.items() if slot.pieces})


def _piece(name: str, count: int, start: int, weight: float, values: torch.Tensor) -> Piece:
    """Return a piece from a file."""
    if values.dim() != 1 or _count(start) + values.numel() > count:
        raise ValueError(
            f"the residual {name!r:.200} has a piece of shape {tuple(values.shape)} at {start}, but only "
            f"{count} values"
        )
    # A value that is not finite would make every later gradient NaN.
    if not values.is_floating_point() or not values.isfinite().all():
        raise ValueError(f"the residual {name!r:.200} has values that are not finite in {values.dtype}")
    return Piece(start, weight, values.detach().cpu())


@contextmanager
def on_every_rank(group: dist.ProcessGroup, call: str) -> Iterator[None]:
    """Go on after the block only if no rank has raised an error in it; else raise on every rank.

    Args:
        group: The ranks.
        call: What the block is a part of, the same on every rank: a rank that makes another call is refused.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    require_same_tensors(group, TensorClaim([], call), problem)


def ranks_of(gathered: object) -> list[Any]:
    """Return the residuals of each rank that has saved some.

    Raises:
        TypeError: They are something else.
    """
    ranks = gathered.get("ranks") if isinstance(gathered, dict) else None
    if not (isinstance(ranks, list) and ranks):
        raise TypeError(
            f"scatter_state_dict() takes what gather_state_dict() returned, got a {type(gathered).__name__}"
        )
    return ranks


def file_bytes(part: Any) -> torch.Tensor:
    """Return a rank's residuals as ``torch.save`` writes them, as bytes on the CPU.

    ``torch.distributed``'s collectives of objects unpickle what a peer has sent, which may run any code.
    """
    file = io.BytesIO()
    torch.save(part, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def exchange(group: dist.ProcessGroup, files: Mapping[int, torch.Tensor], call: str) -> dict[int, Any]:
    """Send files to other ranks, one after another; return what they have sent this one, by rank.

    A rank that has no memory for its files, or that cannot read them, says so before or after all messages:
    among them, those after it would wait for it until the timeout.

    Args:
        group: The ranks; all must call this.
        files: From this rank, by the rank that gets it.
        call: As for :func:`on_every_rank`.
    """
    device, me = collective_device(group), str(group.rank())
    announced = all_gather_plain(group, {str(rank): file.numel() for rank, file in files.items()})
    with on_every_rank(group, call):
        arrived = {rank: _memory(rank, to[me]) for rank, to in enumerate(announced) if me in to}
        lengths = [file.numel() for file in (*files.values(), *arrived.values())]
        message = torch.empty(max(lengths, default=0), dtype=torch.uint8, device=device)
    for rank, file in files.items():
        _transfer(group, receives=[], sends=[(rank, message[: file.numel()].copy_(file))])
    for rank, file in arrived.items():
        part = message[: file.numel()]
        _transfer(group, receives=[(rank, part)], sends=[])
        file.copy_(part)
    with on_every_rank(group, call):
        return {rank: _from_bytes(arrived.pop(rank), rank) for rank in [*arrived]}


def _memory(rank: int, length: Any) -> torch.Tensor:
    """Return memory for a file of another rank."""
    if type(length) is not int or length <= 0:
        raise ValueError(f"rank {rank} announced residuals of {length!r:.200} bytes")
    return torch.empty(length, dtype=torch.uint8, device="cpu")  # not the default device


def _transfer(group: dist.ProcessGroup, **messages: Any) -> None:
    for work in start_messages(group, tag=_TAG, **messages):
        work.wait()


def _from_bytes(file: torch.Tensor, rank: int) -> Any:
    """Return what another rank has sent, read like a file of unknown origin, on the CPU."""
    try:
        return torch.load(io.BytesIO(file.numpy().data), weights_only=True)
    except Exception as error:  # forged bytes may raise nearly anything, even struct.error
        raise ValueError(f"rank {rank} sent data that are not saved residuals: {error!r:.200}") from error
