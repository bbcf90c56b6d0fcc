"""The tasks of torch's autograd engine in which a backward pass runs, and how they end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from dist_utils.torch_compat import after_backward, graph_task_id, private


class GraphTasks:
    """The tasks in which a pass hands over its buckets.

    Every backward pass is one task, and a pass inside it, such as a checkpoint's, is one of its own. At its
    end DDP waits for all buckets, and copies averages into ``.grad``. If a task fails, torch drops its
    callbacks, and with them the mark that they hold.
    """

    def __init__(self) -> None:
        self._marks: dict[int, weakref.ref[_TaskMark]] = {}

    def follow(self, ended: Callable[[], None], left: Callable[[], object]) -> bool:
        """Follow the task that this thread is running; return whether it is a new one.

        Args:
            ended: Called when it has ended, after DDP, and after what communication hooks do then: states
                with error feedback look at ``.grad`` to see which parameters no rank has used.
            left: Called instead if it has failed.
        """
        task = graph_task_id()
        if task == -1 or task in self._marks:
            return False
        mark = _TaskMark()
        self._marks[task] = weakref.ref(mark)
        dropped = weakref.finalize(mark, left)
        dropped.atexit = False

        def end(mark: _TaskMark) -> None:
            del mark
            dropped.detach()
            ended()

        after_backward(partial(after_backward, partial(end, mark)))
        return True

    def run(self) -> bool:
        """Return whether torch is still running one of them; between nested ones it may not be."""
        return any(mark() is not None for mark in list(self._marks.values()))


def is_inside_node() -> bool:
    """Return whether a node of a backward pass runs on this thread, and not what follows all nodes.

    No public name up to torch 2.15.
    """
    return private("torch._C", "_current_autograd_node", "the end of a backward pass")() is not None


class _TaskMark:
    """Is alive as long as the callbacks of a task."""
