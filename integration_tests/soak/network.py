"""Hosts with links that can be cut, slowed down and made to lose packets."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import emulated_hosts

RATE = "1gbit"


class Network:
    """Emulated hosts with faulty links."""

    def __init__(self, hosts: list[emulated_hosts.Host]) -> None:
        self.hosts = hosts
        self.loss = self._how_to_lose()

    def cut(self, index: int) -> None:
        """Take a host's interface down."""
        self._run(index, "ip link set eth0 down")

    def slow(self, index: int) -> None:
        """Reduce a link to 1 % of its rate."""
        self._run(index, "tc qdisc replace dev eth0 root tbf rate 10mbit burst 16kb latency 200ms")

    def lose(self, index: int) -> None:
        """Make a host lose packets."""
        self._run(index, f"tc qdisc replace dev eth0 root {self.loss}")

    def lost(self, index: int) -> int:
        """Return how many packets the queue of a host has lost since it was set."""
        command = [*self.hosts[index], "tc", "-s", "qdisc", "show", "dev", "eth0"]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(words[words.index("(dropped") + 1].rstrip(","))

    def repair(self, index: int) -> None:
        """Repair a link."""
        self._run(index, "ip link set eth0 up")
        self._run(index, f"tc qdisc replace dev eth0 root tbf rate {RATE} burst 128kb latency 50ms")

    def _how_to_lose(self) -> str:
        """Return a queue that loses packets: at random if the kernel can, otherwise by being too short."""
        random = "netem loss 2%"
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run(0, f"tc qdisc replace dev eth0 root {random}")
            self.repair(0)
            return random
        # A packet of Gloo has up to 64 KiB before it is cut; the last ones of several in a row find no room.
        return "tbf rate 100mbit burst 5kb limit 8kb"

    def _run(self, index: int, command: str) -> None:
        subprocess.run([*self.hosts[index], *command.split()], capture_output=True, check=True)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network | str]:
    """Set up hosts and yield them, or yield the reason why that is not possible."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(emulated_hosts.emulated_hosts(count, rate=RATE))
        except emulated_hosts.EmulationUnavailableError as error:
            found: Network | str = str(error)
        else:
            found = Network(hosts)
        yield found
