"""Small trainings with every hook, with and without the overlap, with FSDP2, and on plain tensors.

For tests of what happens when something goes wrong: every training calls its :class:`Places` where user code
may raise, or where its process may end or stop.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from ddp_optim_overlap import OptimizerHookState, hook_then_optimizer, overlap_optimizer
from ddp_quant_hooks import (
    AutoState,
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    all_reduce,
    auto_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import call_in_backward
from dist_utils.torch_compat import group_timeout

WIDTH, LAYERS = 96, 4
CAP_MIB = 0.05  # several buckets
CPU = torch.device("cpu")


class Places:
    """Places in the steps of a training at which something may happen: each calls what is armed for it."""

    def __init__(self) -> None:
        self._actions: dict[tuple[str, int], Callable[[], object]] = {}
        self._step = -1

    def arm(self, place: str, step: int, action: Callable[[], object]) -> None:
        """Call ``action()`` once when this rank reaches a place in a step."""
        self._actions[place, step] = action

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step = step
        self.at("begin")

    def at(self, place: str) -> None:
        """Mark that user code has reached a place."""
        if action := self._actions.pop((place, self._step), None):
            action()


class Net(nn.Module):
    """Layers with user code between them, forward and backward."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == LAYERS // 2:
                self.places.at("forward")
                x = call_in_backward(x, lambda: self.places.at("backward"))
        return x


class UserAdamW(torch.optim.AdamW):
    """An optimizer of the user's own, which may raise."""

    def __init__(self, parameters: Any, places: Places) -> None:
        super().__init__(parameters, lr=1e-3)
        self.places = places

    def step(self, closure: Any = None) -> Any:
        self.places.at("optimizer")
        return super().step(closure)


class Training:
    """One rank's part of a training.

    Args:
        net: The module whose parameters are recorded.
        call: Called with a batch, if it is not ``net``.
        optimizer: Steps after the backward pass, unless an overlap does; made if not given.
        average: Called after the backward pass.
        handle: The handle of an overlap.
        state: The state of a hook.
    """

    def __init__(
        self,
        net: Net,
        call: nn.Module | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        average: Callable[[], object] = lambda: None,
        handle: Any = None,
        state: Any = None,
    ) -> None:
        self.net, self.places = net, net.places
        self.optimizer = optimizer or UserAdamW(net.parameters(), net.places)
        self.handle = handle
        self._parameters = list(net.parameters())  # after an error FSDP may return different ones
        self._call = net if call is None else call
        self._average, self._state = average, state

    def step(self, number: int) -> None:
        """Train on one batch, which depends only on rank and step."""
        self.places.begin(number)
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        (self._call(x) - x).square().mean().backward()
        self._average()
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        """Return this rank's part of the parameters."""
        return [
            parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
            for parameter in self._parameters
        ]

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint of this rank atomically."""
        if self.handle is not None:
            self.handle.wait()  # raises if a rank has failed in this step
        self.places.at("checkpoint")
        residuals = self._state.state_dict() if hasattr(self._state, "state_dict") else None
        path = folder / f"checkpoint-{dist.get_rank()}.pt"
        new = path.with_suffix(".new")
        parts = {"parameters": self.parameters(), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "residuals": residuals, "step": step}, new)
        new.replace(path)

    def make_fresh_start(self) -> None:
        """Go on after a failed step, with FSDP2."""
        self._state.close()
        self.optimizer.zero_grad()
        self.net.reset_iter_state()  # type: ignore[operator] # fully_shard adds it

    def close(self) -> None:
        """Close what the training has started, as a program does in its ``finally``."""
        if self.handle is not None:
            self.handle.remove()
        if hasattr(self._state, "close"):
            self._state.close()
        del self._call, self._average, self.handle, self._state
        del self.net, self.optimizer, self._parameters
        gc.collect()  # a DDP model is in a reference cycle


def _quantized(**options: Any) -> Callable[[dist.ProcessGroup], tuple[Any, Any]]:
    return lambda group: (QuantizedAllreduceState(group, min_bytes=0, **options), quantized_allreduce_hook)


def rows_of(group: dist.ProcessGroup, ranks: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's group of several, with the timeout of ``group``: they do not inherit it."""
    made = [dist.new_group(row, timeout=group_timeout(group, CPU)) for row in ranks]
    (mine,) = (one for one, row in zip(made, ranks, strict=True) if dist.get_rank() in row)
    return mine


def mesh_of(group: dist.ProcessGroup, shards: int) -> dist.device_mesh.DeviceMesh:
    """Return a mesh of nodes with ``shards`` ranks each."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shards)
    groups = [rows_of(group, rows.tolist()) for rows in (ranks.T, ranks)]
    names = ("node", "shard")
    return dist.device_mesh.DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


def _hierarchical(group: dist.ProcessGroup) -> tuple[Any, Any]:
    ranks = dist.get_process_group_ranks(group)
    node = rows_of(group, [ranks[first : first + 2] for first in range(0, len(ranks), 2)])
    return HierarchicalAllreduceState(group, intra_group=node, min_bytes=0), quantized_allreduce_hook


def _auto(group: dist.ProcessGroup) -> tuple[Any, Any]:
    # Every choice gives the same bits.
    same = {"fp32": (group, allreduce_hook), "again": (CompressState(group), allreduce_hook)}
    return AutoState(group, candidates=same), auto_hook


Hook = Callable[[dist.ProcessGroup], tuple[Any, Any]]
HOOKS: dict[str, Hook] = {
    "allreduce": lambda group: (group, allreduce_hook),
    "fp16": lambda group: (group, fp16_compress_hook),
    "bf16, fp32 sums": lambda group: (CompressState(group, accumulate="fp32"), bf16_compress_hook),
    "bf16 wrapper": lambda group: (group, bf16_compress_wrapper(allreduce_hook)),
    "8 bits": _quantized(),
    "8 bits, feedback": _quantized(error_feedback="both"),
    "4 bits, feedback": _quantized(bits=4),
    "hierarchical": _hierarchical,
    "auto": _auto,
    "per tensor": lambda group: (group, quantization_pertensor_hook),
    "per channel": lambda group: (group, quantization_perchannel_hook),
}
OVERLAPS: dict[str, dict[str, Any] | None] = {
    "": None,
    ", overlap": {},
    ", released": {"release_gradients": True},
}
PLACES = ("forward", "backward", "optimizer", "checkpoint")


def _user_hook(places: Places, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's own hook around one of ours."""

    def user_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 1 or bucket.is_last():  # DDP's first pass may have a single bucket
            places.at("hook")
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    user_hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    return user_hook


