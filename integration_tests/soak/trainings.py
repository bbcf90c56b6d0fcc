"""The trainings for the faults: every hook with and without the overlap, FSDP2, plain tensors."""

from __future__ import annotations

import contextlib
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
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import (
    AutoState,
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    auto_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils import resolve_group
from dist_utils.testing import call_in_backward
from dist_utils.torch_compat import group_timeout
from soak import trouble

__all__ = ["BASELINES", "TRAININGS", "Training"]

WIDTH, LAYERS = 96, 4
CAP_MIB = 0.05  # several buckets
CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers with user code between them that may raise, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == LAYERS // 2:
                trouble.at("forward")
                x = call_in_backward(x, lambda: trouble.at("backward"))
        return x


class UserAdamW(torch.optim.AdamW):
    """An optimizer of the user's own, which may raise."""

    def step(self, closure: Any = None) -> Any:
        trouble.at("optimizer")
        return super().step(closure)


class Training:
    """One rank's part of a training.

    Args:
        net: The module whose parameters are recorded.
        optimizer: Steps after the backward pass, unless an overlap does.
        call: Called with a batch, if it is not ``net``.
        average: Called after the backward pass.
        handle: The handle of an overlap.
        state: The state of a hook.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        call: nn.Module | None = None,
        average: Callable[[], object] = lambda: None,
        handle: Any = None,
        state: Any = None,
    ) -> None:
        self.net, self.optimizer = net, optimizer
        self._parameters = list(net.parameters())  # after an error FSDP may return different ones
        self._call = net if call is None else call
        self._average, self._handle, self._state = average, handle, state

    def step(self, number: int) -> None:
        """Train on one batch, which depends only on rank and step."""
        trouble.begin(number)
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        (self._call(x) - x).square().mean().backward()
        self._average()
        self.optimizer.step()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return this rank's part of the parameters."""
        for parameter in self._parameters:
            yield parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint of this rank atomically."""
        if self._handle is not None:
            self._handle.wait()  # raises if a rank has failed in this step
        trouble.at("checkpoint")
        residuals = self._state.state_dict() if hasattr(self._state, "state_dict") else None
        path = folder / f"checkpoint-{dist.get_rank()}.pt"
        new = path.with_suffix(".new")
        parts = {"parameters": list(self.parameters()), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "residuals": residuals, "step": step}, new)
        if path.exists():
            path.replace(path.with_suffix(".old"))  # others may die before they have the new one
        new.replace(path)

    def resume(self, folder: Path) -> int:
        """Resume from the newest step that every rank has saved; return it."""
        path = folder / f"checkpoint-{dist.get_rank()}.pt"
        saved = [
            torch.load(found, weights_only=True)
            for found in (path, path.with_suffix(".old"))
            if found.exists()
        ]
        # A rank may have died after the other ranks' last checkpoint but before its own.
        mine = max((checkpoint["step"] for checkpoint in saved), default=0)
        newest = torch.tensor(mine)
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        for checkpoint in saved:
            if checkpoint["step"] == newest:
                self._make_final_buckets()
                for parameter, value in zip(self.parameters(), checkpoint["parameters"], strict=True):
                    parameter.data.copy_(value)
                self.optimizer.load_state_dict(checkpoint["optimizer"])
                if checkpoint["residuals"] is not None:
                    self._state.load_state_dict(checkpoint["residuals"])
                break
        return int(newest)

    def _make_final_buckets(self) -> None:
        """Do one pass, as the guide says: the bits of averages depend on DDP's buckets."""
        with contextlib.nullcontext() if self._handle is None else self._handle.pause():
            self._call(torch.ones(8, WIDTH)).sum().backward()
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return parameters, the optimizer's state and residuals, in a fixed order."""
        yield from self.parameters()
        for state in self.optimizer.state_dict()["state"].values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if hasattr(self._state, "state_dict"):
            yield from _tensors_in(self._state.state_dict())

    def close(self) -> None:
        """Close what the training has started, as a program does in its ``finally``."""
        if self._handle is not None:
            self._handle.remove()
        if hasattr(self._state, "close"):
            self._state.close()
        del self._call, self._average, self._handle, self._state
        del self.net, self.optimizer, self._parameters
        gc.collect()  # a DDP model is in a reference cycle


def _tensors_in(one: Any) -> Iterator[torch.Tensor]:
    if isinstance(one, torch.Tensor):
        yield one
    elif isinstance(one, dict):
        for key in sorted(one, key=str):
            yield from _tensors_in(one[key])
    elif isinstance(one, (list, tuple)):
        for part in one:
            yield from _tensors_in(part)


class Kind(NamedTuple):
    """How to start a training, and with how many ranks."""

    begin: Callable[[], Training]
    world_sizes: tuple[int, ...]
    places: tuple[str, ...]  # where user code may raise
    steps_parts: bool = False  # buckets are stepped one by one
    torch_keeps_groups: bool = False  # after destroy_process_group, even without a fault and our hooks


def _user_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's own hook around one of ours."""

    def user_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 1 or bucket.is_last():  # DDP's first pass may have a single bucket
            trouble.at("hook")
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    user_hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    return user_hook


def _quantized(**options: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (QuantizedAllreduceState(min_bytes=0, **options), quantized_allreduce_hook)


def _mesh(shards: int) -> dist.device_mesh.DeviceMesh:
    """Return a mesh of nodes with ``shards`` ranks each, whose groups have the job's timeout.

    Groups made by ``init_device_mesh`` would have torch's default timeout of half an hour.
    """
    world, me, limit = dist.get_world_size(), dist.get_rank(), group_timeout(dist.group.WORLD, CPU)
    ranks = torch.arange(world).view(-1, shards)
    mine = []
    for rows in (ranks.T, ranks):
        groups = [dist.new_group(row.tolist(), timeout=limit) for row in rows]
        mine += [group for group, row in zip(groups, rows.tolist(), strict=True) if me in row]
    return dist.device_mesh.DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=("node", "shard"))


def _hierarchical() -> tuple[Any, Any]:
    return HierarchicalAllreduceState(mesh=_mesh(2), min_bytes=0), quantized_allreduce_hook


def _auto() -> tuple[Any, Any]:
    # Every choice gives the same bits.
    same = {"fp32": (None, allreduce_hook), "fp32 again": (CompressState(wire_dtype=torch.float32), _fp32)}
    return AutoState(candidates=same), auto_hook


def _fp32(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    del state
    return allreduce_hook(None, bucket)


_fp32.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _new_group() -> dist.ProcessGroup:
    """Return a group for a hook without a state, which would raise a former training's refusal on WORLD."""
    return dist.new_group(timeout=group_timeout(resolve_group(), CPU))


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, allreduce_hook),
    "fp16": lambda: (None, fp16_compress_hook),
    "bf16, fp32 sums": lambda: (CompressState(accumulate="fp32"), bf16_compress_hook),
    "bf16 wrapper": lambda: (None, bf16_compress_wrapper(allreduce_hook)),
    "8 bits": _quantized(),
    "8 bits, feedback": _quantized(error_feedback="both"),
    "4 bits, feedback": _quantized(bits=4),
    "hierarchical": _hierarchical,
    "auto": _auto,
    "per tensor": lambda: (_new_group(), quantization_pertensor_hook),
    "per channel": lambda: (_new_group(), quantization_perchannel_hook),
}
OVERLAPS: dict[str, dict[str, Any] | None] = {
    "": None,
    ", overlap": {},
    ", released": {"release_gradients": True},
}
PLACES = ("forward", "backward", "optimizer", "checkpoint")


