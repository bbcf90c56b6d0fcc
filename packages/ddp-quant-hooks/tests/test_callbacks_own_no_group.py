"""A callback must not own the process group: one of Gloo's threads may drop it last.

The group's end would join that same thread, and abort the process: "Resource deadlock avoided". To provoke
that, a peer must die at the right moment, so these tests examine what every callback keeps alive instead.
"""

import gc
import types

import torch
import torch.distributed as dist
from resumed_runs import Run, resumed, state_maker

from ddp_compress_hooks import CompressState, bf16_compress_hook, fp16_compress_wrapper
from ddp_compress_hooks import all_reduce as compressed_all_reduce
from ddp_quant_hooks import QuantizedAllreduceState, all_reduce, quantization_perchannel_hook
from dist_utils.testing import grad_bucket, run_ranks


def _kept_alive(callback):
    """Return all objects that a callback keeps alive, except modules and classes, which live anyway."""
    kept, todo = {}, [callback]
    while todo:
        one = todo.pop()
        if id(one) in kept or isinstance(one, (type, types.ModuleType)):
            continue
        kept[id(one)] = one
        if isinstance(one, types.FunctionType):  # its globals are a module's
            todo += [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        else:
            todo += gc.get_referents(one)
    return kept.values()


def _groups_of_callbacks(rank):
    """Return, for each way of averaging a bucket, the number of callbacks, and of those that own a group."""
    seen, way, real_then = {}, "", torch._C.Future.then

    def then(future, callback):
        groups = [one for one in _kept_alive(callback) if isinstance(one, dist.ProcessGroup)]
        callbacks, owners = seen.get(way, (0, 0))
        seen[way] = (callbacks + 1, owners + bool(groups))
        return real_then(future, callback)

    bucket = grad_bucket([torch.ones(3)])
    feedback = {"error_feedback": "both", "min_bytes": 12_000}  # one bucket is not quantized
    run = Run(state_maker(**feedback), bucket_cap_mb=0.012)
    for number in range(2):  # then buckets stay as they are
        run.step(number)
    checkpoint = run.save()
    torch._C.Future.then = then
    try:
        way = "each rank's values"
        quantization_perchannel_hook(None, bucket).wait()
        way = "plain, with feedback, after loading"
        resumed(checkpoint, state_maker(**feedback), bucket_cap_mb=0.012).step(2)
        way = "plain tensors, with feedback"
        state = QuantizedAllreduceState(**feedback)
        all_reduce(torch.ones(5), dist.ReduceOp.AVG, state, async_op=True, key="five").wait()
        way = "ring"
        bf16_compress_hook(None, bucket).wait()
        way = "wrapped hook"
        fp16_compress_wrapper(quantization_perchannel_hook)(None, bucket).wait()
        way = "ring of tensors"
        wire = CompressState(wire_dtype=torch.bfloat16)
        compressed_all_reduce([torch.ones(5)], dist.ReduceOp.AVG, wire, async_op=True).wait()
    finally:
        torch._C.Future.then = real_then
    return seen


def test_no_callback_owns_a_process_group():
    for seen in run_ranks(_groups_of_callbacks, 2):
        assert len(seen) == 6
        for way, (callbacks, owners) in seen.items():
            assert callbacks > 0, way
            assert owners == 0, way
