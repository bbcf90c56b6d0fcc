"""Notice ranks that have drifted apart: compare what they hold by digest, and name what differs."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.containers.kinds import KINDS
from dist_utils.module_state.broadcasts import class_handles_memory
from dist_utils.module_state.fingerprint import fingerprint, octets
from dist_utils.process_groups.agreement import AgreementError
from dist_utils.process_groups.errors import error_text
from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group
from dist_utils.process_groups.messages import all_gather_plain, gather_rows

_NAMED = 3
"""Differing entries that a message names."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object is, which the ``repr`` of functions and of many objects tells: on every rank elsewhere."""

_NOTHING = ("nothing", "more", "")
"""What a rank that holds fewer entries says of a later one."""


class Entry(NamedTuple):
    """One of the things that are compared.

    Attributes:
        name: Where it is, as in ``"optimizer.state.0.exp_avg"``; a lone value's is ``"values"``.
        text: A tensor's dtype, shape and kind of device; the ``repr`` of anything else.
        values: A dense tensor, or ``None`` of anything else.
    """

    name: str
    text: str
    values: torch.Tensor | None


def require_same_on_all_ranks(
    values: object,
    process_group: GroupLike = None,
    *,
    buffers: bool = True,
    ignore: Collection[str] = (),
    step: int | None = None,
    every: int = 1,
) -> None:
    """Return if all ranks hold bitwise identical values; otherwise raise on every rank.

    For replicas of data-parallel training, which are identical after every step, unless a rank has stepped
    with gradients that were not averaged, or has started from other values.

    Args:
        values: A module, an optimizer, a scheduler or anything else with a ``state_dict()``, a tensor, or a
            container of these. Of a module its parameters and buffers are compared, of a
            ``DistributedDataParallel`` module not those that it was told to ignore. Bits are compared, so two
            equal NaN are identical; strides and the device's index may differ. What is no tensor is compared
            by its ``repr``, without addresses in memory.
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        buffers: Whether the buffers of modules are compared. Those of ``BatchNorm`` differ between the
            forward passes of a ``DistributedDataParallel`` module, where every rank counts its own batches.
        ignore: Names of parameters and buffers of modules that may differ, as in ``named_parameters()``.
        step: The number of the training step, for ``every`` and for the message.
        every: Compare only if ``step`` is a multiple of this positive number, and otherwise return at once.

    Raises:
        AgreementError: On every rank, with the same message: the first entries that differ, and what two
            ranks have there; or what is wrong on another rank.
        TypeError: Something cannot be compared: a ``DTensor`` (compare its ``to_local()`` among ranks with
            the same shard), an iterator, a nested tensor, or a tensor without values. Also if ``every`` is
            given without ``step``. The other ranks get an ``AgreementError``.
        RuntimeError, ValueError: As :func:`dist_utils.resolve_group`; or ``every`` is not positive.

    Cost:
        Collective. One all-gather of 48 bytes a rank and one wait for its result; only if ranks differ do
        names and values travel. Tensors on the CPU are hashed there (about 1 s a GiB), those of an
        accelerator where they are.

    Example:
        >>> require_same_on_all_ranks({"model": ddp, "optimizer": optimizer})  # doctest: +SKIP
        >>> for step, batch in enumerate(batches):  # doctest: +SKIP
        ...     train(batch)
        ...     require_same_on_all_ranks(ddp, step=step, every=100)
    """
    group = resolve_group(process_group)
    if every < 1:
        raise ValueError(f"every must be positive, got {every}")
    if step is None and every != 1:
        raise TypeError("every needs the number of the step: require_same_on_all_ranks(..., step=step)")
    if step is not None and step % every:
        return
    entries: list[Entry] = []
    problem: BaseException | None = None
    try:
        entries = list(_entries("", values, ignore, buffers=buffers))
        digest = _digest(group, entries, step)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem, digest = error, torch.zeros(5, dtype=torch.int64, device=collective_device(group))
    if group.size() > 1 and dist.get_backend(group) != "fake":
        own = torch.nn.functional.pad(digest, (0, 1), value=float(problem is not None))
        if not (gather_rows(group, own) == own).all() or problem is not None:
            _raise_difference(group, entries, problem, step)
    if problem is not None:
        raise problem


def _entries(name: str, value: Any, ignore: Collection[str], *, buffers: bool) -> Iterator[Entry]:
    """Yield what is compared of a value, in an order that follows from its structure."""
    if isinstance(value, torch.Tensor):
        yield _entry_of_tensor(name, value)
        return
    if isinstance(value, torch.nn.Module):
        for child, tensor in _tensors_of_module(value, ignore, buffers=buffers):
            yield _entry_of_tensor(_below(name, child), tensor)
        return
    if isinstance(value, Iterator):
        raise TypeError(f"{name or 'values'} is a {type(value).__name__}, which a comparison would use up")
    children = _children(value)
    if children is None:
        yield Entry(name or "values", _ADDRESS.sub("", repr(value)), None)
        return
    for key, child in children:
        yield from _entries(_below(name, str(key)), child, ignore, buffers=buffers)


