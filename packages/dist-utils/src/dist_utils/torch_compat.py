"""The one place that knows how torch versions differ, and the only one that uses private names of torch.

Everything is chosen by feature (does the name exist?), never by comparing versions.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# torch.distributed.GradBucket is this class, but type checkers do not find it there.
from torch._C._distributed_c10d import GradBucket

# The traceable collectives have no public names up to torch 2.15.
from torch.distributed import _functional_collectives as _functional
from torch.distributed import distributed_c10d as _c10d
from torch.nn.parallel import DistributedDataParallel

# The only way to see every operator that runs, C++ ones too; no public name up to torch 2.15.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUSED_CHECK",
    "GROUPS_END_WITHOUT_GIL",
    "GradBucket",
    "OperatorWatch",
    "after_backward",
    "all_gather_single",
    "before_end_of_backward",
    "comm_hooks",
    "function_transforms_active",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_all_to_all_single",
    "graph_task_id",
    "group_timeout",
    "in_final_callback",
    "inside_backward",
    "inside_nested_backward",
    "is_accelerator",
    "mark_stepped",
    "new_named_group",
    "parameter_names",
    "reduce_scatter_single",
    "step_pre_hooks",
    "tensor_version",
    "traceable_collectives",
    "without_step_hooks",
]

traceable_collectives: Any = torch.ops._c10d_functional  # noqa: SLF001
"""The collectives as operators that ``torch.compile`` sees: out of place, started at once, waited for by
``wait_tensor``, groups by name. The public functions over them come with gradients of their own."""

# torch.autograd.Function asks the same, to choose between its two ways; no public name up to torch 2.15.
function_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
"""Whether a transform of ``torch.func`` is running."""

GROUPS_END_WITHOUT_GIL: bool = hasattr(dist.ProcessGroup, "shutdown")
"""Whether a group may be destroyed as soon as its last collective returned. In torch 2.6 the destructor
joins Gloo's threads while it holds the GIL, and such a thread may be waiting for the GIL to drop the
collective's tensors: a deadlock (seen with 2.6.0 in every long run; never with 2.9.1 or newer)."""


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather one tensor per rank into one output tensor.

    ``torch.distributed.all_gather_single`` where it exists (2.13), else its older name
    ``all_gather_into_tensor``, which newer versions deprecate.

    Args:
        output: ``W * input.numel()`` elements, in rank order.
        input: This rank's part.
        group: The process group; ``None`` is WORLD.
        async_op: Return a work handle and do not wait.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work | None", gather(output, input, group=group, async_op=async_op))


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce one input tensor over the ranks and leave each rank its part.

    ``torch.distributed.reduce_scatter_single`` where it exists (2.13), else its older name
    ``reduce_scatter_tensor``, which newer versions deprecate.

    Args:
        output: This rank's part, ``input.numel() / W`` elements.
        input: All parts, in rank order.
        op: The reduction.
        group: The process group; ``None`` is WORLD.
        async_op: Return a work handle and do not wait.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast("dist.Work | None", scatter(output, input, op, group=group, async_op=async_op))


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is of the machine's kind of accelerator.

    torch 2.6 raises when asked for the current accelerator where there is none.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a collective of ``group`` on ``device`` may take, or ``None`` if torch does not say.

    ``new_group`` gives a new group its backend's default timeout, not that of the group it is made
    from, so a private group needs this. No public name up to torch 2.15.
    """
    try:
        backend: Any = group._get_backend(device)  # noqa: SLF001
    except RuntimeError:  # no backend of this group serves the device
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def new_named_group(
    name: str, ranks: list[int], *, backend: str, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, which alone take part, under a name that the caller chooses.

    ``new_group(use_local_synchronization=True)`` makes up the name from the number of groups that a rank
    has at the moment. Where that differs between ranks the new group hangs, and after a group was
    destroyed its name, and with it the addresses left in the store, are used again. torch 2.15 has mended
    the first of the two. The public replacement would be that call; no version takes a name yet.

    Args:
        name: The same on all ``ranks``, and never used before in this job.
        ranks: Global ranks in group order, this one among them.
        backend: As for ``init_process_group``.
        timeout: Of its collectives; ``None`` for torch's default.

    Cost:
        Collective among ``ranks``: returns when they are connected.
    """
    rank = ranks.index(dist.get_rank())
    kinds = {part.partition(":")[2] or part for part in backend.split(",")}
    if len(kinds) == 1:  # as one name, or the group has no default backend, and warns of it at its end
        (backend,) = kinds
    helper: Any = _c10d._new_process_group_helper  # noqa: SLF001
    store = _c10d._get_default_store()  # noqa: SLF001
    limit = timeout or _c10d.default_pg_timeout
    group, _ = helper(
        len(ranks), rank, ranks, dist.Backend(backend), store, name, timeout=limit, group_desc=name
    )
    _c10d._world.pg_group_ranks[group] = {other: index for index, other in enumerate(ranks)}  # noqa: SLF001
    return cast("dist.ProcessGroup", group)


