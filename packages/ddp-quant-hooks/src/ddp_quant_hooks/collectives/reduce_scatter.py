"""Sum or average tensors and leave each rank a shard."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives.calls import Future, begin, never_traced, run
from ddp_quant_hooks.collectives.shards import checked_shards, count, flat_state, is_quantized
from ddp_quant_hooks.residuals import Residual
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import ring_bytes
from ddp_quant_hooks.tensor_buckets import label_of
from ddp_quant_hooks.tensor_steps import TensorStep
from ddp_quant_hooks.values import flat_real
from dist_utils import torch_compat
from dist_utils.comm_hooks import checked_operation

__all__ = ["reduce_scatter_tensor"]


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: QuantizedAllreduceState | None = ...,
    async_op: Literal[False] = ...,
    *,
    key: str | None = ...,
) -> None: ...


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: QuantizedAllreduceState | None = ...,
    *,
    async_op: Literal[True],
    key: str | None = ...,
) -> Future: ...


@never_traced
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

    The first half of :func:`all_reduce`; values are rounded once. With error feedback (``"both"``) the
    rounding error of this rank's own values is added to its next call with the same key.

    Args:
        output: The output for this rank's shard: contiguous, ``input.numel() / W`` elements, of its dtype.
        input: The shards of all ranks, one after another; contiguous. It is not changed.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``. A sum is the mean times the number of ranks.
        group: A state, with its group and options; not a hierarchical one. ``None`` stands for WORLD and 8
            bits.
        async_op: Return a future of ``output`` at once.
        key: Names these values, with error feedback.

    Returns:
        ``None``, or with ``async_op`` a future of ``output``, not to be touched before it is complete. A
        block with a NaN or an infinity on any rank is NaN.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument of another type.
        ValueError: The tensors do not fit each other, share memory or are part of a graph; the operation is
            another one; with error feedback there is no key, or it was used before in this step, or for
            values of another length; or this rank is not in the group. Like ``TypeError`` before any
            communication.
        AgreementError: The ranks call with different tensors, keys or options; with ``async_op`` the future
            raises it.
        RuntimeError: A peer failed, and the state must be closed on every rank; or the call is made in a
            callback of another call's future.

    Cost:
        (W - 1) / W bytes a value of ``input`` with 8 bits, and 3 % for scales. With error feedback one small
        all-reduce more: whether all shards are finite. ``input`` below ``min_bytes``,
        or of fp64, is reduced without compression.

    Source:
        ``torch.distributed.reduce_scatter_tensor``.

    Example:
        >>> reduce_scatter_tensor(shard, gradients, dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    name = "reduce_scatter_tensor"
    state, mean = flat_state(name, group), checked_operation(name, op)
    world_size = state.process_group.size()
    target, source = checked_shards(name, world_size, shard=("output", output), whole=("input", input))
    step = begin(name, state, [source], key)
    if world_size == 1:
        target.copy_(source.view(target.shape))
    what = {"op": "AVG" if mean else "SUM", "key": key}

    def start() -> list[Future]:
        return [_start(state, step, target, source, mean=mean, key=key)]

    return run(name, state, step, [source], what, start, output if async_op else None)


def _start(
    state: QuantizedAllreduceState,
    step: TensorStep,
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    mean: bool,
    key: str | None,
) -> Future:
    number, quantized = step.add_tensors(), is_quantized(state, source)
    residual = Residual()
    if quantized and state.error_feedback == "both":
        kept = state.feedback.residuals.of_bucket(
            state.stand_ins.of(key, [source]),
            number,
            own=flat_real(source).numel(),
            shard=None,
            device=source.device,
        )
        step.kept.append(kept)
        residual = kept.own
    with_feedback = state.error_feedback != "none"

    def job(group: dist.ProcessGroup) -> torch.Tensor:
        values, shard = flat_real(source), flat_real(target)
        flags: list[torch.Tensor] = []
        noted = flags.append if with_feedback else None
        if quantized:
            sent = state.route.reduce_scatter(group, values, shard, residual, noted, label_of(key))
            if not mean:
                shard *= group.size()
        else:
            sent = _plain_reduce_scatter(group, values, shard, mean=mean)
        if with_feedback:
            if not (mean and quantized):  # that mean is checked already
                flags.append(~shard.isfinite().all())
            step.outcome.not_finite(_on_any_rank(group, flags))
        count(state, source, sent, quantized=quantized)
        return target

    return state.worker.submit(
        job, device=source.device, name="ddp_quant_hooks.reduce_scatter_tensor:exchange"
    )


def _plain_reduce_scatter(
    group: dist.ProcessGroup, values: torch.Tensor, shard: torch.Tensor, *, mean: bool
) -> int:
    """Reduce without compression, and return how many bytes were sent."""
    shares = values / group.size() if mean else values
    torch_compat.reduce_scatter_single(shard, shares, group=group)
    torch.autograd.graph.increment_version(shard)  # the backend does not tell autograd
    return ring_bytes(values.nbytes, group.size()) // 2


def _on_any_rank(group: dist.ProcessGroup, flags: list[torch.Tensor]) -> torch.Tensor:
    """Return whether any rank's shard is not finite: all ranks must agree on whether a step counts."""
    flag = torch.stack(flags).any().to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return flag.bool()