def _children(value: Any) -> Sequence[tuple[object, Any]] | None:
    """Return what a container holds, by name; ``None`` if it is no container."""
    if isinstance(value, Mapping):
        return list(value.items())
    if callable(getattr(value, "state_dict", None)):
        return list(value.state_dict().items())
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if hasattr(value, "__array_interface__"):  # NumPy's
        return [("dtype", str(value.dtype)), ("values", value.tolist())]
    if (kind := KINDS[type(value)]) is not None:
        return [*kind.attributes(value).items(), *enumerate(kind.flatten(value))]
    return None


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _tensors_of_module(
    module: torch.nn.Module, ignore: Collection[str], *, buffers: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    ignored = set(ignore)
    if isinstance(module, DistributedDataParallel):
        ignored |= set(module.parameters_to_ignore)
        module = module.module
    for name, parameter in module.named_parameters():
        if name not in ignored:
            yield name, parameter
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in ignored:
            yield f"{name} (a buffer)", buffer


def _entry_of_tensor(path: str, tensor: torch.Tensor) -> Entry:
    name, kind = path or "values", type(tensor).__name__
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise TypeError(f"{name} has no values yet: it is on the meta device or not initialized")
    if class_handles_memory(tensor):
        raise TypeError(f"{name} is a {kind}, whose class handles its memory: give its to_local()")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor: give the tensors inside")
    text = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"
    values = tensor.detach()
    if tensor.is_quantized:
        values = tensor.dequantize()
    elif tensor.layout is not torch.strided:
        values = values.to_dense()
    return Entry(name, text, values)


def _digest(group: dist.ProcessGroup, entries: Sequence[Entry], step: int | None) -> torch.Tensor:
    """Return five numbers: four for texts and values on the host, one for values on accelerators."""
    on_host = hashlib.sha256(repr((step, [(entry.name, entry.text) for entry in entries])).encode())
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for entry in entries:
        if entry.values is None or not entry.values.numel():
            continue
        if entry.values.device.type == "cpu":
            on_host.update(_memory(entry.values))
        else:
            elsewhere.setdefault(entry.values.device, []).append(entry.values)
    device = collective_device(group)
    numbers = torch.frombuffer(bytearray(on_host.digest()), dtype=torch.int64).to(device)
    devices = [fingerprint(tensors).to(device) for tensors in elsewhere.values()]
    return torch.cat([numbers, fingerprint(devices) if devices else numbers.new_zeros(1)])


def _memory(values: torch.Tensor) -> Any:
    """Return the bytes of a tensor on the CPU for ``hashlib``, without a copy if possible."""
    flat = octets(values)
    memory: Any = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    memory.owner = flat  # which must live as long
    return memory


def _raise_difference(
    group: dist.ProcessGroup, entries: Sequence[Entry], problem: BaseException | None, step: int | None
) -> None:
    """Raise on every rank what differs, after all have told each other."""
    claims = [(entry.name, entry.text, _short_digest(entry)) for entry in entries]
    everyone = all_gather_plain(group, ["" if problem is None else error_text(problem), step, claims])
    if problem is not None:
        raise problem
    ranks = dist.get_process_group_ranks(group)
    for rank, (text, *_) in zip(ranks, everyone, strict=True):
        if text:
            raise AgreementError(f"rank {rank} cannot go on: {text}")
    for rank, (_, at_step, _) in zip(ranks, everyone, strict=True):
        if at_step != everyone[0][1]:
            raise AgreementError(
                f"rank {ranks[0]} compares step {everyone[0][1]}, rank {rank} step {at_step}"
            )
    lines = _differences(group, entries, [said for *_, said in everyone])
    when = "" if step is None else f" at step {step}"
    raise AgreementError("\n  ".join([f"ranks hold different values{when}, first:", *lines]))


def _short_digest(entry: Entry) -> str:
    if entry.values is None or not entry.values.numel():
        return ""
    return hashlib.sha256(_memory(entry.values.cpu())).hexdigest()[:32]


def _differences(
    group: dist.ProcessGroup, entries: Sequence[Entry], claims: Sequence[Sequence[Sequence[str]]]
) -> list[str]:
    """Return a line for each of the first entries that differ, the same lines on every rank."""
    ranks = dist.get_process_group_ranks(group)
    lines: list[str] = []
    more = 0
    for position in range(max(map(len, claims))):
        said = [tuple(of[position]) if position < len(of) else _NOTHING for of in claims]
        # Values travel only if all ranks have something of this name and kind here.
        other = next((index for index, one in enumerate(said) if one[:2] != said[0][:2]), None)
        if other is None:
            other = next((index for index, one in enumerate(said) if one != said[0]), None)
        if other is None:
            continue
        (name, text, _), (others_name, others_text, _) = said[0], said[other]
        first, second = f"rank {ranks[0]} has", f"rank {ranks[other]} has"
        if name != others_name:  # later positions cannot be compared
            return [*lines, f"{first} {name} {text}, {second} {others_name} {others_text}"]
        if len(lines) == _NAMED:
            more += 1
        elif text != others_text:
            lines.append(f"{name}: {first} {text}, {second} {others_text}")
        else:
            lines.append(f"{name}{_different_values(group, entries[position], other, first, second)}")
    return [*lines, f"and {more} more of {len(claims[0])}"] if more else lines


def _different_values(group: dist.ProcessGroup, entry: Entry, other: int, first: str, second: str) -> str:
    """Return the first element of a tensor in which another rank differs from the first one, on all ranks."""
    assert entry.values is not None
    own = octets(entry.values).to(collective_device(group))
    theirs = own.clone()
    group.broadcast(theirs, 0).wait()
    length = entry.values.element_size()
    differ = (own != theirs).view(-1, length).any(1)
    found: list[object] = []
    if differ.any():
        first_one = int(differ.int().argmax())
        two = [one.view(-1, length)[first_one].cpu().view(entry.values.dtype).item() for one in (theirs, own)]
        index = [int(i) for i in torch.unravel_index(torch.tensor(first_one), entry.values.shape)]
        found = [str(index) if index else "", *map(str, two), int(differ.sum())]
    index, one, two, count = all_gather_plain(group, found)[other]
    return f"{index}: {first} {one}, {second} {two} ({count} of {len(differ)} values differ)"
