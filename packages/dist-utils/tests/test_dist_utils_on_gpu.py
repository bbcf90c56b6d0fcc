"""Batches that move to a GPU, modules there, jobs on its streams, and messages through the host."""

import pytest
import torch
import torch.distributed as dist
from test_module_sync import BUCKET, every_kind

from dist_utils import (
    AgreementError,
    OrderedWorker,
    TensorMismatchError,
    recursive_to,
    require_same_on_all_ranks,
    start_messages,
    sync_module_states,
)
from dist_utils.module_state.fingerprint import fingerprint
from dist_utils.testing import nccl_can_run, run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pinned", [False, True])
def test_side_stream_copies_arrive_before_they_are_used(pinned):
    sources = [torch.full((1 << 22,), float(value)) for value in range(8)]
    if pinned:
        sources = [source.pin_memory() for source in sources]
    for _ in range(5):
        (moved,) = recursive_to(sources, "cuda", True)
        sums = [tensor.sum() for tensor in moved]
        del moved  # the next round may reuse its memory only when the sums are done
        assert [total.item() for total in sums] == [value * float(1 << 22) for value in range(8)]


def test_the_current_gpu_is_the_same_device_with_and_without_its_index():
    batch = [torch.ones(2, device="cuda")]
    for device in ("cuda", f"cuda:{torch.cuda.current_device()}", torch.cuda.current_device()):
        for side_stream in (False, True):
            assert recursive_to(batch, device, side_stream)[0] is batch


def _sync(rank):
    found = every_kind(rank, "cuda")
    with pytest.raises(TensorMismatchError, match="first at tensor 0: rank 0 has weight of shape") as caught:
        sync_module_states(torch.nn.Linear(3, 3 + rank).cuda(), None, BUCKET, 0, ())
    return found, str(caught.value)


def test_modules_end_bitwise_equal_and_a_mismatch_is_an_error_on_every_rank():
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    first, second = run_ranks(_sync, 2, backend="nccl", timeout=120)
    assert first == second
    assert first[0] == []


def _choose_gpu(rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _sums(rank):
    """Submit a job after long work, and read its result right after it."""
    _choose_gpu(rank)
    worker, values = OrderedWorker(), torch.zeros(1 << 20, device="cuda")

    def sum_twice(group):
        dist.all_reduce(values, group=group)
        dist.all_reduce(values, group=group)
        return values

    # The worker's group takes time, and a kernel that is loaded at its first launch may wait for the GPU.
    torch.cuda._sleep(1)
    values += 0.0
    torch.cuda.current_stream().query()
    worker.submit(sum_twice, device="cuda").wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)
    values += rank + 1.0
    future = worker.submit(sum_twice, device="cuda")
    waiting = not torch.cuda.current_stream().query()
    result = future.wait() * 2  # on this stream, without a wait on the host
    found = result.unique().tolist()

    def fail(group):
        raise MemoryError("no room")

    for job in (fail, sum_twice):
        with pytest.raises(RuntimeError, match="no room"):
            worker.submit(job, device="cuda").wait()
    assert isinstance(worker.error, MemoryError)
    return waiting, found


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (1, "gloo"), (2, "gloo")])
def test_submitting_waits_for_nothing_and_the_future_orders_streams(world_size, backend):
    total = {1: 1.0, 2: 3.0 * 2}[world_size]
    assert run_ranks(_sums, world_size, backend=backend) == [(True, [2 * total])] * world_size


def _captured(rank):
    worker, values = OrderedWorker(), torch.ones(1000, device="cuda")

    def double(group):
        dist.all_reduce(values, group=group)
        values.mul_(2)
        return values

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        worker.submit(double, device="cuda").wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        worker.submit(double, device="cuda").wait()
    values.fill_(3)
    graph.replay()
    return values.unique().tolist()


def test_a_job_can_be_captured_in_a_graph():
    assert run_ranks(_captured, 1, backend="nccl") == [[6.0]]


def _exchanged(rank):
    _choose_gpu(rank)
    peer, own = 1 - rank, torch.zeros(1 << 20, device="cuda")
    received = torch.zeros_like(own)
    torch.cuda._sleep(10**8)
    own += rank + 1.0  # not computed yet when the message is started
    for work in start_messages(dist.group.WORLD, receives=[(peer, received)], sends=[(peer, own)]):
        work.wait()
    return received.unique().tolist()


def test_messages_of_gpu_tensors_over_gloo():
    assert run_ranks(_exchanged, 2) == [[2.0], [1.0]]


def test_a_fingerprint_is_the_same_number_on_a_gpu_and_needs_no_wait():
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in (3, 70_000, 9_000_001)] + [torch.ones(5, dtype=torch.int8)]
    on_gpu = [tensor.cuda() for tensor in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        number = fingerprint(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert number.item() == fingerprint(tensors).item()


def _drift(rank):
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 2)).cuda()
    sync_module_states(model, None, BUCKET, 0, ())
    require_same_on_all_ranks(model)
    with torch.no_grad():
        model[0].weight[3, 7] = rank
    with pytest.raises(AgreementError) as caught:
        require_same_on_all_ranks(model)
    return str(caught.value)


def test_ranks_that_drift_apart_on_gpus_are_told():
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    first, second = run_ranks(_drift, 2, backend="nccl", timeout=120)
    assert first == second
    assert "0.weight[3, 7]: rank 0 has 0.0, rank 1 has 1.0 (1 of 120000 values differ)" in first
