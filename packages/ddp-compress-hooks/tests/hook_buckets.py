"""Shared by the hook tests: real buckets, every hook by name, and derived error bounds."""

import torch
import torch.distributed as dist

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dist_utils.comm_hooks import completed_future, sparse_mean
from dist_utils.testing import grad_bucket


def foreign_hook(state, bucket):
    """A user's own hook: averages, and returns a new tensor."""
    if bucket.buffer().is_sparse:
        return completed_future(sparse_mean(dist.group.WORLD, bucket.buffer()))
    total = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(total, async_op=True).get_future().then(lambda done: done.value()[0])


# name: (hook, wire dtype or None for the bucket's own, options of its CompressState or None)
HOOKS = {
    "allreduce_hook": (allreduce_hook, None, None),
    "allreduce_hook/fp32": (allreduce_hook, None, {"accumulate": "fp32"}),
    "fp16_compress_hook": (fp16_compress_hook, torch.float16, None),
    "bf16_compress_hook": (bf16_compress_hook, torch.bfloat16, None),
    "fp16_compress_hook/fp32": (fp16_compress_hook, torch.float16, {"accumulate": "fp32"}),
    "bf16_compress_hook/fp32": (bf16_compress_hook, torch.bfloat16, {"accumulate": "fp32"}),
    "compress_hook/float32": (compress_hook, torch.float32, {"wire_dtype": torch.float32}),
    "fp16_compress_wrapper(allreduce)": (fp16_compress_wrapper(allreduce_hook), torch.float16, None),
    "fp16_compress_wrapper(foreign)": (fp16_compress_wrapper(foreign_hook), torch.float16, None),
    "bf16_compress_wrapper(foreign)": (bf16_compress_wrapper(foreign_hook), torch.bfloat16, None),
}
FOREIGN = [name for name in HOOKS if "foreign" in name]
OURS = [name for name in HOOKS if name not in FOREIGN]


def state_of(name, group=None):
    """Return a state to register the hook with."""
    options = HOOKS[name][2]
    return group if options is None else CompressState(group, **options)


def make_bucket():
    """Return a GradBucket of a real DDP; give it a tensor with ``set_buffer``."""
    return grad_bucket([torch.ones(1, 2)])


def run_hook(name, bucket, tensor, *, group=None, state=None):
    """Run a hook on a bucket that holds ``tensor``; check that the result is that very tensor."""
    bucket.set_buffer(tensor)
    result = HOOKS[name][0](state or state_of(name, group), bucket).wait()
    assert (result.data_ptr(), result.shape, result.dtype) == (tensor.data_ptr(), tensor.shape, tensor.dtype)
    return result


def error_bound(name, inputs):
    """Bound the error of every element of the mean, for finite shares that do not overflow.

    Casting a share to the wire dtype has a relative error of at most one unit roundoff u, or an error of half
    the smallest subnormal. Each addition in the wire dtype has an error of u times a partial sum, which is at
    most the sum of the magnitudes; a sum in fp32 has its own, smaller u instead and is rounded once. A
    wrapped foreign hook casts before it divides: one more rounding. The last cast, to the bucket's dtype, has
    a relative error of that dtype's u, or an error of half its smallest subnormal.
    """
    _, wire, options = HOOKS[name]
    world_size = len(inputs)
    dtype = inputs[0].dtype
    wire = wire or dtype
    magnitude = sum(tensor.double().abs() for tensor in inputs) / world_size
    unit = torch.finfo(wire).eps / 2
    tiny = max(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps for kind in (wire, dtype))
    if (options or {}).get("accumulate") == "fp32" and wire.itemsize == 2:
        roundings = 2 + world_size * torch.finfo(torch.float32).eps / torch.finfo(wire).eps
    else:
        roundings = world_size
    roundings += name in FOREIGN
    roundings += 1  # (1 + u)^k - 1 against k u, and the division's own rounding in the bucket's dtype
    return (roundings * unit + torch.finfo(dtype).eps) * magnitude + world_size * tiny
