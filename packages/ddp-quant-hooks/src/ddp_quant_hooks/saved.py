"""The contents of a file of residuals: written, and checked before any of it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddp_quant_hooks.passes import value_count
from ddp_quant_hooks.plain_checks import alike, dict_of, list_of, named_lengths, whole_number
from ddp_quant_hooks.residuals import RESIDUAL_DTYPE
from ddp_quant_hooks.wire_format import is_integer

if TYPE_CHECKING:
    from ddp_quant_hooks.feedback import Feedback

__all__ = ["VERSION", "Lengths", "SavedResiduals", "keys_of", "places_of", "read", "require_equal", "write"]

VERSION = 2
"""Version of the format. Version 1 named residuals by buckets only. The tensors of version 2 are of any
floating-point type: bf16 now, fp32 up to release 0.6."""

_IN_OLDER_FILES = {"levels": None}
"""The values of options in files that were saved before these options existed."""

_CHANGED_DEFAULTS = {"min_bytes", "levels"}
"""Options whose older defaults must be given explicitly to load files of older releases."""

Lengths = Callable[[int, torch.device], tuple[int, int, int]]
"""From the number of a bucket's values and their device: how many this rank sends as its own, how many its
shards have, and how many values a chunk has at most."""


@dataclass(frozen=True)
class SavedResiduals:
    """A file's contents, for a model's parameters.

    Attributes:
        own: Pairs of a parameter and the residual of this rank's gradient.
        buckets: The parameters of each bucket, and its residuals, own and of shards.
        steps: How many steps were made.
        digest: A digest of buckets and steps, identical on all ranks.
        keys: For plain tensors, the stand-in of each key. ``None`` for a model.
        places: For FSDP's shards, their places in the mesh.
    """

    own: list[tuple[torch.Tensor, torch.Tensor]]
    buckets: list[tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]]
    steps: int
    digest: str
    keys: Mapping[str, torch.Tensor] | None = None
    places: list[str] | None = None


def write(
    feedback: Feedback,
    names: Mapping[int, str],
    lengths: Lengths,
    name_of: Callable[[torch.Tensor], str],
) -> dict[str, Any]:
    """Return residuals as CPU tensors: a rank's own by parameter, the others by bucket.

    Args:
        feedback: The residuals, and which of them count. All jobs must have run.
        names: The names of parameters, by number.
        lengths: See :data:`Lengths`.
        name_of: Names a parameter that the model does not have.

    Raises:
        ValueError: A parameter that still exists has no name.
    """
    residuals, lost = feedback.residuals, feedback.losses()
    places, parameters = residuals.places(ended_well=feedback.ended_well), residuals.parameters()
    for number in parameters.keys() & (places.own_of.keys() | places.bucket_of.keys()) - names.keys():
        raise ValueError(
            f"there are residuals of a parameter {name_of(parameters[number])}, which the model does not "
            "have: give the model whose gradients were averaged, and each model its own state"
        )
    own = {
        names[number]: _on_cpu(values[part.start : part.start + part.length])
        for number, part in places.own_of.items()
        if number in names and (values := lost(part.residual)) is not None
    }
    buckets = []
    for key, kept in sorted(places.buckets.items(), key=lambda item: item[1].position):
        if not all(number in names for number, _ in key):
            continue
        bound = lost(kept.own) if residuals.own_in_buckets else None
        shard = lost(kept.shard)
        device = parameters[key[0][0]].device
        buckets.append(
            {
                "parameters": [(names[number], length) for number, length in key],
                "chunk_values": lengths(sum(length for _, length in key), device)[2],
                "own": None if bound is None else _on_cpu(bound),
                "shard": None if shard is None else _on_cpu(shard),
            }
        )
    numbers = [number for number in places.own_of if names.get(number) in own]
    strides = {names[number]: _memory_order(parameters[number]) for number in numbers}
    return {"steps": feedback.steps, "own": own, "buckets": buckets, "strides": strides}


def require_equal(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless ``saved`` has the values of ``here``; the format's version comes first."""
    if not isinstance(saved, dict):
        raise TypeError(f"residuals are loaded from what state_dict() returned, got a {type(saved).__name__}")
    if not alike(saved.get("version"), VERSION):
        raise ValueError(
            f"the residuals are of version {saved.get('version')!r:.200} of the format, and this release "
            f"reads version {VERSION} only: go on without them, or save them again with it"
        )
    known = {**_IN_OLDER_FILES, **saved}
    for name, value in here.items():
        if not alike(known.get(name), value):
            can_be_given = name in _CHANGED_DEFAULTS and isinstance(known.get(name), (int, tuple))
            hint = f": give {name}={known[name]!r:.200} to go on" if can_be_given else ""
            raise ValueError(
                f"the residuals are of {name} {known.get(name)!r:.200}, but here it is {value!r}, on rank "
                f"{here.get('rank')}{hint}"
            )


