"""Hosts with slow links on one machine: one network namespace each, joined by a bridge, limited by ``tc``.

Needs Linux's ``ip``, ``tc``, ``unshare`` and ``nsenter``, but no root where the system lets ordinary users
make user namespaces. Each host has the address ``10.77.0.(index + 1)`` on its interface ``eth0``; the links
are limited in both directions.

A namespace lives as long as a process in it, and these have no names: they vanish with the program that made
them, however it ends.
"""

from __future__ import annotations

import contextlib
import re
import select
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

Host: TypeAlias = list[str]
"""The prefix of a command that runs it on the host."""

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


_MOST_HOSTS = 254
_NETWORK = "10.77.0"
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_BURST_SECONDS, _PACKET_BYTES = 1e-3, 1 << 11

_PATIENCE = 60.0
"""Seconds for a command that takes milliseconds but may wait for locks of the kernel."""
_LATE = f"not done after {_PATIENCE:.0f} s"


class EmulationUnavailableError(RuntimeError):
    """This machine cannot emulate hosts; the message says why, in one line."""


def address(index: int) -> str:
    """Return the address of a host."""
    return f"{_NETWORK}.{index + 1}"


def bytes_a_second(rate: str) -> float:
    """Return what a rate for ``tc`` stands for.

    Raises:
        ValueError: It is invalid: tc would take a negative one and limit nothing.
    """
    found = _RATE.fullmatch(rate)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"rate must be a positive number with kbit, mbit or gbit, got {rate!r}")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


def require_rate(rate: str) -> None:
    """Raise ``ValueError`` unless a rate is valid."""
    bytes_a_second(rate)


def holder(host: Host) -> int:
    """Return the process that holds a host's network, for callers that enter it themselves."""
    return int(host[1].removeprefix("--target="))


def interface_bytes() -> tuple[int, int]:
    """Return the bytes that this process's host has received and sent, headers included.

    Only meaningful on an emulated host, whose interface is eth0.
    """
    # Not /sys/class/net: that belongs to the network in which it was mounted, this file to the process.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            columns = counts.split()
            return int(columns[0]), int(columns[8])
    return 0, 0


@contextlib.contextmanager
def emulated_hosts(count: int, *, rate: str = "1gbit") -> Iterator[list[Host]]:
    """Set up ``count`` hosts, yield the command prefix of each, and remove everything on exit.

    A program runs on a host with ``[*host, "program", "argument"]``, as the user of this program, in the
    same working directory. End all programs on the hosts before leaving: they would keep their host alive.

    Args:
        count: Number of hosts.
        rate: The rate of each link in each direction: a number with ``kbit``, ``mbit`` or ``gbit``.

    Raises:
        ValueError: The rate is invalid, or there are too many hosts.
        EmulationUnavailableError: The system refuses, or a tool is missing.
    """
    # At once pass the bytes of a millisecond, or a packet: a link has no more.
    burst = max(_PACKET_BYTES, round(bytes_a_second(rate) * _BURST_SECONDS))
    if not 1 <= count <= _MOST_HOSTS:
        raise ValueError(f"count must be from 1 to {_MOST_HOSTS}, got {count}")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise EmulationUnavailableError(f"emulating hosts needs the program {tool} (package {package})")
    # Users who may not make network namespaces can in a user namespace of their own, where they are root.
    allowed = _complaint(["unshare", "--net", "ip", "link", "set", "lo", "up"]) == ""
    new_user, user = ([], []) if allowed else (["--map-root-user"], ["--user", "--preserve-credentials"])

    def inside(namespace: int) -> Host:
        return ["nsenter", f"--target={namespace}", *user, "--net", "--"]

    with contextlib.ExitStack() as stack:
        switch = _namespace(["unshare", *new_user, "--net"], stack)
        bridge = inside(switch)
        namespaces = [_namespace([*bridge, "unshare", "--net"], stack) for _ in range(count)]
        _run(bridge, "ip link add bridge0 type bridge")
        _run(bridge, "ip link set bridge0 up")
        limit = f"root tbf rate {rate} burst {burst} latency 50ms"
        for index, namespace in enumerate(namespaces):
            host, port = inside(namespace), f"port{index}"
            _run(bridge, f"ip link add {port} type veth peer name eth0 netns {namespace}")
            _run(bridge, f"ip link set {port} up master bridge0")
            _run(bridge, f"tc qdisc add dev {port} {limit}")
            _run(host, f"ip addr add {address(index)}/24 dev eth0")
            _run(host, "ip link set eth0 up")
            _run(host, "ip link set lo up")
            _run(host, f"tc qdisc add dev eth0 {limit}")
            # As most systems have it. BBR, the default of some, takes a limited link for a faster one.
            _run(host, f"ip route replace {_NETWORK}.0/24 dev eth0 congctl cubic")
        yield [inside(namespace) for namespace in namespaces]


def _namespace(enter: Sequence[str], stack: contextlib.ExitStack) -> int:
    """Return the process that holds a new namespace until the stack closes, or this process ends."""
    holder = subprocess.Popen(
        [*enter, "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,  # when this process ends, the pipe closes and the holder ends, too
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal is for the programs on the hosts
    )
    stack.callback(holder.communicate)
    stack.callback(holder.kill)
    assert holder.stdout is not None
    answers, _, _ = select.select([holder.stdout], [], [], _PATIENCE)
    if not answers or not holder.stdout.readline():
        holder.kill()
        complaint = " ".join(holder.communicate()[1].split()) if answers else _LATE
        raise EmulationUnavailableError(f"no network namespace, by {' '.join(enter)}: {complaint}")
    return holder.pid


def _run(inside: Host, command: str) -> None:
    if complaint := _complaint([*inside, *command.split()]):
        raise EmulationUnavailableError(f"{command}: {complaint}")


def _complaint(command: Sequence[str]) -> str:
    """Return a command's error output in one line; empty if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return _LATE
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"
