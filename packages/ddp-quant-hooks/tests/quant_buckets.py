"""Shared by the hook tests: states by name, and the expected result of a hook, computed in one process."""

import inspect
import io

import torch
import torch.distributed as dist
from kernel_backends import computed_by
from kernel_cases import decoded, encoded, reduced
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.kernels import torch_ops

STATES = {
    "int8": {},
    "int8/fp16": {"gather": "fp16"},
    "int8/64": {"block_size": 64},
    "int4": {"bits": 4, "error_feedback": "none"},
    "int4/int8": {"bits": 4, "gather": "int8", "error_feedback": "none"},
    "feedback shard": {"error_feedback": "shard"},
    "feedback both": {"error_feedback": "both"},
}


_CAN_LEAVE_OUT = "skip_all_reduce_unused_params" in inspect.signature(DistributedDataParallel).parameters
LEAVES_OUT_BUCKETS = {
    "find_unused_parameters": True,
    **({"skip_all_reduce_unused_params": True} if _CAN_LEAVE_OUT else {}),
}
"""Options with which DDP leaves out buckets that no rank uses, if torch supports that (not in 2.6)."""


def make_state(name, group=None, **options):
    """Return a state that quantizes buckets of any size."""
    return QuantizedAllreduceState(group, **{"min_bytes": 0, **STATES[name], **options})


def run_hook(state, bucket, tensor, hook=quantized_allreduce_hook):
    """Run a hook on a bucket that holds ``tensor``; check that the result is that very tensor."""
    bucket.set_buffer(tensor)
    result = hook(state, bucket).wait()
    assert result.data_ptr() == tensor.data_ptr()
    assert result.shape == tensor.shape
    assert result.dtype == tensor.dtype
    return result


def rank_values(length, dtype=torch.float32, *, seed=0):
    """Return the same normal values on all ranks: those of each rank."""
    return [
        torch.randn(length, generator=torch.Generator().manual_seed(seed + peer)).to(dtype)
        for peer in range(dist.get_world_size())
    ]


def simulate(state, inputs):
    """Return the mean that all ranks must get for ``inputs``, the ranks' flat tensors, in a first step.

    Chunks and shards end at block boundaries, so they change no bit.
    """
    with computed_by(torch_ops):
        return _simulate(state, inputs)


def _simulate(state, inputs):
    count, layout = inputs[0].numel(), state.options.scatter_layout
    messages = [encoded(values, layout) for values in inputs]
    if len(inputs) > 2:
        messages = [reduced(messages, count, layout, state.options.gather_layout)]
        layout = state.options.gather_layout
    return decoded(messages, count, layout, inputs[0].dtype)


def differences(first, second):
    """Return the largest difference of every two tensors that are not equal bit by bit, by name or place.

    Args:
        first: Tensors in a mapping or a sequence.
        second: Likewise, with the same names or places.
    """
    if not isinstance(first, dict):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    assert list(first) == list(second)
    return {
        name: (first[name].double() - second[name].double()).abs().max().item()
        for name in first
        if not torch.equal(first[name], second[name])
    }


def assert_same(first, second, what=""):
    """Raise unless all tensors are equal bit by bit; the error has their differences, on any rank."""
    found = differences(first, second)
    assert not found, (what, found)


def through_file(values):
    """Return what a file holds that such values were saved in."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat_residuals(saved, kind="own"):
    """Return the residuals of each parameter or key in a state's ``state_dict()``, in one row."""
    entries = {**saved["parameters"], **saved["keys"]}
    return {
        name: torch.cat([values for _, _, values in entry["slots"][kind]["pieces"]])
        for name, entry in entries.items()
        if kind in entry["slots"]
    }
