"""What a profiler shows of the hooks."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from ddp_quant_hooks import QuantizedAllreduceState, quantization_perchannel_hook, quantized_allreduce_hook
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread


def _ranges(rank):
    """Return the names of all ranges of a backward pass of several buckets, and their threads."""
    torch.manual_seed(rank)
    found = []
    for state, hook in (
        (QuantizedAllreduceState(min_bytes=0), quantized_allreduce_hook),
        (None, quantization_perchannel_hook),
    ):
        net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(3)])
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.03)
        ddp.register_comm_hook(state, hook)
        ddp(torch.randn(4, 100)).sum().backward()  # after this one DDP forms its final buckets
        with profile(experimental_config=every_thread()) as profiler:
            ddp(torch.randn(4, 100)).sum().backward()
        found.append({event.name: event.thread for event in profiler.events() if "_hook:" in event.name})
    return found


def test_every_bucket_has_a_range_where_it_is_handed_over_and_one_where_it_is_averaged():
    for quantized, plain in run_ranks(_ranges, 2):
        handed_over = [f"quantized_allreduce_hook:bucket_{index}" for index in range(3)]
        averaged = [f"quantized_allreduce_hook:average_bucket_{index}" for index in range(3)]
        assert sorted(plain) == [f"quantization_perchannel_hook:bucket_{index}" for index in range(3)]
        if every_thread() is None:  # torch 2.6 shows no thread but the caller's
            assert sorted(quantized) == handed_over
            continue
        assert sorted(quantized) == averaged + handed_over
        (callers,) = {quantized[name] for name in handed_over}
        (workers,) = {quantized[name] for name in averaged}
        assert callers != workers