def keys_of(saved: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the number of values of each key of plain tensors, ``None`` for residuals of a model.

    Raises:
        ValueError: The entry is invalid.
    """
    keys = saved.get("keys")
    if keys is None:
        return None
    if not isinstance(keys, dict) or not all(
        isinstance(key, str) and is_integer(count) and count >= 0 for key, count in keys.items()
    ):
        raise ValueError(f"these are not residuals that state_dict() returned: their keys are {keys!r:.200}")
    return keys


def places_of(saved: Mapping[str, Any]) -> list[str] | None:
    """Return where FSDP's shards are in the mesh, ``None`` for other residuals.

    Raises:
        ValueError: The entry is invalid.
    """
    places = saved.get("places")
    try:
        return None if places is None else list_of(places, str, "places")
    except TypeError as error:
        raise ValueError(f"these are not residuals that state_dict() returned: {error!r}") from error


def read(
    saved: Mapping[str, Any], names: Mapping[str, torch.Tensor], lengths: Lengths, *, own_in_buckets: bool
) -> SavedResiduals:
    """Check the result of :func:`write` against a model's parameters, by name.

    Raises:
        ValueError: Something is missing, or of another length than here.
    """
    try:
        steps, own = whole_number(saved["steps"], "steps"), dict_of(saved["own"], object, "own")
        rows = [
            (
                named_lengths(row["parameters"], "parameters"),
                whole_number(row["chunk_values"], "chunk_values"),
                row["own"],
                row["shard"],
            )
            for row in list_of(saved["buckets"], dict, "buckets")
        ]
        strides = {
            name: tuple(whole_number(one, "strides") for one in stride)
            for name, stride in dict_of(saved.get("strides", {}), tuple, "strides").items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are not residuals that state_dict() returned: {error!r}") from error
    read_own = []
    for name, lost in own.items():
        parameter = _parameter(name, lost.numel() if isinstance(lost, torch.Tensor) else -1, names)
        read_own.append((parameter, _reordered(_tensor(name, lost), strides.get(name), parameter, name)))
    read_buckets = []
    seen: set[str] = set()
    for position, (row, chunk_values, bound, shard) in enumerate(rows):
        parameters = [_parameter(name, length, names) for name, length in row]
        twice = seen.intersection(name for name, _ in row)
        if twice or not parameters:
            raise ValueError(f"the residuals' bucket {position} has no parameters, or {sorted(twice)} again")
        seen.update(name for name, _ in row)
        expected = lengths(sum(map(value_count, parameters)), parameters[0].device)
        if chunk_values != expected[2] and not (bound is None and shard is None):
            raise ValueError(
                f"the residuals of bucket {position} are of chunks of {chunk_values} values, here they have "
                f"{expected[2]}: they were saved on another kind of device, or by another release"
            )
        for kind, lost, length in (("own", bound, expected[0]), ("shard", shard, expected[1])):
            if lost is not None and _tensor(f"{kind} of bucket {position}", lost).numel() != length:
                raise ValueError(
                    f"the residuals {kind!r} of bucket {position} have {lost.numel()} values, here it takes "
                    f"{length}: they were saved with other levels, or by another release"
                )
        if bound is not None and not own_in_buckets:
            raise ValueError(f"the residuals of bucket {position} belong to a hierarchical state")
        read_buckets.append((parameters, bound, shard))
    layout = repr((steps, [row for row, *_ in rows]))
    return SavedResiduals(read_own, read_buckets, steps, hashlib.sha256(layout.encode()).hexdigest()[:16])


def _parameter(name: str, length: int, names: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in names or value_count(names[name]) != length:
        here = "not there" if name not in names else f"{value_count(names[name])} long here"
        raise ValueError(f"the residuals are of a parameter {name!r:.200} of {length} values, {here}")
    return names[name]


def _tensor(name: str, lost: object) -> torch.Tensor:
    if not isinstance(lost, torch.Tensor) or not lost.is_floating_point():
        kind = lost.dtype if isinstance(lost, torch.Tensor) else type(lost).__name__
        raise ValueError(f"the residual {name!r} is not a tensor of floating-point numbers, but {kind}")
    if lost.layout is not torch.strided or lost.is_meta or lost.dim() != 1:
        raise ValueError(
            f"the residual {name!r} must be flat and hold its values, got shape {tuple(lost.shape)}, "
            f"{lost.layout} on {lost.device}"
        )
    if not lost.to(RESIDUAL_DTYPE).isfinite().all():  # it would make every later gradient NaN
        raise ValueError(f"the residual {name!r} has values that are not finite in {RESIDUAL_DTYPE}")
    return lost


def _memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the parameter's gradient in a bucket, where it has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def _reordered(
    lost: torch.Tensor, saved: tuple[int, ...] | None, parameter: torch.Tensor, name: str
) -> torch.Tensor:
    """Return a residual in the order of the parameter's memory here, which may be channels_last."""
    here, shape, count = _memory_order(parameter), parameter.shape, parameter.numel()
    if saved is None or saved == here or count == 0:
        return lost
    if not _without_gaps(shape, saved):
        raise ValueError(
            f"the residual {name!r} was saved with strides {saved}, which a parameter of shape "
            f"{tuple(shape)} cannot have had"
        )
    places = torch.arange(count, device=lost.device).as_strided(shape, saved)
    order = torch.empty(count, dtype=torch.long, device=lost.device)
    order.as_strided(shape, here).copy_(places)
    return lost.view(count, -1)[order].view(-1)


def _without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of a shape lie one after another in memory, in some order of dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _on_cpu(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().clone()
