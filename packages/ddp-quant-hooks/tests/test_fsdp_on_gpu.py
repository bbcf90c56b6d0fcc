"""FSDP2 on GPUs with NCCL: the same promises as on CPUs, whose tests these are."""

from functools import partial

import pytest
import test_fsdp as cpu
import test_fsdp_gather
import torch
import torch.distributed as dist
from fsdp_models import needs_custom_gathers

from dist_utils.testing import nccl_can_run, run_ranks

pytestmark = [pytest.mark.gpu, cpu.needs_hooks]


def _on_gpu(rank, world_size, checks):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size)
    return [check(rank) for check in checks]


def _ranks(world_size, *checks):
    if not nccl_can_run(world_size):
        pytest.skip(f"NCCL needs a GPU for each of {world_size} ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    return run_ranks(_on_gpu, world_size, world_size, checks, backend=None, timeout=240)


def test_full_precision_is_native_hsdp_bit_by_bit():
    assert _ranks(4, cpu._same_as_native_hsdp) == [[[]]] * 4


def test_handles_can_be_removed_and_memory_is_given_back():
    assert _ranks(4, cpu._after_removal, cpu._memory_is_given_back) == [[True, True]] * 4


def test_8_and_4_bits_stay_within_half_a_step():
    for (ratios,) in _ranks(4, cpu._few_bits):
        assert ratios[8] < 0.3
        assert ratios[4] < 0.2


def test_a_mesh_of_one_rank_is_data_parallelism_and_two_models_share_a_backward():
    for ((eight, four),) in _ranks(2, cpu._replicas):
        assert 0 < eight < four


@needs_custom_gathers
@pytest.mark.parametrize("hosts", ["00", "0011"])
def test_gathered_weights_have_the_bits_of_the_cpu_backend(hosts):
    _ranks(len(hosts), partial(test_fsdp_gather._weights, hosts=hosts))
