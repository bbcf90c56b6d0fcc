"""What tests look at: buckets, the middle of a backward pass, and the bytes that a process has sent."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_utils import torch_compat
from dist_utils.comm_hooks import completed_future

# struct tcp_info of linux/tcp.h: tcpi_notsent_bytes; tcpi_bytes_sent, then tcpi_bytes_retrans
_TCP_INFO_BYTES_NOT_SENT = 144
_TCP_INFO_BYTES_SENT = 200

_TCP_INFO_BYTES = _TCP_INFO_BYTES_SENT + 16


def call_in_backward(x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
    """Return ``x``; when its gradient is computed, ``call()`` comes first.

    For tests of a backward pass that raises, ends its process or inspects something halfway.

    Args:
        x: Any tensor. If it needs no gradient, nothing is called.
        call: Called in the thread that runs the backward pass; what it raises, ``backward()`` raises.

    Returns:
        A copy.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> call_in_backward(x, lambda: print("computing")).backward()
        computing
    """

    def hook(_: torch.Tensor) -> None:  # what a hook returns would replace the gradient
        call()

    result = x.clone()
    if result.requires_grad:
        result.register_hook(hook)  # type: ignore[no-untyped-call]
    return result


def grad_bucket(gradients: Sequence[torch.Tensor]) -> torch_compat.GradBucket:
    """Return a bucket as ``DistributedDataParallel`` hands it to a communication hook.

    For tests and benchmarks of hooks; torch has no other way to make buckets. ``set_buffer`` puts other
    values into it.

    Args:
        gradients: The gradients in the bucket, one for each parameter, in this order. Dense, of one dtype. (A
            bucket of complex ones is complex until torch 2.9, and later real and twice as long; Gloo takes
            none in torch 2.6.)

    Cost:
        Collective: makes a DDP model on all ranks and runs one backward pass.
    """
    size = sum(gradient.nbytes for gradient in gradients)
    ddp = DistributedDataParallel(
        _Copies(gradients), bucket_cap_mb=max(25, size / 2**19), gradient_as_bucket_view=True
    )
    buckets: list[torch_compat.GradBucket] = []

    def capture(_: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def] # noqa: ANN001
        buckets.append(bucket)
        return completed_future(bucket.buffer())

    capture.__annotations__.clear()  # strings here, which register_comm_hook refuses
    ddp.register_comm_hook(None, capture)
    torch.autograd.backward(ddp(), list(gradients))
    (bucket,) = buckets
    return bucket


class _Copies(torch.nn.Module):
    """Parameters whose gradients are those of what it returns."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.zeros_like(value) for value in like)

    def forward(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.values.parameters()]


def tcp_bytes_sent() -> int:
    """Return how many bytes of payload this process has sent on the TCP connections it has open now.

    The difference of two calls is what was sent between them: what a hook really sends with Gloo, whatever
    its formula says. A byte counts when the kernel has taken it, whether it has left or waits for the
    receiver: what a collective sends is counted when that has returned. Retransmissions do not count. Only on
    Linux, whose kernel counts; traffic over NVLink, shared memory or InfiniBand is not TCP.

    Raises:
        NotImplementedError: This is not Linux.
    """
    if sys.platform != "linux":
        raise NotImplementedError("counting sent bytes needs Linux")
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        # The listing's own descriptor is gone by now, and files and pipes are no sockets.
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(path.name))
            try:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    sent, retransmitted = struct.unpack_from("=QQ", info, _TCP_INFO_BYTES_SENT)
                    (waiting,) = struct.unpack_from("=I", info, _TCP_INFO_BYTES_NOT_SENT)
                    total += sent - retransmitted + waiting
            finally:
                connection.detach()  # it belongs to Gloo
    return total
