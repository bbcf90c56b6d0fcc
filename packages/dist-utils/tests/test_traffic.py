"""Bytes on TCP connections, as the kernel counts them."""

import contextlib
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from dist_utils.testing import run_ranks, tcp_bytes_sent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counting sent bytes needs Linux")


def _send(rank, elements):
    tensor = torch.zeros(elements)
    dist.all_reduce(tensor)
    dist.barrier()
    before = tcp_bytes_sent()
    dist.all_reduce(tensor)
    dist.barrier()
    return tcp_bytes_sent() - before


def test_sent_bytes_are_those_of_a_ring_all_reduce():
    world_size, elements = 4, 1 << 18
    ring = 2 * (world_size - 1) / world_size * 4 * elements
    for sent in run_ranks(_send, world_size, elements):
        # Above the payload: Gloo's message headers and the barrier.
        assert ring <= sent < 1.02 * ring


def _outlast(rank):
    before = tcp_bytes_sent()
    time.sleep(0.3 * rank)
    return tcp_bytes_sent() - before


def test_a_rank_that_has_returned_stays_connected_to_the_others():
    assert run_ranks(_outlast, 3) == [0, 0, 0]


def test_bytes_that_wait_for_the_receiver_count_as_sent():
    """Otherwise the last messages of one step would be counted in the next."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        sender.setblocking(False)
        before, taken = tcp_bytes_sent(), 0
        with contextlib.suppress(BlockingIOError):
            while True:
                taken += sender.send(bytes(1 << 16))
        assert tcp_bytes_sent() - before == taken
        received = 0
        while received < taken:
            received += len(receiver.recv(1 << 16))
        assert tcp_bytes_sent() - before == taken
