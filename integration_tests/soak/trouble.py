"""What happens to a rank: inside it, where user code runs, or from outside."""

import signal
from pathlib import Path
from typing import Any


class UserError(Exception):
    """The error of user code."""


def raise_here(*_: object) -> None:
    """Raise as user code does."""
    raise UserError("user code failed")


def no_more_memory(*_: object) -> None:
    """Let every further request for address space fail."""
    import resource  # noqa: PLC0415 - not on every system

    with open("/proc/self/statm") as file:  # noqa: PTH123 - takes no extra memory
        pages = int(file.read().split()[0])
    held = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))


def fill_disk(folder: Path, rank: int) -> None:
    """Let writes to the next checkpoint fail with a full device."""
    (folder / f"checkpoint-{rank}.new").symlink_to("/dev/full")


def kill(watch: Any) -> None:
    """End the process."""
    watch.signal(watch.job.victim, signal.SIGKILL)


def stop(watch: Any) -> None:
    """Stop the process for a while."""
    watch.signal(watch.job.victim, signal.SIGSTOP)
    watch.let_pass()
    watch.signal(watch.job.victim, signal.SIGCONT)


def cut_link(watch: Any) -> None:
    """Take the host's interface down."""
    watch.network.run(watch.job.victim, "ip link set eth0 down")


def slow_link(watch: Any) -> None:
    """Reduce the link to 1 % of its rate for a while."""
    watch.network.set_queue(watch.job.victim, "tbf rate 10mbit burst 16kb latency 200ms")
    watch.let_pass()
    watch.network.repair(watch.job.victim)


def lose_packets(watch: Any) -> None:
    """Let the link lose packets for a while."""
    watch.network.set_queue(watch.job.victim, watch.network.loss)
    watch.let_pass()
    watch.note = f"{watch.network.lost(watch.job.victim)} packets lost"
    watch.network.repair(watch.job.victim)
