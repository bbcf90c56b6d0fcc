"""Backward passes: which one is running, what is around it, and what to do when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from dist_utils.torch_compat.private_names import private

__all__ = [
    "after_backward",
    "before_end_of_backward",
    "graph_task_id",
    "in_final_callback",
    "inside_backward",
    "inside_nested_backward",
    "surrounding_nodes",
]


def graph_task_id() -> int:
    """Return the number of the backward pass that this thread is running, -1 outside of any.

    A later pass has a larger number. A pass inside a pass, as reentrant checkpointing makes them, has a
    number of its own. No public name up to torch 2.15.
    """
    return int(private("torch._C", "_current_graph_task_id", "telling backward passes apart")())


def inside_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return graph_task_id() != -1


def surrounding_nodes() -> Iterator[Any]:
    """Yield the nodes in which the backward passes around this thread's own were begun, the innermost first.

    Found on the Python stack: a Python function's backward, or a hook, that called ``backward()``. Skips a
    backward that runs as a node of this thread's own pass. Costs a walk up the stack. torch has no name for
    it up to 2.15.

    Yields:
        The function's node in the graph, or ``None`` for a pass that was begun in a hook.
    """
    engine = private("torch.autograd.graph", "_engine_run_backward", "finding nested backward passes")
    inside_pass = False
    frame: FrameType | None = sys._getframe().f_back  # noqa: SLF001
    while frame is not None:
        if frame.f_code is engine.__code__:
            if inside_pass:
                yield None
            inside_pass = True
        elif inside_pass and frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            yield frame.f_locals["self"]
            inside_pass = False
        frame = frame.f_back


def inside_nested_backward() -> bool:
    """Return whether this thread's backward pass was begun inside another one, at the cost of a walk."""
    return any(True for _ in surrounding_nodes())


def in_final_callback() -> bool:
    """Return whether this thread's backward pass has run all its nodes, with only final callbacks left.

    DDP hands over the buckets of the first pass of a static graph there, all as bucket 0, and waits for
    them at once. No public name up to torch 2.15.
    """
    node = private("torch._C", "_current_autograd_node", "the first pass of a static graph")
    return inside_backward() and node() is None


def before_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this thread's backward pass has computed everything without an error.

    If a communication hook calls this, ``callback`` runs before DistributedDataParallel ends its reduction,
    which DDP queues when its last communication hook has returned. See :func:`after_backward` for the rest.
    """
    queue = getattr(torch.autograd.graph, "queue_callback", None)
    if queue is None:
        engine = private(torch.autograd.Variable, "_execution_engine", "the end of a backward pass")
        queue = engine.queue_callback
    queue(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that this thread is running has ended without an error.

    By then everything that torch does at its end has happened, including the end of DistributedDataParallel's
    reduction. The callback runs in the thread that ends the pass, which is still inside ``backward()``; its
    errors are raised by ``backward()``. Nothing is called if the pass fails.

    ``torch.autograd.graph.queue_callback`` where it exists (2.15), else its private predecessor.
    """
    # DDP queues its own end as soon as its last communication hook has returned. A callback that is queued by
    # a callback runs after it.
    before_end_of_backward(lambda: before_end_of_backward(callback))