def functional_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of ``tensor`` over ``group`` as a new tensor, traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_reduce(tensor, "sum", group)
    return result


def functional_all_to_all_single(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the ``r``-th of W equal parts of ``tensor`` to rank ``r``; traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_to_all_single(tensor, None, None, group)
    return result


def functional_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's ``tensor`` along dimension 0; traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_gather_tensor(tensor, 0, group)
    return result


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a context manager: calls a function with the name of every operator before this thread runs it.

    Args:
        notice: Gets names such as ``"c10d::allreduce_"``; its errors come out where the operator is used.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notice = notice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Be called by torch in place of the operator."""
        del types
        self._notice(func.name())
        return func(*args, **(kwargs or {}))


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

    Seen from the calls that led here: a function's or a hook's backward in Python, which called
    ``backward()``. Costs a walk up the stack. torch has no name for it up to 2.15.
    """
    frame, passes = sys._getframe(), 0  # noqa: SLF001
    while (caller := frame.f_back) is not None:
        if caller.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        passes += caller.f_code is torch.autograd.backward.__code__
        frame = caller
    return passes > 1


def in_final_callback() -> bool:
    """Return whether this thread's backward pass is over, and only its final callbacks are still run.

    DDP hands over the buckets of the first pass of a static graph there, all as bucket 0, and waits for
    them at once. No public name up to torch 2.15.
    """
    return graph_task_id() != -1 and torch._C._current_autograd_node() is None  # noqa: SLF001


def before_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this thread's backward pass has computed everything, if it ends well.

    Called from a communication hook: before DistributedDataParallel ends its reduction, which it asks for
    when its last communication hook has returned. See :func:`after_backward` for the rest.
    """
    _queue_callback(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that this thread is running has ended well.

    Everything that torch does at its end has happened then, the end of DistributedDataParallel's
    reduction included. The callback runs in the thread that ends the pass, which is still inside
    ``backward()``; an error of it is an error of ``backward()``. Nothing is called if the pass fails.

    ``torch.autograd.graph.queue_callback`` where it exists (2.15), else its private predecessor.
    """
    # DDP queues its own end as soon as its last communication hook has returned. A callback that is
    # queued by a callback comes behind it.
    _queue_callback(lambda: _queue_callback(callback))


def _queue_callback(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001
    queue = getattr(torch.autograd.graph, "queue_callback", None) or engine.queue_callback
    queue(callback)


def parameter_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a model's parameters by the names that they have without wrappers.

    ``DistributedDataParallel`` puts ``module.`` before all names, ``torch.compile`` puts ``_orig_mod.``
    before those of a compiled module, wherever it stands; the latter has no public name up to torch 2.15.
    """
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # noqa: SLF001
        model = inner
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): parameter
        for name, parameter in model.named_parameters()
    }


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written in place. No public way to read it up to torch 2.15."""
    return tensor._version  # noqa: SLF001


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the communication hooks that a model has, with their states. No public name up to torch 2.15."""
    return list(ddp._comm_hooks)  # noqa: SLF001


FUSED_CHECK = "_need_device_dtype_check_for_fused"
"""An attribute of fused SGD and Adagrad: the next step has to look at its parameters' devices, as only the
first one does."""

_STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
_STEP_POST_HOOKS = "_optimizer_step_post_hooks"


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return what ``register_step_pre_hook`` has registered. No public name up to torch 2.15."""
    return cast("Mapping[int, Callable[..., Any]]", getattr(optimizer, _STEP_PRE_HOOKS))


def without_step_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's attributes for another object that steps without the optimizer's step hooks."""
    return {**attributes, _STEP_PRE_HOOKS: OrderedDict(), _STEP_POST_HOOKS: OrderedDict()}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, though nobody called ``step()``.

    They warn otherwise. The attribute that they ask has no public name up to torch 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
