"""Small trainings with every hook, with and without the overlap, with FSDP2, and on plain tensors.

On GPUs where the group's backend is NCCL. A training that is given :class:`Places` calls them where user code
may raise, or where its process may end or stop.
"""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_compress_hooks as compress
import ddp_quant_hooks as quant
from ddp_compress_hooks import CompressState, allreduce_hook
from ddp_optim_overlap import OptimizerHookState, hook_then_optimizer, overlap_optimizer
from ddp_quant_hooks import AutoState, HierarchicalAllreduceState, LowRankState, QuantizedAllreduceState
from dist_utils.testing import call_in_backward
from dist_utils.torch_compat import group_timeout

WIDTH, LAYERS = 61, 4  # rows that ranks divide unevenly
CAP_MIB = 0.02  # several buckets


def rank_device() -> torch.device:
    """Return where this rank trains."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


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
        group: The ranks that train on different batches.
        places: Where something may happen.
        net: The module whose parameters are recorded.
        model: Called with a batch, if it is not ``net``.
        optimizer: Steps after the backward pass, unless an overlap does; made if not given.
        average: Called after the backward pass.
        handle: The handle of an overlap.
        state: The state of a hook.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        places: Places,
        net: nn.Module,
        model: nn.Module | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        average: Callable[[], object] = lambda: None,
        handle: Any = None,
        state: Any = None,
    ) -> None:
        self.places, self.net, self.model = places, net, net if model is None else model
        self.optimizer = optimizer or UserAdamW(net.parameters(), places)
        self.handle, self.state = handle, state
        self._rank = dist.get_rank(group)
        self._parameters = list(net.parameters())  # after an error FSDP may return different ones
        self._average = average

    def backward(self, number: int) -> torch.Tensor:
        """Make a pass with a batch of this step and of the rank in the group; return the loss."""
        generator = torch.Generator().manual_seed(1000 * number + self._rank)
        x = torch.randn(8, WIDTH, generator=generator).to(rank_device())
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, number: int) -> torch.Tensor:
        """Train on one batch; return the loss."""
        self.places.begin(number)
        self.optimizer.zero_grad()
        loss = self.backward(number)
        self._average()
        self.optimizer.step()
        return loss

    def train(self, steps: Iterable[int]) -> "Training":
        """Make steps; return the training."""
        for number in steps:
            self.step(number)
        return self

    def parameters(self) -> list[torch.Tensor]:
        """Return this rank's part of the parameters."""
        return [
            parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
            for parameter in self._parameters
        ]

    def make_final_buckets(self, passes: int = 1) -> None:
        """Make passes without a step before a checkpoint is loaded, as the guide says."""
        for number in range(passes):
            with contextlib.nullcontext() if self.handle is None else self.handle.pause():
                self.backward(number)
            self.optimizer.zero_grad()

    def checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank holds."""
        residuals = self.state.state_dict() if hasattr(self.state, "state_dict") else None
        optimizer = self.optimizer.state_dict()
        return {"parameters": self.parameters(), "optimizer": optimizer, "residuals": residuals}

    def load(self, checkpoint: dict[str, Any]) -> "Training":
        """Take everything from a checkpoint; return the training."""
        for parameter, value in zip(self.parameters(), checkpoint["parameters"], strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["residuals"] is not None:
            self.state.load_state_dict(checkpoint["residuals"])
        return self

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint of this rank atomically."""
        if self.handle is not None:
            self.handle.wait()  # raises if a rank has failed in this step
        self.places.at("checkpoint")
        path = folder / f"checkpoint-{dist.get_rank()}.pt"
        new = path.with_suffix(".new")
        torch.save({**self.checkpoint(), "step": step}, new)
        new.replace(path)

    def close(self) -> None:
        """Close what the training has started, as a program does in its ``finally``."""
        if self.handle is not None:
            self.handle.remove()
        if hasattr(self.state, "close"):
            self.state.close()
        del self.model, self._average, self.handle, self.state
        del self.net, self.optimizer, self._parameters
        gc.collect()  # a DDP model is in a reference cycle


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compare tensors, or lists and dictionaries of them, bit by bit; a failure shows the values."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_resumes(begin: Callable[[], Training], passes: int = 1) -> None:
    """Compare a training that goes on from its checkpoint with one that is not interrupted."""
    through, resumed = begin().train(range(3)), begin()
    saved = copy.deepcopy(through.checkpoint())
    resumed.make_final_buckets(passes)
    found = resumed.load(saved).train(range(3, 6))
    assert_same_bits(found.parameters(), through.train(range(3, 6)).parameters())


