"""Modules whose tensors are on GPUs, compared and synchronized with NCCL."""

import pytest
import torch
import torch.distributed as dist
from test_module_sync import BUCKET, Everything, _differing, _states

from dist_utils import TensorMismatchError, sync_module_states
from dist_utils.testing import nccl_can_run, run_ranks

pytestmark = pytest.mark.gpu


def _start(rank, world_size):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def _sync_everything(rank, world_size):
    _start(rank, world_size)
    differing = []
    for bucket in (BUCKET, 64):
        for src in (0, 1):
            module = Everything(rank).cuda()
            layouts = [tensor.stride() for tensor in module.parameters()]
            sync_module_states(module, dist.group.WORLD, bucket, src, ())
            assert [tensor.stride() for tensor in module.parameters()] == layouts
            states = {name: tensor.cpu() for name, tensor in _states(module).items()}
            differing += _differing(states, _states(Everything(src)))
    return differing


def _mismatch(rank, world_size):
    _start(rank, world_size)
    try:
        sync_module_states(torch.nn.Linear(3, 3 + rank).cuda(), dist.group.WORLD, BUCKET, 0, ())
    except TensorMismatchError as error:
        return str(error)
    return None


def _ranks(fn):
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    return run_ranks(fn, 2, 2, backend=None, timeout=120)


def test_every_kind_of_tensor_ends_bitwise_equal_to_the_sources():
    assert _ranks(_sync_everything) == [[], []]


def test_shapes_that_differ_are_an_error_on_every_rank():
    first, second = _ranks(_mismatch)
    assert first == second
    assert "weight" in first
