"""Stop a rank with its connections open, like a machine that hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = ["note_stop_in", "stop_process"]

_note: Path | None = None
"""A file whose presence tells the launcher that this process has stopped itself."""


def note_stop_in(path: Path) -> None:
    """Have this process create a file if it stops itself."""
    global _note  # noqa: PLW0603 - one process, one rank
    _note = path


def stop_process() -> None:
    """Stop this rank's process where it is, with its connections open, for tests of a peer that hangs.

    Its peers notice only at their timeout. :func:`run_ranks` ends it when all other ranks have ended; it must
    be one of the ranks in ``may_die``.

    Raises:
        RuntimeError: The process is not a rank of :func:`run_ranks`: nothing would end it.
        NotImplementedError: The system cannot stop a process.

    Example:
        >>> def peer_hangs(rank):  # doctest: +SKIP
        ...     if rank == 1:
        ...         stop_process()
        ...     with pytest.raises(RuntimeError):
        ...         dist.all_reduce(torch.ones(1))
        >>> run_ranks(peer_hangs, 2, may_die={1}, group_timeout=patience(2.0))  # doctest: +SKIP
    """
    if _note is None:
        raise RuntimeError("stop_process() is for a rank of run_ranks, which ends it")
    if not hasattr(signal, "SIGSTOP"):
        raise NotImplementedError("stopping a process needs SIGSTOP")
    _note.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
