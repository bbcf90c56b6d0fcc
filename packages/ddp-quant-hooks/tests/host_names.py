"""Ranks of one machine that take part as if they were on several hosts."""

import ctypes
import socket

_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


def take_host_name(name):
    """Give this process a host name of its own; return whether this user can."""
    if ctypes.CDLL(None).unshare(_NEW_HOST_NAME) != 0:
        return False
    socket.sethostname(f"host-{name}")
    return True