def _with_hook(hook: str, overlap: str) -> Training:
    net = Net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MIB)
    optimizer = UserAdamW(ddp.parameters(), lr=1e-3)
    state, ours = HOOKS[hook]()
    if hasattr(state, "bind"):
        state.bind(ddp)
    options, handle = OVERLAPS[overlap], None
    if options is None:
        ddp.register_comm_hook(state, _user_hook(ours))
    else:
        options = {**options, "comm_hook": _user_hook(ours), "comm_state": state}
        handle = overlap_optimizer(ddp, optimizer, steps_per_parameter=True, **options)
    return Training(net, optimizer, call=ddp, handle=handle, state=state)


def _plain_ddp() -> Training:
    net = Net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MIB)
    return Training(net, UserAdamW(ddp.parameters(), lr=1e-3), call=ddp)


def _fsdp(shards: int, *, ours: bool = True) -> Training:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - not in every torch

    from ddp_quant_hooks import fsdp  # noqa: PLC0415

    mesh, net = _mesh(shards), Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    if not ours:
        return Training(net, UserAdamW(net.parameters(), lr=1e-3))
    across = shards == dist.get_world_size()
    state = QuantizedAllreduceState(mesh["shard" if across else "node"], min_bytes=0, error_feedback="both")
    (fsdp.quantize_reduce_scatter if across else fsdp.quantize_all_reduce)(net, state)
    return Training(net, UserAdamW(net.parameters(), lr=1e-3), state=state)


def _tensors() -> Training:
    from ddp_quant_hooks import all_reduce  # noqa: PLC0415

    net = Net()
    state = QuantizedAllreduceState(bits=4, min_bytes=0)

    def average() -> None:
        with state.step():
            gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            all_reduce(gradients, dist.ReduceOp.AVG, state, key="gradients")

    return Training(net, UserAdamW(net.parameters(), lr=1e-3), average=average, state=state)


def _kinds() -> Iterator[tuple[str, Kind]]:
    for hook in HOOKS:
        for overlap in OVERLAPS:
            sizes = (4,) if hook == "hierarchical" else (2, 3, 4)
            yield hook + overlap, Kind(_begin(hook, overlap), sizes, (*PLACES, "hook"), bool(overlap))
    sharded = {"places": PLACES, "torch_keeps_groups": True}
    yield "FSDP2 between nodes", Kind(lambda: _fsdp(2), (4,), **sharded)
    yield "FSDP2 across shards", Kind(lambda: _fsdp(dist.get_world_size()), (2, 3), **sharded)
    yield "plain tensors, 4 bits, feedback", Kind(_tensors, (2, 3, 4), PLACES)
    yield "plain DDP", Kind(_plain_ddp, (2, 3, 4), PLACES)
    yield "plain FSDP2", Kind(lambda: _fsdp(dist.get_world_size(), ours=False), (2, 3), **sharded)


def _begin(hook: str, overlap: str) -> Callable[[], Training]:
    return lambda: _with_hook(hook, overlap)


TRAININGS: dict[str, Kind] = dict(_kinds())
BASELINES = ("plain DDP", "plain FSDP2")
"""Trainings without our packages: faults are injected there for comparison, without any promise."""
