"""The sides of the comparison, made by name: how gradients are averaged and parameters are stepped.

A name is that of a hook, followed by ``+overlap`` if the optimizer steps inside ``backward()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tasks import Model, Task
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel
from training import take_step

from ddp_compress_hooks import bf16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import (
    AutoState,
    LowRankState,
    QuantizedAllreduceState,
    auto_hook,
    low_rank_hook,
    quantized_allreduce_hook,
)

PLAIN, COMPUTE, OVERLAP = "plain", "compute", "+overlap"
LABELS = {
    COMPUTE: "no communication",
    PLAIN: "plain DDP",
    "fp16": "PyTorch's `fp16_compress_hook`",
    "powersgd": "PyTorch's `powerSGD_hook`, rank 1, several buckets",
    "powersgd-one": "PowerSGD, rank 1",
    "powersgd4-one": "PowerSGD, rank 4",
    "perchannel": "PyTorch's `quantization_perchannel_hook`",
    "bf16": "ours: 16 bits",
    "8bits": "ours: 8 bits",
    "4bits": "ours: 4 bits",
    "4bits-none": 'ours: 4 bits, `error_feedback="none"`',
    "low-rank": "ours: low rank, rank 8",
    "low-rank4": "ours: low rank, rank 4",
    "low-rank-one": "ours: low rank, rank 8, one bucket",
    "low-rank4-one": "ours: low rank, rank 4, one bucket",
    "low-rank16": "ours: low rank, rank 16",
    "low-rank24": "ours: low rank, rank 24",
    "low-rank-auto": 'ours: low rank, `rank="auto"`',
    "low-rank-auto-one": 'ours: low rank, `rank="auto"`, one bucket',
    "low-rank-rest": "ours: low rank, rank 4, and 1 bit of the rest",
    "auto": "ours: auto",
}
SHORT_LABELS = {
    PLAIN: "plain DDP",
    "fp16": "PyTorch's fp16 hook",
    "powersgd-one": "PowerSGD, rank 1",
    "8bits": "8 bits",
    "low-rank-one": "low rank",
}
"""Few enough for a first look, in the README."""
LOW_RANK: dict[str, dict[str, Any]] = {
    "low-rank": {"rank": 8},
    "low-rank4": {"rank": 4},
    "low-rank-one": {"rank": 8},
    "low-rank4-one": {"rank": 4},
    "low-rank16": {"rank": 16},
    "low-rank24": {"rank": 24},
    "low-rank-auto": {"rank": "auto"},
    "low-rank-auto-one": {"rank": "auto"},
    "low-rank-rest": {"rank": 4, "residual_bits": 1},
}
"""The options of each side of low rank."""
OURS = ("bf16", "8bits", "4bits", "4bits-none", *LOW_RANK, "auto")
ALL = [name for name in LABELS if name != COMPUTE]
ALL += [name + OVERLAP for name in OURS if name not in LOW_RANK or name == "low-rank"]
LOW_RANK_WARM_UP = 10
"""The first steps of low rank, in 4 bits, by default."""
FRAGILE = ("powersgd", "perchannel")
"""Hooks that hang or abort on Gloo in some versions of torch, so each gets ranks of its own.

powerSGD mixes up the collectives of several buckets; with one bucket it works.
"""


def label(name: str) -> str:
    """Return a side's name in the tables."""
    base, plus, _ = name.partition("+")
    return LABELS[base] + (" + overlap" if plus else "")


def make_hook(name: str, full_steps: int) -> tuple[Any, Callable[..., Any]] | None:
    """Return a state and a hook, or ``None`` for plain DDP; ``full_steps`` is of factors' first steps."""
    if name == PLAIN:
        return None
    if name == "fp16":
        return None, default_hooks.fp16_compress_hook
    if name.startswith("powersgd"):
        rank = 4 if name.startswith("powersgd4") else 1
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=full_steps
        )
        return state, powerSGD_hook.powerSGD_hook
    if name in LOW_RANK:
        warm_up_steps = min(full_steps, LOW_RANK_WARM_UP)
        return LowRankState(warm_up_steps=warm_up_steps, **LOW_RANK[name]), low_rank_hook
    if name == "perchannel":
        return torch.distributed.group.WORLD, quantization_hooks.quantization_perchannel_hook
    if name == "bf16":
        return None, bf16_compress_hook
    if name == "auto":
        return AutoState(), auto_hook
    options: dict[str, Any] = {
        "8bits": {"bits": 8},
        "4bits": {"bits": 4},
        "4bits-none": {"bits": 4, "error_feedback": "none"},
    }
    return QuantizedAllreduceState(**options[name]), quantized_allreduce_hook


@dataclass
class Side:
    """A model that is trained in one way."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: Any = None

    def step(self, task: Task, chosen: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        """Train with these examples, without the other ranks if ``alone``, and return the loss."""
        with self.ddp.no_sync() if alone else contextlib.nullcontext():
            return take_step(task, self.ddp, self.optimizer, chosen)

    def bucket_bytes(self) -> list[int]:
        """Return the sizes of DDP's buckets in fp32, in the order in which they are ready."""
        logged = self.ddp._get_ddp_logging_data()  # noqa: SLF001 - without a hook no public name shows it
        return [int(size) for size in logged["rebuilt_bucket_sizes"].split(",")]

    @property
    def choosing(self) -> bool:
        """Whether the side is still trying its candidates."""
        return getattr(self.state, "choice", self) is None

    def close(self) -> None:
        """End the threads of the side's state."""
        if hasattr(self.state, "close"):
            self.state.close()


def make_side(name: str, model: Model, task: Task, *, seed: int = 0, full_steps: int = 2) -> Side:
    """Make a model with its hook and optimizer.

    Args:
        name: Of the side.
        model: What is trained.
        task: On what.
        seed: Of the parameters.
        full_steps: The first steps of PowerSGD, with full gradients, and of low rank, in 4 bits. With two,
            the first uses DDP's first buckets, and the hook is warm from the third on: enough to measure
            times, but PyTorch advises at least a tenth of a training's steps, and not less than those in
            which the learning rate rises.
    """
    torch.manual_seed(seed)
    bucket_mb = 1e4 if name.endswith("-one") else model.bucket_mb
    ddp = DistributedDataParallel(task.model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=model.views)
    optimizer = task.optimizer(ddp.parameters())
    base, plus, _ = name.partition("+")
    made = make_hook(base, full_steps)
    state, hook = made or (None, None)
    if plus:
        overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)
    elif hook is not None:
        ddp.register_comm_hook(state, hook)
    return Side(ddp, optimizer, state)