def few_bits(**options: Any) -> Callable[[dist.ProcessGroup], tuple[Any, Any]]:
    """Return what makes a quantizing hook and its state, for buckets of all sizes."""
    return lambda group: (
        QuantizedAllreduceState(group, min_bytes=0, **options),
        quant.quantized_allreduce_hook,
    )


def rows_of(group: dist.ProcessGroup, ranks: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's group of several, with the timeout of ``group``: they do not inherit it."""
    made = [dist.new_group(row, timeout=group_timeout(group, rank_device())) for row in ranks]
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
    return HierarchicalAllreduceState(group, intra_group=node, min_bytes=0), quant.quantized_allreduce_hook


def _low_rank(group: dist.ProcessGroup) -> tuple[Any, Any]:
    state = LowRankState(group, rank=4, residual_bits=1, warm_up_steps=2, min_bytes=0)
    return state, quant.low_rank_hook


def _auto(group: dist.ProcessGroup) -> tuple[Any, Any]:
    # Every choice gives the same bits.
    return AutoState(group, candidates={name: HOOKS["8 bits"](group) for name in "01"}), quant.auto_hook


Hook = Callable[[dist.ProcessGroup], tuple[Any, Any]]
HOOKS: dict[str, Hook] = {
    "allreduce": lambda group: (group, allreduce_hook),
    "fp16": lambda group: (group, compress.fp16_compress_hook),
    "bf16, fp32 sums": lambda group: (CompressState(group, accumulate="fp32"), compress.bf16_compress_hook),
    "bf16 wrapper": lambda group: (group, compress.bf16_compress_wrapper(allreduce_hook)),
    "8 bits": few_bits(),
    "8 bits, feedback": few_bits(error_feedback="both"),
    "4 bits, feedback": few_bits(bits=4),
    "low rank": _low_rank,
    "hierarchical": _hierarchical,
    "auto": _auto,
    "per tensor": lambda group: (group, quant.quantization_pertensor_hook),
    "per channel": lambda group: (group, quant.quantization_perchannel_hook),
}
OVERLAPS: dict[str, dict[str, Any] | None] = {
    "": None,
    ", overlap": {},
    ", released": {"release_gradients": True},
}


def no_hook(_: dist.ProcessGroup) -> tuple[None, None]:
    """Leave the average to DDP."""
    return None, None


def _user_hook(places: Places, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's own hook around one of ours."""

    def user_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 1 or bucket.is_last():  # DDP's first pass may have a single bucket
            places.at("hook")
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    return user_hook


def _ddp(group: dist.ProcessGroup, net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, **{"process_group": group, "bucket_cap_mb": CAP_MIB, **options})


def with_hook(
    group: dist.ProcessGroup,
    hook: Hook,
    overlap: dict[str, Any] | None = None,
    *,
    places: Places | None = None,
    net: nn.Module | None = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **ddp_options: Any,
) -> Training:
    """Return a training with a hook of DDP.

    Args:
        group: The ranks.
        hook: Makes the hook and its state.
        overlap: Options of ``overlap_optimizer``; ``None`` for a step after the pass.
        places: Where user code may get into trouble; then the hook and the optimizer are a user's own.
        net: The module, if it is not a :class:`Net`.
        make_optimizer: Called with the parameters.
        ddp_options: Of ``DistributedDataParallel``.
    """
    at = places or Places()
    net = net or Net(at).to(rank_device())
    ddp, handle = _ddp(group, net, **ddp_options), None
    state, function = hook(group)
    if places is None:
        optimizer = make_optimizer(net.parameters(), lr=1e-2)
    else:
        optimizer = UserAdamW(net.parameters(), places)
        function = function and _user_hook(places, function)
    if hasattr(state, "bind"):
        state.bind(ddp)
    if overlap is not None:
        options = {"steps_per_parameter": places is not None, **overlap}
        handle = overlap_optimizer(ddp, optimizer, comm_hook=function, comm_state=state, **options)
    elif function is not None:
        ddp.register_comm_hook(state, function)
    return Training(group, at, net, ddp, optimizer=optimizer, handle=handle, state=state)


def _drop_in(group: dist.ProcessGroup, places: Places) -> Training:
    """Return a training with the counterpart of torch's hook that steps."""
    net = Net(places)
    ddp, optimizer = _ddp(group, net), UserAdamW(net.parameters(), places)
    state = OptimizerHookState(optimizer, steps_per_parameter=True)
    ddp.register_comm_hook(group, hook_then_optimizer(_user_hook(places, allreduce_hook), state))
    return Training(group, places, net, ddp, optimizer=optimizer)


def _fsdp(group: dist.ProcessGroup, places: Places, *, ours: str = "") -> Training:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - not in every torch

    from ddp_quant_hooks import fsdp  # noqa: PLC0415

    between_nodes, size = ours == "quantize_all_reduce", group.size()
    mesh, net = mesh_of(group, 2 - size % 2 if between_nodes else size), Net(places)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    if not ours:
        return Training(group, places, net)
    dimension = mesh["node" if between_nodes else "shard"]
    state = QuantizedAllreduceState(dimension, min_bytes=0, error_feedback="both")
    getattr(fsdp, ours)(net, state)
    return Training(group, places, net, state=state)


def _tensors(group: dist.ProcessGroup, places: Places) -> Training:
    net = Net(places)
    state = QuantizedAllreduceState(group, bits=4, min_bytes=0)

    def average() -> None:
        with state.step():
            gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            quant.all_reduce(gradients, dist.ReduceOp.AVG, state, key="gradients")

    return Training(group, places, net, average=average, state=state)


Begin = Callable[[dist.ProcessGroup, Places], Training]


class Kind(NamedTuple):
    """How to start a training, and with how many ranks."""

    begin: Begin
    world_sizes: tuple[int, ...] = (2, 3, 4)
    has_hook: bool = False  # of a user
    steps_parts: bool = False  # buckets are stepped one by one
    torch_keeps_groups: bool = False  # after destroy_process_group, even without a fault and our hooks


def _begin(hook: Hook, overlap: dict[str, Any] | None = None) -> Begin:
    return lambda group, places: with_hook(group, hook, overlap, places=places)


TRAININGS = {
    hook + overlap: Kind(
        _begin(make, options),
        (3, 4) if hook == "hierarchical" else (2, 3, 4),
        has_hook=True,
        steps_parts=options is not None,
    )
    for hook, make in HOOKS.items()
    for overlap, options in OVERLAPS.items()
}
_reduced = functools.partial(_fsdp, ours="quantize_all_reduce")
_scattered = functools.partial(_fsdp, ours="quantize_reduce_scatter")
TRAININGS |= {
    "hook_then_optimizer": Kind(_drop_in, has_hook=True, steps_parts=True),
    "FSDP2 between nodes": Kind(_reduced, (3, 4), torch_keeps_groups=True),
    "FSDP2 across shards": Kind(_scattered, (2, 3), torch_keeps_groups=True),
    "plain tensors, 4 bits, feedback": Kind(_tensors),
    "plain DDP": Kind(_begin(no_hook)),
    "plain FSDP2": Kind(_fsdp, (2, 3), torch_keeps_groups=True),
}
BASELINES = ("plain DDP", "plain FSDP2")
"""Trainings without our packages: faults are injected there for comparison, without any promise."""
