"""Jobs on GPU tensors: on a side stream with NCCL, on the thread with Gloo; and messages through the host."""

import pytest
import torch
import torch.distributed as dist

from dist_utils import OrderedWorker, start_messages
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.gpu


def _start(rank, world_size, backend):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def _sums(rank, world_size, backend):
    """Submit a job after long work, and read its result right after it."""
    _start(rank, world_size, backend)
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

    with pytest.raises(RuntimeError, match="no room"):
        worker.submit(fail, device="cuda").wait()
    with pytest.raises(RuntimeError, match="no room"):
        worker.submit(sum_twice, device="cuda").wait()
    assert isinstance(worker.error, MemoryError)
    return waiting, found


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (1, "gloo"), (2, "gloo")])
def test_submitting_waits_for_nothing_and_the_future_orders_streams(world_size, backend):
    total = {1: 1.0, 2: 3.0 * 2}[world_size]
    expected = [(True, [2 * total])] * world_size
    assert run_ranks(_sums, world_size, world_size, backend, backend=None) == expected


def _captured(rank, world_size, backend):
    _start(rank, world_size, backend)
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
    assert run_ranks(_captured, 1, 1, "nccl", backend=None) == [[6.0]]


def _exchanged(rank, world_size, backend):
    _start(rank, world_size, backend)
    peer, own = 1 - rank, torch.zeros(1 << 20, device="cuda")
    received = torch.zeros_like(own)
    torch.cuda._sleep(10**8)
    own += rank + 1.0  # not computed yet when the message is started
    group = dist.group.WORLD
    for work in start_messages(group, receives=[(peer, received)], sends=[(peer, own)]):
        work.wait()
    return received.unique().tolist()


def test_messages_of_gpu_tensors_over_gloo():
    assert run_ranks(_exchanged, 2, 2, "gloo", backend=None) == [[2.0], [1.0]]
