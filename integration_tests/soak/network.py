"""Hosts with links that can be cut, slowed down and made to lose packets."""

import contextlib
import subprocess
from collections.abc import Iterator

import emulated_hosts

RATE = "1gbit"


class Network:
    """Emulated hosts whose links can be changed."""

    def __init__(self, hosts: list[emulated_hosts.Host]) -> None:
        self.hosts = hosts
        self.loss = "netem loss 2%"
        try:
            self.set_queue(0, self.loss)
        except subprocess.CalledProcessError:  # the kernel has none
            # A packet of Gloo has up to 64 KiB before it is cut; the last of several in a row find no room.
            self.loss = "tbf rate 100mbit burst 5kb limit 8kb"
        self.repair(0)

    def run(self, index: int, command: str) -> str:
        """Run a command on a host, and return what it prints."""
        whole = [*self.hosts[index], *command.split()]
        return subprocess.run(whole, capture_output=True, text=True, check=True).stdout

    def set_queue(self, index: int, queue: str) -> None:
        """Send packets through another queue."""
        self.run(index, f"tc qdisc replace dev eth0 root {queue}")

    def lost(self, index: int) -> int:
        """Return how many packets the queue of a host has lost since it was set."""
        words = self.run(index, "tc -s qdisc show dev eth0").split()
        return int(words[words.index("(dropped") + 1].rstrip(","))

    def repair(self, index: int) -> None:
        """Repair a link."""
        self.run(index, "ip link set eth0 up")
        self.set_queue(index, f"tbf rate {RATE} burst 128kb latency 50ms")


@contextlib.contextmanager
def network(count: int) -> Iterator[Network | str]:
    """Set up hosts and yield them, or yield the reason why that is not possible."""
    with contextlib.ExitStack() as stack:
        try:
            found: Network | str = Network(
                stack.enter_context(emulated_hosts.emulated_hosts(count, rate=RATE))
            )
        except emulated_hosts.EmulationUnavailableError as error:
            found = str(error)
        yield found
