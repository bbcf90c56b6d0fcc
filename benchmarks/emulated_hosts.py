"""Hosts with slow links on one machine: a network namespace each, joined by a bridge, rates set by ``tc``.

Needs root and Linux's ``ip`` and ``tc``. Each host has the address ``10.77.0.(index + 1)`` on its
interface ``eth0``; the links are limited in both directions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


class EmulationUnavailableError(RuntimeError):
    """This machine cannot emulate hosts; the message says what is missing."""


def address(index: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{index + 1}"


@contextlib.contextmanager
def emulated_hosts(count: int, *, rate: str = "1gbit") -> Iterator[list[str]]:
    """Set up ``count`` hosts, yield the names of their namespaces, and take everything down again.

    Run a program on a host with ``ip netns exec NAME program``.

    Args:
        count: Number of hosts.
        rate: Of each link and each direction, in tc's units.

    Raises:
        EmulationUnavailableError: Not root, or ``ip`` or ``tc`` is missing or refuses.
    """
    if os.geteuid() != 0:
        raise EmulationUnavailableError("emulating hosts needs root, to make network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise EmulationUnavailableError(f"emulating hosts needs the program {tool} (package iproute2)")
    prefix = f"bench{os.getpid()}"
    switch = f"{prefix}sw"
    hosts = [f"{prefix}h{index}" for index in range(count)]
    with contextlib.ExitStack() as stack:
        _namespace(switch, stack)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for index, host in enumerate(hosts):
            port = f"port{index}"
            _namespace(host, stack)
            _run(
                "ip", "-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch
            )
            # Before its namespace, or the name can linger. Its other end goes with it.
            stack.callback(_try, "ip", "-n", host, "link", "del", "eth0")
            _run("ip", "-n", host, "addr", "add", f"{address(index)}/24", "dev", "eth0")
            for namespace, link in ((host, "eth0"), (host, "lo"), (switch, port)):
                _run("ip", "-n", namespace, "link", "set", link, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            for namespace, link in ((host, "eth0"), (switch, port)):
                limit = ("rate", rate, "burst", "128kb", "latency", "50ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield hosts


def _namespace(name: str, stack: contextlib.ExitStack) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_try, "ip", "netns", "del", name)


def _run(*command: str) -> None:
    if error := _try(*command):
        raise EmulationUnavailableError(f"{' '.join(command)}: {error}")


def _try(*command: str) -> str:
    """Return the command's complaint, empty if it had none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
