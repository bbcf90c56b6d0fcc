"""Notice ranks that have drifted apart: compare what they hold by digest, and name what differs."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.containers.kinds import KINDS
from dist_utils.module_state.broadcasts import why_unreadable
from dist_utils.module_state.fingerprint import fingerprint, octets
from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group
from dist_utils.process_groups.matching_tensors import require_same_digest
from dist_utils.process_groups.messages import all_gather_plain

_NAMED = 3
"""Differing entries that a message names."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object is, which the ``repr`` of functions and of many objects tells: on every rank elsewhere."""

_NOTHING = ["nothing", "more", ""]
"""What a rank that holds fewer entries says of a later one."""


class Entry(NamedTuple):
    """One of the things that are compared.

    Attributes:
        name: Where it is, as in ``"optimizer.state.0.exp_avg"``; a lone value's is ``"values"``.
        text: A tensor's dtype and shape, a container's length, or the ``repr`` of anything else.
        values: A dense tensor, or ``None`` of anything else.
    """

    name: str
    text: str
    values: torch.Tensor | None = None

    @property
    def description(self) -> str:
        """The text, and the kind of device of a tensor."""
        return self.text if self.values is None else f"{self.text} on {self.values.device.type}"


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
    if step is not None:
        if step % every:
            return
        step = int(step)  # NumPy's numbers and tensors do not travel to other ranks
    held: list[Entry] = []
    digest = torch.zeros(5, dtype=torch.int64, device=collective_device(group))
    problem: BaseException | None = None
    try:
        held = list(entries(values, ignore=ignore, buffers=buffers))
        digest = _digest(group, held, step)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    require_same_digest(
        group,
        digest,
        lambda: [step, [_claim(entry) for entry in held]],
        lambda group, everyone: _difference(group, held, everyone),
        problem,
    )


def entries(
    value: Any, name: str = "", *, ignore: Collection[str] = (), buffers: bool = True
) -> Iterator[Entry]:
    """Yield all that is compared of a value, in an order that follows from its structure.

    Args:
        value: As for :func:`require_same_on_all_ranks`.
        name: Where it is.
        ignore: Likewise.
        buffers: Likewise.

    Raises:
        TypeError: Something cannot be compared.
    """
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        yield _entry_of_tensor(name or "values", value)
        return
    if isinstance(value, torch.nn.Module):
        for child, tensor in _tensors_of_module(value, ignore, buffers=buffers):
            yield _entry_of_tensor(_below(name, child), tensor)
        return
    if isinstance(value, Iterator):
        raise TypeError(f"{name or 'values'} is a {type(value).__name__}, which a comparison would use up")
    children = _children(value)
    if children is None:
        yield Entry(name or "values", _ADDRESS.sub("", repr(value)))
        return
    yield Entry(name or "values", f"{len(children)} entries")
    for key, child in children:
        yield from entries(child, _below(name, str(key)), ignore=ignore, buffers=buffers)


def _children(value: Any) -> Sequence[tuple[object, Any]] | None:
    """Return what a container holds, by name; ``None`` if it is no container."""
    if isinstance(value, torch.Tensor):  # a quantized one
        return [("integers", value.int_repr()), ("values", value.dequantize())]
    if isinstance(value, Mapping):
        return list(value.items())
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return list(value.state_dict().items())
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if hasattr(value, "__array_interface__"):  # NumPy's
        return [("kind", f"{value.dtype} of shape {value.shape}"), ("values", value.tolist())]
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


def _entry_of_tensor(name: str, tensor: torch.Tensor) -> Entry:
    if why := why_unreadable(tensor):
        raise TypeError(f"{name} {why}")
    text, values = f"{tensor.dtype} of shape {tuple(tensor.shape)}", tensor.detach()
    if tensor.layout is torch.strided:
        return Entry(name, text, values)
    return Entry(name, f"{text}, {tensor.layout}", values.to_dense())


def _digest(group: dist.ProcessGroup, held: Sequence[Entry], step: int | None) -> torch.Tensor:
    """Return five numbers: four for texts and values on the host, one for values on accelerators."""
    device = collective_device(group)
    on_host = hashlib.sha256(repr((step, [(entry.name, entry.description) for entry in held])).encode())
    elsewhere: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for entry in held:
        if entry.values is not None and entry.values.device.type == "cpu":
            on_host.update(_memory(entry.values))
        elif entry.values is not None:
            elsewhere[entry.values.device].append(entry.values)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for tensors in elsewhere.values():
        total += fingerprint(tensors).to(device)
    return torch.cat([torch.frombuffer(bytearray(on_host.digest()), dtype=torch.int64).to(device), total])


def _memory(values: torch.Tensor) -> Any:
    """Return the bytes of a tensor on the CPU for ``hashlib``, without a copy if possible."""
    flat = octets(values)
    memory: Any = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    memory.owner = flat  # which must live as long
    return memory


def _claim(entry: Entry) -> tuple[str, str, str]:
    """Return what a rank says of an entry: its name, what it is, and a digest of its values."""
    memory = b"" if entry.values is None else _memory(entry.values.cpu())
    return entry.name, entry.description, hashlib.sha256(memory).hexdigest()[:32]


def _difference(group: dist.ProcessGroup, held: Sequence[Entry], everyone: Sequence[Any]) -> str:
    """Return what differs first, the same text on every rank, after ranks have told each other values."""
    ranks = dist.get_process_group_ranks(group)
    step = everyone[0][0]
    for rank, (at_step, _) in zip(ranks, everyone, strict=True):
        if at_step != step:
            return f"rank {ranks[0]} compares step {step}, rank {rank} step {at_step}"
    lines = [f"ranks hold different values{'' if step is None else f' at step {step}'}, first:"]
    rows = list(itertools.zip_longest(*(entries for _, entries in everyone), fillvalue=_NOTHING))
    different = [position for position, said in enumerate(rows) if any(one != said[0] for one in said)]
    for position in different[:_NAMED]:
        said = rows[position]
        kinds = [(name, text) for name, text, _ in said]
        # Values travel only if all ranks have something of this name and kind here.
        compared: Sequence[Any] = said if len(set(kinds)) == 1 else kinds
        other = next(index for index, one in enumerate(compared) if one != compared[0])
        (name, text), (others_name, others_text) = kinds[0], kinds[other]
        first, second = f"rank {ranks[0]} has", f"rank {ranks[other]} has"
        if name != others_name:  # later positions cannot be compared
            return "\n  ".join([*lines, f"{first} {name} {text}, {second} {others_name} {others_text}"])
        if text != others_text:
            lines.append(f"{name}: {first} {text}, {second} {others_text}")
        else:
            lines.append(f"{name}{_different_values(group, held[position], other, first, second)}")
    if len(different) > _NAMED:
        lines.append(f"and {len(different) - _NAMED} more of {len(rows)}")
    return "\n  ".join(lines)


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
        two = [_number(one.view(-1, length)[first_one].cpu(), entry.values.dtype) for one in (theirs, own)]
        index = [int(i) for i in torch.unravel_index(torch.tensor(first_one), entry.values.shape)]
        found = [str(index) if index else "", *map(str, two), int(differ.sum())]
    index, one, two, count = all_gather_plain(group, found)[other]
    return f"{index}: {first} {one}, {second} {two} ({count} of {len(differ)} values differ)"


def _number(memory: torch.Tensor, dtype: torch.dtype) -> object:
    """Return one value from its bytes; the bytes themselves if torch cannot read its dtype, as of 4 bits."""
    try:
        return memory.view(dtype).item()
    except RuntimeError:
        return f"0x{bytes(memory.tolist()).hex()}"
