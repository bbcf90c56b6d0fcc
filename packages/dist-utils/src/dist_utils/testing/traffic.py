"""Bytes that this process has sent, as the kernel counts them."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from pathlib import Path

__all__ = ["tcp_bytes_sent"]


# struct tcp_info of linux/tcp.h: tcpi_notsent_bytes; tcpi_bytes_sent, then tcpi_bytes_retrans
_TCP_INFO_BYTES_NOT_SENT = 144
_TCP_INFO_BYTES_SENT = 200

_TCP_INFO_BYTES = _TCP_INFO_BYTES_SENT + 16


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
