"""Sum or average plain tensors in the same way as the hooks average buckets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ddp_compress_hooks import ring, two_shot
from ddp_compress_hooks.packs import Pack, packs
from ddp_compress_hooks.state import CompressState, HookState, as_state
from dist_utils import torch_compat
from dist_utils.comm_hooks import (
    checked_operation,
    checked_tensors,
    completed_future,
    failed_future,
    require_same_call,
    same_kind,
)
from dist_utils.process_groups import future_of_work

__all__ = ["all_reduce"]

_NAME = "ddp_compress_hooks.all_reduce"
Tensors = torch.Tensor | Sequence[torch.Tensor]
_Future = torch.futures.Future[torch.Tensor]

_completing: set[tuple[int, int]] = set()
"""Threads of a backend or of a state that have completed a call, see :func:`_this_thread`. Two such threads
run callbacks in an order that may differ between ranks."""


@overload
def all_reduce(
    tensor: Tensors,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: HookState = ...,
    async_op: Literal[False] = ...,
) -> None: ...


@overload
def all_reduce(
    tensor: Tensors,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: HookState = ...,
    *,
    async_op: Literal[True],
) -> torch.futures.Future[Any]: ...


def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: HookState = None,
    async_op: bool = False,
) -> torch.futures.Future[Any] | None:
    """Sum or average tensors over all ranks, in place, in the wire dtype of a state.

    Args:
        tensor: A tensor, or a sequence of tensors: fp16, bf16, fp32, fp64 or complex; dense. Small ones
            are sent together.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
        group: The first argument of a hook: a process group, a ``DeviceMesh``, ``None`` for WORLD, or a
            :class:`CompressState`. Reuse one state for many calls: with ``accumulate="fp32"`` it has a thread
            and a private group.
        async_op: Return a future at once.

    Returns:
        ``None``, or with ``async_op`` a future of ``tensor``, not to be touched before it is complete.
        A mean is finite where all ranks' values are. All ranks get the same bits.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument has the wrong type.
        ValueError: The operation is neither of the two, tensors share memory or are part of a graph, or this
            rank is not in the group. Raised, like ``TypeError``, before any communication.
        AgreementError: The ranks' tensors or options differ; with ``async_op`` the future raises it.
        RuntimeError: A peer failed, or this is called in a callback of another call's future.

    Cost:
        Each rank sends ``2 (W - 1) / W`` times the elements, in the wire dtype's size. Small tensors are
        copied: up to 25 MiB at a time, or all of them with ``async_op``.

    Source:
        ``torch.distributed.all_reduce``.

    Example:
        >>> state = CompressState(wire_dtype=torch.bfloat16, accumulate="fp32")  # doctest: +SKIP
        >>> all_reduce([p.grad for p in model.parameters()], dist.ReduceOp.AVG, state)  # doctest: +SKIP
    """
    state = as_state(group)
    mean, tensors = checked_operation(_NAME, op), checked_tensors(_NAME, tensor)
    filled = [one for one in tensors if one.numel()]
    like = filled[0] if filled else torch.empty(0)
    # Tensors made here are written elsewhere, so they must not be inference tensors.
    with torch_compat.profiler_range(_NAME), torch.inference_mode(False):
        if state.process_group.size() == 1:
            return _result(completed_future(like), tensor) if async_op else None
        if _this_thread() in _completing:
            raise RuntimeError(
                f"{_NAME} in a callback of another call's future, where the order of calls may differ "
                "between ranks: wait for that future, then call"
            )
        try:
            _agree(state, filled, mean=mean)
        except RuntimeError as error:
            if not async_op:
                raise
            return failed_future(error, like)
        arrivals = []
        for places in same_kind(tensors):
            for pack in packs(tensors[place] for place in places):
                arrivals.append(_start(state, pack, mean=mean))
                if not async_op:
                    arrivals.pop().wait()
    return _result(ring.when_all_have(arrivals or [completed_future(like)]), tensor) if async_op else None


def _agree(state: CompressState, tensors: Sequence[torch.Tensor], *, mean: bool) -> None:
    """Compare the call with those of the other ranks."""
    wire = {state.wire_dtype or _real(tensor.dtype) for tensor in tensors}
    worker = state.worker.agree() if any(map(state.sums_in_fp32, wire)) else None
    what = [(tensor.numel(), tensor.dtype, tensor.device.type) for tensor in tensors]
    terms = {**state.terms(), "op": "AVG" if mean else "SUM", "tensors": what, "state": worker}
    require_same_call(state.process_group, _NAME, terms)


def _start(state: CompressState, pack: Pack, *, mean: bool) -> _Future:
    group, world_size = state.process_group, state.process_group.size()
    buffer = pack.together()
    values = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).view(-1)
    wire_dtype = state.wire_dtype or values.dtype

    def finish(_: object = None, *, factor: int = 1 if mean else world_size) -> torch.Tensor:
        if factor > 1:
            values.mul_(factor)
        pack.put_back(buffer)
        return buffer

    if state.sums_in_fp32(wire_dtype):

        def job(private_group: dist.ProcessGroup) -> torch.Tensor:
            two_shot.average(state, private_group, values, wire_dtype)
            return finish()

        return state.worker.submit(job, device=buffer.device, name=f"{_NAME}:exchange")
    if mean or wire_dtype != values.dtype:
        return ring.average(state, group, buffer, values, wire_dtype).then(lambda done: finish(done.value()))
    work: Any = dist.all_reduce(values, group=group, async_op=True)
    arrival: torch.futures.Future[Any] = future_of_work(work, group, values.device)
    torch.autograd.graph.increment_version(values)  # the backend does not tell autograd
    return arrival.then(lambda done: finish(done.value(), factor=1))


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _result(done: _Future, tensor: Tensors) -> torch.futures.Future[Any]:
    caller = _this_thread()

    def value(future: _Future) -> Any:
        if (here := _this_thread()) != caller:
            _completing.add(here)  # before the caller's own callbacks run here
        future.value()  # raises the call's error
        return tensor

    return done.then(value)


def _this_thread() -> tuple[int, int]:
    """Return both numbers of this thread: each alone may soon be reused after the thread has ended."""
    return threading.get_ident(), threading.get_native_id()
