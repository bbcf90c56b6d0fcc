"""A rank's operations for averaging buckets: the real route, with messages and kernels only recorded.

Nothing is planned a second time: :meth:`Route.average` runs as it does in training, on tensors without
values, and everything that it would compute, send, receive and wait for is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ddp_quant_hooks.grid_route import GridRoute
from ddp_quant_hooks.link import Transport
from ddp_quant_hooks.residuals import BucketResiduals
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.values import Values
from dist_utils.process_groups import Arrival

__all__ = ["Begin", "Compute", "Grid", "MakeRoute", "Operation", "Send", "Wait", "record"]


@dataclass(frozen=True)
class Begin:
    """The start of a bucket."""

    bucket: int


@dataclass(frozen=True)
class Compute:
    """A call of a kernel.

    Attributes:
        kernel: ``"encode"``, ``"reduce"``, ``"decode"``, or ``"elementwise"`` for one of torch's own.
        values: The values that it reads; those of several messages count each time.
        messages: The messages that it reads or writes; 1 for one of torch's own.
    """

    kernel: str
    values: int
    messages: int


@dataclass(frozen=True)
class Send:
    """Messages that start together; one without bytes is not sent, but shows who takes part.

    Attributes:
        number: The number of this batch on this rank.
        sends: (rank, bytes), in the order in which they are started.
        receives: Likewise.
        tag: The tag of all of them.
    """

    number: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    tag: int


@dataclass(frozen=True)
class Wait:
    """A wait until a batch's messages have arrived."""

    number: int


Operation: TypeAlias = Begin | Compute | Send | Wait

MakeRoute: TypeAlias = Callable[[int, Transport], Route]
"""Makes the route of a rank."""

_ELEMENTWISE = {"add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_", "copy_", "zero_", "clamp", "to"}


class Grid(GridRoute):
    """A grid that does not check its ranks, because all of them are made here."""

    def _require_grid(self, group: dist.ProcessGroup, device: torch.device) -> None:
        del group, device


def record(
    make_route: MakeRoute, rank: int, world: int, buckets: Sequence[int], *, on_host: bool = True
) -> list[Operation]:
    """Return the operations of one rank that averages buckets in sequence, as the hooks' worker does.

    Args:
        make_route: Makes the rank's route.
        rank: The rank.
        world: Number of ranks.
        buckets: The number of fp32 values of each bucket.
        on_host: Whether the host computes and sends, as on Gloo; otherwise both are only enqueued.
    """
    notes = _Notes(on_host)
    route, group = make_route(rank, notes), cast("dist.ProcessGroup", _Rank(rank, world))
    for bucket, count in enumerate(buckets):
        notes.operations.append(Begin(bucket))
        values = Values([torch.empty(count, device="meta")])
        with _NotedKernels(notes.operations):
            route.average(group, values, BucketResiduals(), None)
    return notes.operations


class _Rank:
    """The part of a process group that a route uses."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _Notes(Transport):
    """Sends nothing, and records what it would have sent."""

    def __init__(self, on_host: bool) -> None:
        self.operations: list[Operation] = []
        self._on_host = on_host
        self._batches = 0

    def on_host(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        del group, device
        return self._on_host

    def start(
        self,
        group: dist.ProcessGroup,
        *,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> Sequence[Arrival]:
        del group
        number, self._batches = self._batches, self._batches + 1
        outgoing, incoming = (
            tuple((rank, tensor.nbytes) for rank, tensor in some) for some in (sends, receives)
        )
        self.operations.append(Send(number, outgoing, incoming, tag))
        return [_Noted(self.operations, number)]


class _Noted:
    def __init__(self, operations: list[Operation], number: int) -> None:
        self._operations, self._number = operations, number

    def wait(self) -> None:
        self._operations.append(Wait(self._number))


class _NotedKernels(TorchFunctionMode):
    """Records the kernels' operators, which do nothing to tensors without values, and torch's arithmetic."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if str(func).startswith("ddp_quant_hooks."):
            self._operations.append(_kernel(name, args))
        elif name in _ELEMENTWISE and (result is not args[0] or name.endswith("_")):
            self._operations.append(Compute("elementwise", args[0].numel(), 1))
        return result


def _kernel(name: str, arguments: Sequence[Any]) -> Compute:
    """Return the record for an operator of :mod:`ddp_quant_hooks.kernels.operators`."""
    if name == "encode":
        values, messages = arguments[:2]
        return Compute(name, values.numel(), len(messages))
    if name == "reduce":
        messages, _, values = arguments[:3]
        return Compute(name, values * len(messages), len(messages))
    messages, _, _, values = arguments[:4]
    visits = values.numel() * (len(messages) if name == "decode" else 1)
    return Compute("decode", visits, len(messages))
