"""Backward passes: which one is running, and what to do when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

__all__ = [
    "after_backward",
    "after_surrounding_backward",
    "before_end_of_backward",
    "graph_task_id",
    "in_final_callback",
    "inside_backward",
    "inside_nested_backward",
    "outermost_root",
]


def inside_backward() -> bool:
    """Return whether this thread is running a backward pass. No public name up to torch 2.15."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def graph_task_id() -> int:
    """Return the number of the backward pass that this thread is running, -1 outside of any.

    A later pass has a larger number. A pass inside a pass, as reentrant checkpointing makes them, has a
    number of its own. No public name up to torch 2.15.
    """
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


def inside_nested_backward() -> bool:
    """Return whether this thread's backward pass was begun inside another one.

    Found on the Python stack: a function's backward or a hook in Python that called ``backward()``. Costs a
    walk up the stack. torch has no name for it up to 2.15.
    """
    return any(True for _ in _nodes_around(sys._getframe()))  # noqa: SLF001


def _nodes_around(frame: FrameType) -> Iterator[FrameType | None]:
    """Yield the frames of Python functions' backwards in which inner passes were begun, the innermost first.

    Skips a backward that runs as a node of this thread's own pass. Yields ``None`` for a pass begun in a
    hook.
    """
    inside_pass = False
    while (caller := frame.f_back) is not None:
        if caller.f_code is torch.autograd.graph._engine_run_backward.__code__:  # noqa: SLF001
            if inside_pass:
                yield None
            inside_pass = True
        elif inside_pass and caller.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            yield caller
            inside_pass = False
        frame = caller


def outermost_root() -> torch.Tensor | None:
    """Return a root tensor of the outermost backward pass around this call.

    ``None`` where the stack does not show it: outside of any pass, and on the engine's threads for
    accelerators. Costs a walk up the stack. torch has no name for it up to 2.15.
    """
    outermost, frame = None, sys._getframe().f_back  # noqa: SLF001
    while frame is not None:
        if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:  # noqa: SLF001
            outermost = frame
        elif frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            outermost = None  # a node of a pass further out
        frame = frame.f_back
    roots = () if outermost is None else outermost.f_locals["t_outputs"]
    return next((root for root in roots if isinstance(root, torch.Tensor)), None)


def after_surrounding_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the outermost backward pass around this thread's has ended without an error.

    Like :func:`after_backward`, for the outermost pass, which continues when the passes inside it are over.
    It accepts callbacks only while its own nodes run, so the callback is queued by the next node after the
    function whose backward began the inner pass. No public name up to torch 2.15.

    Returns:
        Whether there is such a pass, one in which a Python function's backward called ``backward()``.
    """
    nodes = [node for node in _nodes_around(sys._getframe()) if node is not None]  # noqa: SLF001
    if not nodes:
        return False
    around = nodes[-1]
    following = [node for node, _ in around.f_locals["self"].next_functions if node is not None]
    if not following:
        return False

    def first_of_the_rest(_: Any) -> None:
        handle.remove()
        after_backward(callback)

    handle = following[0].register_prehook(first_of_the_rest)
    return True


def in_final_callback() -> bool:
    """Return whether this thread's backward pass has run all its nodes, with only final callbacks left.

    DDP hands over the buckets of the first pass of a static graph there, all as bucket 0, and waits for
    them at once. No public name up to torch 2.15.
    """
    return graph_task_id() != -1 and torch._C._current_autograd_node() is None  # noqa: SLF001


def before_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this thread's backward pass has computed everything without an error.

    If a communication hook calls this, ``callback`` runs before DistributedDataParallel ends its reduction,
    which DDP queues when its last communication hook has returned. See :func:`after_backward` for the rest.
    """
    _queue_callback(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that this thread is running has ended without an error.

    By then everything that torch does at its end has happened, including the end of DistributedDataParallel's
    reduction. The callback runs in the thread that ends the pass, which is still inside ``backward()``; its
    errors are raised by ``backward()``. Nothing is called if the pass fails.

    ``torch.autograd.graph.queue_callback`` where it exists (2.15), else its private predecessor.
    """
    # DDP queues its own end as soon as its last communication hook has returned. A callback that is queued by
    # a callback runs after it.
    _queue_callback(lambda: _queue_callback(callback))


def _queue_callback(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001
    queue = getattr(torch.autograd.graph, "queue_callback", None) or engine.queue_callback
    queue(callback)
