"""Collectives of plain tensors, which are no buckets, with 8 or 4 bits a value on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
import torch.distributed as dist
from torch.profiler import record_function

import ddp_compress_hooks
from ddp_quant_hooks.averaging import average
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.residuals import Residual
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import ring_bytes
from ddp_quant_hooks.tensor_buckets import TensorBucket, label_of
from ddp_quant_hooks.tensor_steps import TensorStep
from dist_utils import torch_compat
from dist_utils.comm_hooks import (
    checked_operation,
    checked_tensors,
    completed_future,
    failed_future,
    same_kind,
)
from dist_utils.finite_means import hold_shares

__all__ = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
_Future: TypeAlias = torch.futures.Future[Any]

_default_state = QuantizedAllreduceState()
"""Of calls that name no state: WORLD, 8 bits, no error feedback."""


@overload
def all_reduce(
    tensor: Tensors,
    op: Any = ...,
    group: QuantizedAllreduceState | None = ...,
    async_op: Literal[False] = ...,
    *,
    key: str | None = ...,
) -> None: ...


@overload
def all_reduce(
    tensor: Tensors,
    op: Any = ...,
    group: QuantizedAllreduceState | None = ...,
    *,
    async_op: Literal[True],
    key: str | None = ...,
) -> _Future: ...


def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
    *,
    key: str | None = None,
) -> _Future | None:
    """Sum or average tensors over all ranks, in place, with 8 or 4 bits a value on the wire.

    A sequence of tensors travels as if they were one, cut into chunks; no chunk but those on the wire is
    copied. What :func:`quantized_allreduce_hook` does with a bucket is done with the tensors of each dtype:
    those of fp64, and those of fewer than ``min_bytes`` in all, are reduced without compression.

    With error feedback each call needs a ``key``, the same in every step, by which it finds what was lost
    before. See :meth:`QuantizedAllreduceState.step` for what a step is.

    Args:
        tensor: A tensor, or a sequence of tensors: fp32, bf16, fp16, complex64 (quantized), fp64,
            complex128; dense.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``. A sum is the mean times the number of ranks, and
            overflows where that does.
        group: A state: its group and its options. ``None``: WORLD, 8 bits. Keep one state for many calls.
        async_op: Return a future at once. Calls are worked on in their order, beside the caller.
        key: Whose values these are: with error feedback.

    Returns:
        ``None``, or with ``async_op`` a future of ``tensor``, which must not be touched before it is complete.
        The same bits on all ranks. A block with a NaN or an infinity on any rank is NaN.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument of another type.
        ValueError: Another operation; tensors that share memory, or are part of a graph; no key although there
            is error feedback, or one that was used in this step; this rank is not in the group. All of
            them before any communication.
        AgreementError: The ranks call with other tensors, keys or options; from the future with ``async_op``.
        RuntimeError: A peer failed; the state must be closed then, on every rank.

    Cost:
        As :func:`quantized_allreduce_hook`. Tensors that are not contiguous are copied.

    Counterpart of ``torch.distributed.all_reduce``.

    Example:
        >>> state = QuantizedAllreduceState()  # doctest: +SKIP
        >>> all_reduce([p.grad for p in model.parameters()], dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    name = "all_reduce"
    state, mean = _checked_state(name, group), checked_operation(name, op)
    tensors = checked_tensors(name, tensor)
    step = _begin(name, state, tensors, key)

    def start() -> list[_Future]:
        stand_ins = state.stand_ins.of(key, tensors)
        started = []
        for places in same_kind(tensors):
            bucket = TensorBucket(
                [_dense(tensors[place]) for place in places],
                [stand_ins[place] for place in places],
                step.add_tensors(),
                label_of(key),
            )
            originals = [tensors[place] for place in places]
            started.append(_start_all_reduce(state, step, bucket, originals, mean=mean))
        return started

    what = {"op": "AVG" if mean else "SUM", "key": key}
    return _call(name, state, tensors, what, start, tensor if async_op else None)


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
) -> _Future: ...


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - as in torch.distributed
    op: Any = dist.ReduceOp.SUM,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
    *,
    key: str | None = None,
) -> _Future | None:
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
        (W - 1) / W bytes a value of ``input`` with 8 bits, and 3 % for scales. ``input`` below ``min_bytes``,
        or of fp64, is reduced without compression.

    Counterpart of ``torch.distributed.reduce_scatter_tensor``.

    Example:
        >>> reduce_scatter_tensor(shard, gradients, dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    name = "reduce_scatter_tensor"
    state, mean = _checked_state(name, group, flat=True), checked_operation(name, op)
    target, source = _checked_pair(name, state, output=output, input=input)
    step = _begin(name, state, [source], key)
    if state.process_group.size() == 1:
        target.copy_(source.view(target.shape))

    def start() -> list[_Future]:
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
        failed = None if state.error_feedback == "none" else step.failed

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            with step.watching():
                shard = _real(target)
                if quantized:
                    sent = state.route.reduce_scatter(group, values, shard, kept, failed, label_of(key))
                    if not mean:
                        shard *= group.size()
                else:
                    sent = _plain_reduce_scatter(group, values, shard, mean=mean)
                    if failed is not None:
                        failed(~shard.isfinite().all())
                _count(state, source, sent, quantized=quantized)
            return target

        return [state.worker.submit(job, device=source.device)]

    what = {"op": "AVG" if mean else "SUM", "key": key}
    return _call(name, state, [source], what, start, output if async_op else None)


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
) -> _Future: ...


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
) -> _Future | None:
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
        W - 1 bytes a value of ``input_tensor`` with 8 bits, and 3 % for scales. An output below ``min_bytes``,
        or of fp64, is gathered without compression.

    Counterpart of ``torch.distributed.all_gather_into_tensor``.

    Example:
        >>> all_gather_into_tensor(everyone, mine, state)  # doctest: +SKIP
    """
    name = "all_gather_into_tensor"
    state = _checked_state(name, group, flat=True)
    source, target = _checked_pair(name, state, input_tensor=input_tensor, output_tensor=output_tensor)
    if state.process_group.size() == 1:
        target.copy_(source.view(target.shape))

    def start() -> list[_Future]:
        mine, everyone = _real(source), _real(target)
        quantized = mine.dtype in VALUE_DTYPES and everyone.nbytes >= state.min_bytes

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            if quantized:
                sent = state.route.all_gather(group, mine, everyone)
            else:
                torch_compat.all_gather_single(everyone, mine, group)
                sent = (group.size() - 1) * mine.nbytes
            _count(state, target, sent, quantized=quantized)
            return target

        return [state.worker.submit(job, device=source.device)]

    return _call(name, state, [source], {}, start, output_tensor if async_op else None)


def _call(
    name: str,
    state: QuantizedAllreduceState,
    tensors: Sequence[torch.Tensor],
    terms: Mapping[str, object],
    start: Callable[[], list[_Future]],
    result: Tensors | None,
) -> _Future | None:
    """Agree on a call, start it, and wait for it unless there is a ``result`` for a future."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    like = filled[0] if filled else torch.empty(0)
    started: list[_Future] = []
    with record_function(f"ddp_quant_hooks.{name}"):
        if filled and state.process_group.size() > 1:
            try:
                state.agree_on_call(name, terms, filled)
            except RuntimeError as error:
                if result is None:
                    raise
                return failed_future(error, like)
            started = start()
        if result is None:
            for future in started:
                future.wait()
            return None
    return _when_all_have(started, like, result)