def _ddp(group: dist.ProcessGroup, places: Places, **options: Any) -> tuple[Net, DistributedDataParallel]:
    net = Net(places)
    return net, DistributedDataParallel(net, process_group=group, bucket_cap_mb=CAP_MIB, **options)


def with_hook(
    group: dist.ProcessGroup,
    places: Places,
    hook: Hook,
    overlap: dict[str, Any] | None = None,
    **ddp_options: Any,
) -> Training:
    """Return a training with a hook of DDP.

    Args:
        group: The ranks.
        places: Where user code may get into trouble.
        hook: Makes the hook and its state.
        overlap: Options of ``overlap_optimizer``; ``None`` for a step after the pass.
        ddp_options: Of ``DistributedDataParallel``.
    """
    net, ddp = _ddp(group, places, **ddp_options)
    optimizer, handle = UserAdamW(ddp.parameters(), places), None
    state, ours = hook(group)
    if hasattr(state, "bind"):
        state.bind(ddp)
    if overlap is None:
        if ours is not None:
            ddp.register_comm_hook(state, _user_hook(places, ours))
    else:
        options = {**overlap, "comm_hook": _user_hook(places, ours), "comm_state": state}
        handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True, **options)
    return Training(net, ddp, optimizer=optimizer, handle=handle, state=state)


def _plain_ddp(group: dist.ProcessGroup, places: Places) -> Training:
    return Training(*_ddp(group, places))


def drop_in(group: dist.ProcessGroup, places: Places) -> Training:
    """Return a training with the counterpart of torch's hook that steps."""
    net, ddp = _ddp(group, places)
    optimizer = UserAdamW(ddp.parameters(), places)
    state = OptimizerHookState(optimizer, steps_per_parameter=True)
    ddp.register_comm_hook(group, hook_then_optimizer(_user_hook(places, allreduce_hook), state))
    return Training(net, ddp, optimizer=optimizer)


def _fsdp(group: dist.ProcessGroup, places: Places, *, shards: int, ours: str) -> Training:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - not in every torch

    from ddp_quant_hooks import fsdp  # noqa: PLC0415

    mesh, net = mesh_of(group, shards), Net(places)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    if not ours:
        return Training(net)
    dimension = "node" if ours == "quantize_all_reduce" else "shard"
    state = QuantizedAllreduceState(mesh[dimension], min_bytes=0, error_feedback="both")
    getattr(fsdp, ours)(net, state)
    return Training(net, state=state)


def _between_nodes(group: dist.ProcessGroup, places: Places) -> Training:
    return _fsdp(group, places, shards=2 - group.size() % 2, ours="quantize_all_reduce")


def _across_shards(group: dist.ProcessGroup, places: Places) -> Training:
    return _fsdp(group, places, shards=group.size(), ours="quantize_reduce_scatter")


def _plain_fsdp(group: dist.ProcessGroup, places: Places) -> Training:
    return _fsdp(group, places, shards=group.size(), ours="")


def _tensors(group: dist.ProcessGroup, places: Places) -> Training:
    net = Net(places)
    state = QuantizedAllreduceState(group, bits=4, min_bytes=0)

    def average() -> None:
        with state.step():
            gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            all_reduce(gradients, dist.ReduceOp.AVG, state, key="gradients")

    return Training(net, average=average, state=state)


class Kind(NamedTuple):
    """How to start a training, and with how many ranks."""

    begin: Callable[[dist.ProcessGroup, Places], Training]
    world_sizes: tuple[int, ...] = (2, 3, 4)
    places: tuple[str, ...] = PLACES  # where user code may raise
    steps_parts: bool = False  # buckets are stepped one by one
    torch_keeps_groups: bool = False  # after destroy_process_group, even without a fault and our hooks


def _kinds() -> Iterator[tuple[str, Kind]]:
    for hook, make in HOOKS.items():
        for overlap, options in OVERLAPS.items():
            sizes = (3, 4) if hook == "hierarchical" else (2, 3, 4)
            yield hook + overlap, Kind(_begin(make, options), sizes, (*PLACES, "hook"), bool(overlap))
    yield "FSDP2 between nodes", Kind(_between_nodes, (3, 4), torch_keeps_groups=True)
    yield "FSDP2 across shards", Kind(_across_shards, (2, 3), torch_keeps_groups=True)
    yield "plain tensors, 4 bits, feedback", Kind(_tensors)
    yield "plain DDP", Kind(_plain_ddp)
    yield "plain FSDP2", Kind(_plain_fsdp, (2, 3), torch_keeps_groups=True)


def _begin(hook: Hook, overlap: dict[str, Any] | None) -> Callable[[dist.ProcessGroup, Places], Training]:
    return lambda group, places: with_hook(group, places, hook, overlap)


TRAININGS: dict[str, Kind] = dict(_kinds())
BASELINES = ("plain DDP", "plain FSDP2")
"""Trainings without our packages: faults are injected there for comparison, without any promise."""
