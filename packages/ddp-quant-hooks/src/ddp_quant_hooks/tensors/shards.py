"""Sum or average tensors and leave each rank a shard."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange.values import flat_real
from ddp_quant_hooks.few_bits import FewBits
from ddp_quant_hooks.states import AveragingState
from ddp_quant_hooks.tensors.calls import Call, Future, begin_call, check_state, outside_graphs
from dist_utils import torch_compat
from dist_utils.comm_hooks import checked_tensors
from dist_utils.process_groups import record_use


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = ...,
    async_op: Literal[False] = ...,
    *,
    key: str | None = ...,
) -> None: ...


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = ...,
    *,
    async_op: Literal[True],
    key: str | None = ...,
) -> Future: ...


@outside_graphs
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - as in torch.distributed
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = None,
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
        group: A state, with its group and options; ``None``: as for :func:`all_reduce`.
        async_op: Return a future of ``output`` at once.
        key: Names these values, with error feedback.

    Returns:
        ``None``, or with ``async_op`` a future of ``output``, not to be touched before it is complete. A
        block with a NaN or an infinity on any rank is NaN.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument of another type.
        ValueError: The tensors do not fit each other, share memory or are part of a graph; the operation is
            another one; with error feedback there is no key, or it was used before in this step, or for
            values of another length; the state has ``exact_1d`` or several ``levels``; or this rank is not in
            the group. Like ``TypeError`` before any communication.
        AgreementError: The ranks call with different tensors, keys or options; with ``async_op`` the future
            raises a RuntimeError with its text.
        RuntimeError: A peer failed, and the state must be closed on every rank; or the call is made in a
            callback of another call's future.

    Cost:
        (W - 1) / W bytes a value of ``input`` with 8 bits, and 3 % for scales; 2 (W - 1) / W with 16. With
        error feedback one small all-reduce more: whether all shards are finite. ``input`` below
        ``min_bytes``, or of fp64, is reduced without compression.

    Source:
        ``torch.distributed.reduce_scatter_tensor``.

    Example:
        >>> reduce_scatter_tensor(shard, gradients, dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    name = "reduce_scatter_tensor"
    state = check_state(name, group)
    state.average.refuse_shards(name)
    world_size = state.process_group.size()
    target, source = _check_shards(name, world_size, output, input)
    call = begin_call(name, state, [source], op, key)
    return run_reduce_scatter(call, target, output if async_op else None)


def run_reduce_scatter(call: Call, target: torch.Tensor, result: torch.Tensor | None = None) -> Future | None:
    """Average or sum a call's only tensor, of which ``target`` gets this rank's shard.

    See :meth:`Call.run`.
    """
    if call.state.process_group.size() == 1:
        target.copy_(call.tensors[0].view(target.shape))
    return call.run(partial(_submit, target), result)


def _check_shards(
    name: str, world_size: int, output: torch.Tensor, whole: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors of a call, detached, if they fit each other and can be written in place."""
    for argument, tensor in (("output", output), ("input", whole)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
    target, source = checked_tensors(name, [output, whole])
    for argument, tensor in (("output", target), ("input", source)):
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: {argument} must be contiguous")
    ends = [one.data_ptr() + one.nbytes for one in (target, source)]
    if target.numel() and max(target.data_ptr(), source.data_ptr()) < min(ends):
        raise ValueError(f"{name}: output and input share memory: give an output of its own")
    if (target.dtype, target.device) != (source.dtype, source.device):
        raise ValueError(
            f"{name}: output is of {target.dtype} on {target.device}, but input of {source.dtype} on "
            f"{source.device}"
        )
    if source.numel() != world_size * target.numel():
        raise ValueError(
            f"{name}: input has {source.numel()} elements, which are not {world_size} (the number of ranks) "
            f"times the {target.numel()} of output"
        )
    return target, source


def _submit(target: torch.Tensor, call: Call) -> list[Future]:
    state, mean, outcome, with_feedback = call.state, call.mean, call.step.outcome, call.state.feedback.wanted
    (source,), (owner,) = call.tensors, call.owners
    average, group = state.average, state.process_group
    assert isinstance(average, FewBits), "refuse_shards() raises for others"
    world_size, task, flags = group.size(), None, list[torch.Tensor]()
    if average.quantizes([owner], [source], world_size):
        task = average.prepare_shards(
            group,
            call.step,
            owner,
            source,
            not_finite=flags.append if with_feedback else None,
            label=call.label,
        )

    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        for tensor in (source, target):
            record_use(tensor)  # the caller may drop it before this stream is done with it
        values, shard = flat_real(source), flat_real(target)
        if task is not None:
            average.run_shards(private_group, values, shard, task)
            if not mean:
                shard *= world_size
        else:
            shares = values / world_size if mean else values
            torch_compat.reduce_scatter_single(shard, shares, group=private_group)
            torch.autograd.graph.increment_version(shard)  # the backend does not tell autograd
            average.count_plain(private_group, source.nbytes // 2)
        if with_feedback:
            if not (mean and task is not None):  # that mean is checked already
                flags.append(~shard.isfinite().all())
            flag = torch.stack(flags).any().to(torch.int32)
            # Ranks must agree on whether a step counts.
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=private_group)
            outcome.not_finite(flag.bool())
        return target

    name = "ddp_quant_hooks.reduce_scatter_tensor:exchange"
    return [state.worker.submit(job, device=source.device, name=name)]