def _begin(
    name: str, state: QuantizedAllreduceState, tensors: Sequence[torch.Tensor], key: str | None
) -> TensorStep:
    """Return the step that a call belongs to."""
    if key is not None and not isinstance(key, str):
        raise TypeError(f"{name}: key must be a string, got {type(key).__name__}")
    if key is None and state.error_feedback != "none":
        raise ValueError(
            f"{name}: with error feedback a key must say whose values these are, by which what they lose is "
            "found again in the next step"
        )
    for tensor in tensors:
        state.refuse_capture(tensor)
    step = state.feedback.begin_tensors(state.wait_for_jobs)
    if key is not None and state.error_feedback != "none":
        step.use(key)
    return step


def _start_all_reduce(
    state: QuantizedAllreduceState,
    step: TensorStep,
    bucket: TensorBucket,
    originals: Sequence[torch.Tensor],
    *,
    mean: bool,
) -> _Future:
    group, tensors = state.process_group, bucket.tensors
    world_size, nbytes = group.size(), sum(tensor.nbytes for tensor in tensors)
    decision = state.decisions.decide(group, step, bucket)
    with_feedback = state.error_feedback != "none"
    if not decision.quantized:
        state.counter.add(nbytes, world_size, ring_bytes(nbytes, world_size), quantized=False)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        reduced = ddp_compress_hooks.all_reduce(tensors, op, group, async_op=True)

        def finish(done: _Future) -> torch.Tensor:
            with step.watching():
                done.value()  # raises what went wrong
            if with_feedback:
                for tensor in tensors:
                    step.failed(~tensor.isfinite().all())
            _put_back(tensors, originals)
            return tensors[0]

        return reduced.then(finish)

    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        with step.watching():
            failed = step.failed if with_feedback else None
            sent, error = average(private_group, decision, state.route, failed)
            if not mean:
                assert decision.values is not None
                decision.values.multiply(world_size)
            _put_back(tensors, originals)
            state.counter.add(nbytes, world_size, sent, quantized=True, error=error)
        return tensors[0]

    return state.worker.submit(job, device=tensors[0].device)


def _plain_reduce_scatter(
    group: dist.ProcessGroup, values: torch.Tensor, shard: torch.Tensor, *, mean: bool
) -> int:
    """Reduce without compression, and return how many bytes were sent."""
    shares = values
    if mean:
        shares = values / group.size()
        hold_shares(shares, group.size())
    torch_compat.reduce_scatter_single(shard, shares, group=group)
    return ring_bytes(values.nbytes, group.size()) // 2


def _checked_state(
    name: str, group: QuantizedAllreduceState | None, *, flat: bool = False
) -> QuantizedAllreduceState:
    state = _default_state if group is None else group
    if not isinstance(state, QuantizedAllreduceState):
        raise TypeError(
            f"{name}: group must be a QuantizedAllreduceState, which is made once for a group and kept, or None "
            f"for WORLD, got {type(state).__name__}"
        )
    if flat and isinstance(state, HierarchicalAllreduceState):
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
            f"{name}: {second} has {whole.numel()} elements, which are not {world_size} (the number of ranks) "
            f"times the {shard.numel()} of {first}"
        )
    return shard, whole


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its values lie in memory as they are, else a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _put_back(dense: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
    for changed, tensor in zip(dense, originals, strict=True):
        if changed is not tensor:
            tensor.copy_(changed)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def _count(state: QuantizedAllreduceState, whole: torch.Tensor, sent: int, *, quantized: bool) -> None:
    state.counter.add(whole.nbytes // 2, state.process_group.size(), sent, quantized=quantized)


def _when_all_have(started: list[_Future], like: torch.Tensor, result: Tensors) -> _Future:
    if not started:
        return completed_future(like).then(lambda _: result)

    def last(done: torch.futures.Future[list[_Future]]) -> Tensors:
        for future in done.value():
            future.value()  # raises what went wrong
        return result

    return torch.futures.collect_all(started).then(last)
