"""The measuring command on ranks with GPUs."""

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks.measure import measure
from dist_utils.testing import nccl_can_run, run_ranks

pytestmark = pytest.mark.gpu


def _measured(rank, world_size):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size)
    return measure(device="cuda", budget=15)


def test_links_and_hooks_on_gpus():
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    report, other = run_ranks(_measured, 2, 2, backend=None, timeout=180)
    assert report == other
    assert report.device == "cuda"
    assert "CUDA" in report.kernels
    assert len(report.links) == 1
    assert min(exchange.seconds for exchanges in report.hooks.values() for exchange in exchanges) > 0
    assert list(report.hooks) == ["fp32", "bf16", "8 bits", "4 bits"]
