"""Every collective on GPU tensors with NCCL: values, gradients, and calls that differ between ranks."""

import pytest
import torch
import torch.distributed as dist
from test_gradients_by_simulation import VARIANTS, compare

import dist_autograd_collectives as dac
from dist_utils import TensorMismatchError
from dist_utils.testing import nccl_can_run, run_ranks

pytestmark = pytest.mark.gpu


def _ranks(fn, world_size, *args):
    if not nccl_can_run(world_size):
        pytest.skip(f"NCCL needs a GPU for each of {world_size} ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    return run_ranks(fn, world_size, world_size, *args, backend=None, timeout=240)


def _start(rank, world_size):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


ON_GPU = {
    "plain": [*VARIANTS["plain"], ((), torch.float64, "plain")],
    "strides": [((2, 3), torch.float64, "transposed")],
    "dtypes": [((2, 3), torch.complex64, "plain"), ((2, 3), torch.bfloat16, "plain")],
}


def _compare_on_gpu(rank, world_size, variants):
    _start(rank, world_size)
    return compare(rank, ON_GPU[variants], device="cuda")


@pytest.mark.parametrize("variants", ON_GPU)
def test_values_and_gradients_of_both_orders(variants):
    assert _ranks(_compare_on_gpu, 3, variants) == [{}, {}, {}]


def _on_a_stream(rank, world_size):
    """Compute on a side stream right before and after a collective, without a wait of the host."""
    _start(rank, world_size)
    stream = torch.cuda.Stream()
    x = torch.full((1 << 22,), float(rank + 1), device="cuda", requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        total = dac.all_reduce(x * 2)
        handle = dac.start(dac.all_gather, total + 1)
        torch.cuda._sleep(50_000_000)
        parts = handle.wait()
        sum(part.sum() for part in parts).backward()
        seen = parts[1].clone(), x.grad.clone()
    stream.synchronize()
    return [values.unique().tolist() for values in seen]


def test_collectives_follow_the_current_stream():
    # The sum of 2 and 4, and 1. Each rank's loss has all parts, which have the x of every rank, twice.
    assert _ranks(_on_a_stream, 2) == [[[7.0], [8.0]]] * 2


def _unequal(rank, world_size):
    """Return the errors of checked calls that differ between ranks, and a sum after them."""
    _start(rank, world_size)
    x, errors = torch.ones(4 + 2 * rank, device="cuda"), []
    for call in (
        lambda: dac.all_reduce(x),
        lambda: dac.all_to_all_dim(x, 0, 0),
    ):
        with pytest.raises(TensorMismatchError) as caught, dac.compare_calls():
            call()
        errors.append(str(caught.value))
    return errors, dac.all_reduce(torch.ones(3, device="cuda")).tolist()


def test_calls_that_differ_between_ranks_are_refused_on_all_of_them():
    (errors, total), other = _ranks(_unequal, 2)
    assert (errors, total) == other
    assert total == [2.0] * 3
