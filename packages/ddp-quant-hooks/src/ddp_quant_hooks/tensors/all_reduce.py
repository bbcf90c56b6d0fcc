"""Sum or average tensors on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

import ddp_compress_hooks
from ddp_quant_hooks.exchange.values import Values, flat_real
from ddp_quant_hooks.states import AveragingState
from ddp_quant_hooks.tensors.calls import Call, Future, Tensors, begin_call, check_state, outside_graphs
from dist_utils.comm_hooks import checked_tensors, same_kind
from dist_utils.process_groups import record_use


@overload
def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = ...,
    async_op: Literal[False] = ...,
    *,
    key: str | None = ...,
) -> None: ...


@overload
def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = ...,
    *,
    async_op: Literal[True],
    key: str | None = ...,
) -> Future: ...


@outside_graphs
def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: AveragingState | None = None,
    async_op: bool = False,
    *,
    key: str | None = None,
) -> Future | None:
    """Sum or average tensors over all ranks, in place, with 16, 8 or 4 bits a value on the wire.

    A sequence of tensors is sent as if they were one, cut into chunks; only chunks on the wire are copied.
    The tensors of each dtype are treated as :func:`quantized_allreduce_hook` treats a bucket: those of fp64,
    and those of fewer than ``min_bytes`` in all, are reduced without compression.

    With error feedback each call needs a ``key``, the same in every step, by which it finds the residuals of
    the previous step. See :meth:`QuantizedAllreduceState.step` for what a step is.

    Args:
        tensor: A tensor, or a sequence of tensors: fp32, bf16, fp16, complex64 (quantized), fp64,
            complex128; dense.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``. A sum is the mean times the number of ranks, and
            overflows where that does.
        group: A state, with its group and options. Keep one for many calls. ``None``: a state for WORLD and 8
            bits, which all such calls share and nobody can close.
        async_op: Return a future at once. Calls run in their order, on another thread.
        key: Names these values, with error feedback.

    Returns:
        ``None``, or with ``async_op`` a future of ``tensor``, not to be touched before it is complete.
        Identical bits on all ranks. A block with a NaN or an infinity on any rank is NaN.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument of another type.
        ValueError: The operation is another one; tensors share memory or are part of a graph; with error
            feedback there is no key, or it was used before in this step, or for values of another length; or
            this rank is not in the group. Like ``TypeError`` before any communication.
        AgreementError: The ranks call with different tensors, keys or options; with ``async_op`` the future
            raises a RuntimeError with its text.
        RuntimeError: A peer failed; the state must be closed then, on every rank. (Without a state, calls
            raise the first error as long as WORLD exists.) Or the call is made in a callback of another
            call's future.

    Cost:
        The same as :func:`quantized_allreduce_hook`. Tensors that are not contiguous are copied.

    Source:
        ``torch.distributed.all_reduce``.

    Example:
        >>> state = QuantizedAllreduceState()  # doctest: +SKIP
        >>> all_reduce([p.grad for p in model.parameters()], dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    state, tensors = check_state("all_reduce", group), checked_tensors("all_reduce", tensor)
    call = begin_call("all_reduce", state, tensors, op, key)
    return call.run(submit_all_reduce, tensor if async_op else None)


def submit_all_reduce(call: Call) -> list[Future]:
    """Average or sum a call's tensors in place: those of each dtype and device as one bucket."""
    return [_submit(call, indices) for indices in same_kind(call.tensors)]


def _submit(call: Call, indices: Sequence[int]) -> Future:
    originals = [call.tensors[index] for index in indices]
    owners = [call.owners[index] for index in indices]
    state, mean, outcome, with_feedback = call.state, call.mean, call.step.outcome, call.state.feedback.wanted
    average, group, first = state.average, state.process_group, originals[0]
    world_size, nbytes = group.size(), sum(tensor.nbytes for tensor in originals)
    decided, task = average.decide(group, owners, originals), None
    if decided is not None:
        task = average.prepare(call.step, decided, owners, originals, label=call.label)

    # A job even without compression, so that futures complete in the order of the calls, on the state's
    # thread. Copies are made in it: on an accelerator it runs on another stream than the caller's.
    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        dense = [_dense(tensor) for tensor in originals]
        if task is not None:
            average.run(private_group, Values(dense), task)
            if not mean:
                for tensor in dense:  # real numbers: an infinity would make a complex one's other part NaN
                    flat_real(tensor).mul_(world_size)
        else:
            op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
            ddp_compress_hooks.all_reduce(dense, op, _Compared(private_group))
            average.count_plain(private_group, nbytes)
        if with_feedback and not (mean and task is not None):  # that mean is checked already
            for tensor in dense:
                outcome.not_finite(~tensor.isfinite().all())
        for changed, tensor in zip(dense, originals, strict=True):
            if changed is not tensor:
                tensor.copy_(changed)
        return first

    return state.worker.submit(job, device=first.device, name="ddp_quant_hooks.all_reduce:exchange")


class _Compared(ddp_compress_hooks.CompressState):
    """No compression, of tensors that the ranks have compared before the job."""

    def require_same_call(
        self, title: str, terms: Mapping[str, object], tensors: Sequence[torch.Tensor]
    ) -> None:
        pass


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory holds its values as they are, else a copy."""
    record_use(tensor)  # the caller may drop it before this stream is done with it
    return tensor.resolve_conj().resolve_neg().contiguous()
