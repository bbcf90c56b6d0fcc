"""Sum or average plain tensors in the same way as the hooks average buckets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ddp_compress_hooks.averaging import fits_in_fp32, flat_real, largest_share, start_sum
from ddp_compress_hooks.state import CompressState, GroupOrState, as_state
from dist_utils.comm_hooks import (
    checked_operation,
    checked_tensors,
    completed_future,
    failed_future,
    joined_future,
    same_kind,
)
from dist_utils.torch_compat import profiler_range

_NAME = "ddp_compress_hooks.all_reduce"

_PACK_BYTES = 25 << 20
"""The largest pack of small tensors: as large as a bucket of ``DistributedDataParallel``."""

_MEAN_TAG, _SUM_TAG = 1 << 20, 1 << 21
"""Tags of messages: a sum does not meet a mean, nor a bucket."""

Tensors = torch.Tensor | Sequence[torch.Tensor]
_Future = torch.futures.Future[torch.Tensor]

_completing: dict[int, int] = {}
"""Threads of a backend or of a state that have completed a call: native numbers, of which the system has few,
and Python's. Two such threads run callbacks in an order that may differ between ranks. (Threads that C++ has
made lose what ``threading.local`` holds after every callback.)"""


@overload
def all_reduce(
    tensor: Tensors,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: GroupOrState = ...,
    async_op: Literal[False] = ...,
) -> None: ...


@overload
def all_reduce(
    tensor: Tensors,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: GroupOrState = ...,
    *,
    async_op: Literal[True],
) -> torch.futures.Future[Any]: ...


def all_reduce(
    tensor: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: GroupOrState = None,
    async_op: bool = False,
) -> torch.futures.Future[Any] | None:
    """Sum or average tensors over all ranks, in place, in the wire dtype of a state.

    Args:
        tensor: A tensor, or a sequence of tensors: fp16, bf16, fp32, fp64 or complex; dense. Small ones
            are sent together. They must not share memory.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
        group: The first argument of a hook: a process group, a ``DeviceMesh``, ``None`` for WORLD, or a
            :class:`CompressState`. Reuse one state for many calls: with ``accumulate="fp32"`` it has a thread
            and a private group.
        async_op: Return a future at once.

    Returns:
        ``None``, or with ``async_op`` a future of ``tensor``, not to be touched before it is complete.
        All ranks get the same bits.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument has the wrong type.
        ValueError: The operation is neither of the two, a tensor is expanded, given twice or part of a graph,
            with ``async_op`` they are on several accelerators, or this rank is not in the group. Raised, like
            ``TypeError``, before any communication.
        AgreementError: The ranks' tensors or options differ in a call that is new (calls that ranks have made
            before, and now swap, are not compared); with ``async_op`` the future raises a RuntimeError with
            its text. So does every later call, for a state until it is closed; for a bare process group every
            call and hook, as long as the group exists.
        RuntimeError: A peer failed, or this is called in a callback of another call's future.

    Cost:
        Each rank sends ``2 (W - 1) / W`` times the elements, in the wire dtype's size. Small tensors are
        copied: up to 25 MiB at a time, or all of them with ``async_op``. Ranks compare a call whose tensors
        have new lengths, which takes a millisecond or more.

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
    accelerators = {one.device for one in filled if one.device.type != "cpu"}
    if async_op and len(accelerators) > 1:  # a future has one device
        raise ValueError(f"{_NAME}: the tensors are on {sorted(map(str, accelerators))}: call once for each")
    # Tensors made here are written elsewhere, so they must not be inference tensors.
    with profiler_range(_NAME), torch.inference_mode(False):
        if state.process_group.size() == 1:
            return _result(completed_future(like), tensor) if async_op else None
        if _completing.get(threading.get_native_id()) == threading.get_ident():
            raise RuntimeError(
                f"{_NAME} in a callback of another call's future, where the order of calls may differ "
                "between ranks: wait for that future, then call"
            )
        try:
            state.require_same_call(_NAME, {"op": "AVG" if mean else "SUM"}, filled)
            arrivals = []
            for indices in same_kind(tensors):
                for pack in _packs(tensors[index] for index in indices):
                    arrivals.append(_start(state, pack, mean=mean))
                    if not async_op:
                        arrivals.pop().wait()
        except Exception as error:
            state.fail(error)  # the peers hear of it
            if not async_op:
                raise
            return failed_future(error, like)
    if not async_op:
        return None
    device = next(iter(accelerators), like.device)
    return _result(joined_future(arrivals or [completed_future(like)], filled, device), tensor)


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of one dtype and device into packs, in their order."""
    packs: list[list[torch.Tensor]] = []
    nbytes = 0
    for tensor in tensors:
        if not packs or nbytes + tensor.nbytes > _PACK_BYTES:
            packs.append([])
            nbytes = 0
        packs[-1].append(tensor)
        nbytes += tensor.nbytes
    return packs


def _start(state: CompressState, pack: list[torch.Tensor], *, mean: bool) -> _Future:
    """Start to sum or average the tensors of a pack together."""
    buffer = _join(pack)
    values, world_size, clamp = flat_real(buffer), state.process_group.size(), state.clamp
    wire_dtype = state.wire_dtype or values.dtype
    # Division would round small numbers of fp16. A sum needs it where its partial sums may overflow although
    # they are clamped or in fp32, and in a narrower dtype.
    fits = fits_in_fp32(wire_dtype, world_size) if state.sums_in_fp32(wire_dtype) else clamp is None
    divisor = 1 if fits and not mean and wire_dtype == values.dtype else world_size
    tag, factor = (_MEAN_TAG, 1) if mean else (_SUM_TAG, divisor)
    arrival = start_sum(state, buffer, wire_dtype, divisor=divisor, name=f"{_NAME}:exchange", tag=tag)
    torch.autograd.graph.increment_version(values)  # the backend does not tell autograd

    def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()  # raises the collective's error
        if factor != 1:
            if clamp is not None:
                values.copy_(clamp(values, largest_share(values.dtype, factor)))
            values.mul_(factor)
        if len(pack) > 1 or buffer.data_ptr() != pack[0].data_ptr():
            parts = torch.split(buffer, [tensor.numel() for tensor in pack])
            for tensor, part in zip(pack, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        return buffer

    return arrival.then(finish)


def _join(pack: list[torch.Tensor]) -> torch.Tensor:
    """Return all values in one flat tensor; a single contiguous tensor is not copied."""
    first = pack[0]
    if len(pack) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        return first.view(-1)
    joined = first.new_empty(sum(map(torch.Tensor.numel, pack)))
    torch.cat([tensor.flatten() for tensor in pack], out=joined)  # else autocast refuses some dtypes
    return joined.resolve_conj().resolve_neg()


def _result(done: torch.futures.Future[Any], tensor: Tensors) -> torch.futures.Future[Any]:
    caller = threading.get_ident()

    def value(future: torch.futures.Future[Any]) -> Any:
        if threading.get_ident() != caller:
            # Before the caller's own callbacks run here.
            _completing[threading.get_native_id()] = threading.get_ident()
        future.value()  # raises the call's error
        return tensor

    return done.then(value)
