"""What two or more packages need of torch beyond its public names: a small surface that siblings may rely on.

What differs between torch versions is chosen by feature (does the name exist?), never by comparing versions.
Private names are looked up when they are used, by :func:`private`: a torch that lacks one breaks only the
function that needs it, which raises :class:`MissingTorchFeatureError`. What one package alone needs of torch
is in that package, by the same function.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.profiler import record_function

if TYPE_CHECKING:  # torch.distributed has these classes, but type checkers do not find them there
    from torch._C._distributed_c10d import GradBucket, Store
else:
    from torch.distributed import GradBucket, Store

__all__ = [
    "GROUPS_END_WITHOUT_GIL",
    "GradBucket",
    "MissingTorchFeatureError",
    "after_backward",
    "all_gather_single",
    "at_end_of_backward",
    "default_store",
    "every_thread",
    "graph_task_id",
    "group_timeout",
    "inside_backward",
    "inside_nested_backward",
    "private",
    "profiler_range",
    "reduce_scatter_single",
    "start_traceable_collective",
    "surrounding_nodes",
    "tensor_version",
    "transformed_as",
    "version_reader",
]


class MissingTorchFeatureError(RuntimeError):
    """This torch lacks a name that a feature is built on. Everything else works without it."""


def private(owner: object, name: str, purpose: str) -> Any:
    """Return what torch calls by a private name.

    Every use of such a name goes through this function, in one named function of a package: a search for it
    finds them all, and a torch that has renamed one breaks nothing but that function.

    Args:
        owner: What has the name: the name of a module of torch, or an object.
        name: The name.
        purpose: What does not work without it, as in ``"the end of a backward pass"``.

    Raises:
        MissingTorchFeatureError: This torch does not have it.

    Cost:
        A tenth of a microsecond.

    Example:
        >>> private("torch._C", "_current_graph_task_id", "the number of a backward pass")()
        -1
    """
    try:
        if isinstance(owner, str):
            owner = sys.modules.get(owner) or importlib.import_module(owner)
        return getattr(owner, name)
    except (ImportError, AttributeError):
        where = owner if isinstance(owner, str) else getattr(owner, "__name__", type(owner).__name__)
        raise MissingTorchFeatureError(
            f"torch {torch.__version__} has no {where}.{name}, which is needed for {purpose}"
        ) from None


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


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that this thread is running has no node left to run.

    DistributedDataParallel ends its reduction in such a callback, which it queues when its last communication
    hook has returned. They run in the order in which they were queued, in the thread that ends the pass,
    which is still inside ``backward()``; their errors are raised by ``backward()``. Nothing is called if the
    pass fails.

    ``torch.autograd.graph.queue_callback`` where it exists (2.15), else its private predecessor.
    """
    queue = getattr(torch.autograd.graph, "queue_callback", None)
    if queue is None:
        engine = private(torch.autograd.Variable, "_execution_engine", "the end of a backward pass")
        queue = engine.queue_callback
    queue(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Do the same as :func:`at_end_of_backward`, after all that torch does at the end of the pass.

    That includes the end of DistributedDataParallel's reduction.
    """
    at_end_of_backward(partial(at_end_of_backward, callback))  # queued behind all others


GROUPS_END_WITHOUT_GIL: bool = hasattr(dist.ProcessGroup, "shutdown")
"""Whether a group may be destroyed as soon as its last collective returned. In torch 2.6 the destructor
joins Gloo's threads while it holds the GIL, and such a thread may be waiting for the GIL to drop the
collective's tensors: a deadlock (seen with 2.6.0 in every long run; never with 2.9.1 or newer)."""


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of ``group`` on ``device`` may take; torch's default if it does not say.

    ``new_group`` gives a new group its backend's default timeout, not that of the group it is made
    from, so a private group needs this. No public name up to torch 2.15.
    """
    try:
        backend = private(group, "_get_backend", "the timeout of a process group")(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in one that knows no options, up to torch 2.9.
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
    except RuntimeError:  # no backend of this group serves the device, or it has no options
        options = None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def default_store() -> Store:
    """Return the store of the default process group. No public name for it up to torch 2.15."""
    store = private("torch.distributed.distributed_c10d", "_get_default_store", "agreement between ranks")
    return cast("Store", store())


all_gather_single: Callable[..., Any]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather one tensor per rank into one tensor: ``(output, input, group=None, async_op=False)``.

``torch.distributed.all_gather_single`` where it exists (2.13), else its older name
``all_gather_into_tensor``, which newer versions deprecate.
"""

reduce_scatter_single: Callable[..., Any]
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce one tensor and leave each rank its part: ``(output, input, op=SUM, group=None, async_op=False)``.

``torch.distributed.reduce_scatter_single`` where it exists (2.13), else its older name
``reduce_scatter_tensor``, which newer versions deprecate.
"""


def start_traceable_collective(
    name: str, tensor: torch.Tensor, *arguments: Any
) -> Callable[[], torch.Tensor]:
    """Start a collective that ``torch.compile`` sees; return a function that waits for its result.

    The result is in new memory. The public functions over these operators have gradients of their own. No
    public name up to torch 2.15.

    Args:
        name: Its name among the operators ``torch.ops._c10d_functional``.
        tensor: What this rank contributes.
        arguments: What else the operator takes; the group by its ``group_name``.

    Example:
        >>> wait = start_traceable_collective("all_reduce", x, "sum", group.group_name)  # doctest: +SKIP
        >>> total = wait()  # doctest: +SKIP
    """
    operators, purpose = torch.ops._c10d_functional, "collectives that torch.compile sees"  # noqa: SLF001
    started = private(operators, name, purpose)(tensor, *arguments)
    wait: Callable[[torch.Tensor], torch.Tensor] = private(operators, "wait_tensor", purpose)
    return lambda: wait(started)


_NO_RANGE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that names what runs in it for a profiler, if one runs in this process.

    ``torch.profiler.record_function`` alone takes 25 microseconds where no profiler runs, this 1.5 (torch
    2.13, two busy cores). Whether a profiler runs is checked on entry, for all threads at once: one that
    ``torch.profiler.profile`` starts on any thread counts, and ``torch.autograd.profiler.emit_nvtx`` and
    ``emit_itt``. No public name up to torch 2.15; where torch does not tell, it is always recorded.

    Args:
        name: The name of the range.

    Example:
        >>> with profiler_range("mine:bucket_0"):
        ...     total = 1 + 1
    """
    return record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NO_RANGE


def every_thread() -> Any | None:
    """Return the ``experimental_config`` with which ``torch.profiler.profile`` sees every thread.

    Otherwise it sees the thread that started it, and those of ``backward()``: not an
    :class:`~dist_utils.OrderedWorker`'s. No public name up to torch 2.15.

    Returns:
        ``None`` where torch has no such option, as in 2.6.

    Raises:
        MissingTorchFeatureError: torch has renamed it.

    Example:
        >>> with torch.profiler.profile(experimental_config=every_thread()) as profiler:  # doctest: +SKIP
        ...     loss.backward()
    """
    config = private("torch._C._profiler", "_ExperimentalConfig", "a profiler that sees every thread")
    try:
        return config(profile_all_threads=True)
    except TypeError:
        return None


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written in place."""
    return version_reader()(tensor)


def version_reader() -> Callable[[torch.Tensor], int]:
    """Return :func:`tensor_version` for many tensors. No public way to read versions up to torch 2.15."""
    read: Callable[[torch.Tensor], int] = private(
        torch.Tensor, "_version", "noticing writes in place"
    ).__get__
    return read


def transformed_as(tensor: torch.Tensor) -> str:
    """Describe what transforms of ``torch.func`` and forward mode have made of a tensor; ``""`` if nothing.

    No public names for it up to torch 2.15.
    """
    purpose = "recognizing transforms of torch.func"
    is_wrapped = private("torch._C._functorch", "is_functorch_wrapped_tensor", purpose)
    is_batch = private("torch._C._functorch", "is_batchedtensor", purpose)
    dimension = private("torch._C._functorch", "maybe_get_bdim", purpose)
    unwrapped = private("torch._C._functorch", "get_unwrapped", purpose)
    found = []
    while True:
        dual: Any = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            found.append("with a tangent")
        if not is_wrapped(tensor):
            return ", ".join(found)
        inner = unwrapped(tensor)
        if is_batch(tensor):
            found.append(f"a batch of {inner.shape[dimension(tensor)]}")
        tensor = inner
