"""Average tensors of which each rank keeps a shard, and gather shards on all ranks."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives.calls import Future, begin, checked_state, run
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.residuals import Residual
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import ring_bytes
from ddp_quant_hooks.tensor_buckets import label_of
from ddp_quant_hooks.tensor_steps import TensorStep
from dist_utils import torch_compat
from dist_utils.comm_hooks import checked_operation, checked_tensors
from dist_utils.finite_means import hold_shares

__all__ = ["all_gather_into_tensor", "reduce_scatter_tensor"]


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ...,
    group: QuantizedAllreduceState | None = ...,
    async_op: Literal[False] = ...,
    *,
    key: str | None = ...,
) -> None: ...


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ...,
    group: QuantizedAllreduceState | None = ...,
    *,
    async_op: Literal[True],
    key: str | None = ...,
) -> Future: ...


@torch_compat.never_traced
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - as in torch.distributed
    op: Any = dist.ReduceOp.SUM,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
    *,
    key: str | None = None,
) -> Future | None:
    """Sum or average a tensor over all ranks, and leave each rank its shard, with few bits on the wire.

    The first half of :func:`all_reduce`; values are rounded once. With error feedback (``"both"``) what this
    rank's own values lose is added to its next call with the same key.

    Args:
        output: Where this rank's shard goes: contiguous, ``input.numel() / W`` elements, of its dtype.
        input: The shards of all ranks, one behind another; contiguous. It stays as it is.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`, but no hierarchical state.
        async_op: As for :func:`all_reduce`. The future's value is ``output``.
        key: As for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError, AgreementError, RuntimeError: As :func:`all_reduce`; or the tensors do not
            fit each other.

    Cost:
        (W - 1) / W bytes a value of ``input`` with 8 bits, and 3 % for scales. With error feedback one small
        all-reduce more: whether all shards are finite. ``input`` below ``min_bytes``,
        or of fp64, is reduced without compression.

    Counterpart of ``torch.distributed.reduce_scatter_tensor``.

    Example:
        >>> reduce_scatter_tensor(shard, gradients, dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    name = "reduce_scatter_tensor"
    state, mean = _flat_state(name, group), checked_operation(name, op)
    target, source = _checked_pair(name, state, output=output, input=input)
    step = begin(name, state, [source], key)
    if state.process_group.size() == 1:
        target.copy_(source.view(target.shape))

    def start() -> list[Future]:
        number = step.add_tensors()
        kept = Residual()
        values = _real(source)
        quantized = values.dtype in VALUE_DTYPES and values.nbytes >= state.min_bytes
        if quantized and state.error_feedback == "both":
            residuals = state.feedback.residuals.of_bucket(
                state.stand_ins.of(key, [source]),
                number,
                own=values.numel(),
                shard=None,
                device=values.device,
            )
            step.kept.append(residuals)
            kept = residuals.own
        failed = None if state.error_feedback == "none" else step.outcome.not_finite

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            shard = _real(target)
            flags: list[torch.Tensor] = []
            noted = None if failed is None else flags.append
            if quantized:
                sent = state.route.reduce_scatter(group, values, shard, kept, noted, label_of(key))
                if not mean:
                    shard *= group.size()
            else:
                sent = _plain_reduce_scatter(group, values, shard, mean=mean)
                if failed is not None:
                    flags.append(~shard.isfinite().all())
            if failed is not None:
                failed(_on_any_rank(group, flags))
            _count(state, source, sent, quantized=quantized)
            return target

        return [state.worker.submit(job, device=source.device, name=f"ddp_quant_hooks.{name}:exchange")]

    what = {"op": "AVG" if mean else "SUM", "key": key}
    return run(name, state, step, [source], what, start, output if async_op else None)


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = ...,
    async_op: Literal[False] = ...,
) -> None: ...


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = ...,
    *,
    async_op: Literal[True],
) -> Future: ...


@torch_compat.never_traced
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
) -> Future | None:
    """Gather every rank's tensor on all ranks, in the state's format for averages (``gather``).

    The second half of :func:`all_reduce`. Every rank gets every tensor as it travelled, its own too, so that
    all have the same bits. No error feedback: nothing is kept of what is lost.

    Args:
        output_tensor: Where all tensors go, one behind another: contiguous, ``W * input_tensor.numel()``
            elements, of its dtype.
        input_tensor: This rank's values; contiguous.
        group: As for :func:`reduce_scatter_tensor`.
        async_op: As for :func:`all_reduce`. The future's value is ``output_tensor``.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError, AgreementError, RuntimeError: As :func:`reduce_scatter_tensor`.

    Cost:
        W - 1 bytes a value of ``input_tensor`` with 8 bits, and 3 % for scales. An output below
        ``min_bytes``, or of fp64, is gathered without compression.

    Counterpart of ``torch.distributed.all_gather_into_tensor``.

    Example:
        >>> all_gather_into_tensor(everyone, mine, state)  # doctest: +SKIP
    """
    name = "all_gather_into_tensor"
    state = _flat_state(name, group)
    source, target = _checked_pair(name, state, input_tensor=input_tensor, output_tensor=output_tensor)
    if state.process_group.size() == 1:
        target.copy_(source.view(target.shape))

    def start() -> list[Future]:
        mine, everyone = _real(source), _real(target)
        quantized = mine.dtype in VALUE_DTYPES and everyone.nbytes >= state.min_bytes

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            if quantized:
                sent = state.route.all_gather(group, mine, everyone)
            else:
                torch_compat.all_gather_single(everyone, mine, group)
                torch.autograd.graph.increment_version(everyone)  # the backend does not tell autograd
                sent = (group.size() - 1) * mine.nbytes
            _count(state, target, sent, quantized=quantized)
            return target

        return [state.worker.submit(job, device=source.device, name=f"ddp_quant_hooks.{name}:exchange")]

    return run(name, state, TensorStep(), [source], {}, start, output_tensor if async_op else None)


def _flat_state(name: str, group: QuantizedAllreduceState | None) -> QuantizedAllreduceState:
    state = checked_state(name, group)
    if isinstance(state, HierarchicalAllreduceState):
        raise TypeError(f"{name} knows no hierarchy: give a QuantizedAllreduceState")
    return state


def _checked_pair(
    name: str, state: QuantizedAllreduceState, **named: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a shard and what holds the shards of all ranks, in this order."""
    for argument, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: {argument} must be contiguous")
    shard, whole = checked_tensors(name, list(named.values()))
    (first, second), world_size = named, state.process_group.size()
    if (shard.dtype, shard.device) != (whole.dtype, whole.device):
        raise ValueError(
            f"{name}: {first} is of {shard.dtype} on {shard.device}, but {second} of {whole.dtype} on "
            f"{whole.device}"
        )
    if whole.numel() != world_size * shard.numel():
        raise ValueError(
            f"{name}: {second} has {whole.numel()} elements, which are not {world_size} (the number of "
            f"ranks) times the {shard.numel()} of {first}"
        )
    return shard, whole


def _plain_reduce_scatter(
    group: dist.ProcessGroup, values: torch.Tensor, shard: torch.Tensor, *, mean: bool
) -> int:
    """Reduce without compression, and return how many bytes were sent."""
    shares = values
    if mean:
        shares = values / group.size()
        hold_shares(shares, group.size())
    torch_compat.reduce_scatter_single(shard, shares, group=group)
    torch.autograd.graph.increment_version(shard)  # the backend does not tell autograd
    return ring_bytes(values.nbytes, group.size()) // 2


def _on_any_rank(group: dist.ProcessGroup, flags: list[torch.Tensor]) -> torch.Tensor:
    """Return whether any rank's shard is not finite: all ranks must decide alike whether a step counts."""
    flag = torch.stack(flags).any().to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag.bool()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def _count(state: QuantizedAllreduceState, whole: torch.Tensor, sent: int, *, quantized: bool) -> None:
    state.counter.add(whole.nbytes // 2, state.process_group.size(), sent, quantized=quantized)
