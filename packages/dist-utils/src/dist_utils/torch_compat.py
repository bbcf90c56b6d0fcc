"""The one place that knows how torch versions differ, and the only one that uses private names of torch.

Everything is chosen by feature (does the name exist?), never by comparing versions.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# torch.distributed has these classes, but type checkers do not find them there.
from torch._C._distributed_c10d import GradBucket, Store

# With it an autograd function works on one level of torch.func; no public name up to torch 2.15.
from torch._functorch.utils import enable_single_level_autograd_function

# The traceable collectives have no public names up to torch 2.15.
from torch.distributed import _functional_collectives as _functional
from torch.distributed import distributed_c10d as _c10d

# The mode in which AOTAutograd writes down a graph; no public name up to torch 2.15.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.parallel import DistributedDataParallel

# The step hooks of all optimizers have no public names up to torch 2.15.
from torch.optim import optimizer as _optimizer

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
    "compiling_refused",
    "default_group_timeout",
    "default_store",
    "flushes_denormals",
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
    "is_batched_gradient",
    "keep_versions",
    "linear_operator",
    "mark_stepped",
    "new_named_group",
    "parameter_names",
    "reduce_scatter_single",
    "register_comm_hook",
    "saved_tensor_hooks",
    "step_post_hooks",
    "step_pre_hooks",
    "step_without_hooks",
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

is_batched_gradient: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # noqa: SLF001
"""Whether a tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``, which does not go through
``torch.func``. No public name up to torch 2.15."""

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


def default_group_timeout() -> timedelta:
    """Return how long collectives may take where nobody says. No public name up to torch 2.15."""
    return _c10d.default_pg_timeout


def default_store() -> Store:
    """Return the store of the default process group. No public name for it up to torch 2.15."""
    return _c10d._get_default_store()  # noqa: SLF001


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
    store = default_store()
    limit = timeout or default_group_timeout()
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


def linear_operator(
    name: str,
    parameters: str,
    compute: Callable[..., torch.Tensor],
    transposed: Callable[..., Sequence[Any]],
) -> Callable[..., torch.Tensor]:
    """Make an operator that is linear in one tensor, and that autograd and ``torch.func`` see everywhere.

    Dynamo writes it into its graph as it is, so that every transform that is traced around it meets its
    rules: reverse and forward mode of any order, and vmap in any nesting. AOTAutograd writes down what
    ``compute`` runs in its place, for compilers. An ``autograd.Function`` is taken apart by Dynamo, which
    knows its backward of first order only; ``torch.library.register_autograd`` is refused by ``torch.func``,
    and has no forward mode. Once they have what is missing, either of them replaces this.

    Args:
        name: With a namespace, as in ``"namespace::operator"``, new in this process.
        parameters: What follows the tensor in the operator's schema, as in ``"str kind, SymInt[] splits"``.
        compute: ``(tensor, *arguments)`` -> result, a new tensor; of operators that can be traced. More
            dimensions at the tensor's end are a batch, which it does not look at.
        transposed: ``(*arguments)`` -> the arguments of the transposed map.
    """
    namespace, _, short = name.partition("::")
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{short}(Tensor x, {parameters}) -> Tensor")
    operator: Any = getattr(getattr(torch.ops, namespace), short).default

    class Linear(torch.autograd.function._SingleLevelFunction):  # noqa: SLF001
        """The operator at one level of ``torch.func``: what is below it is up to the levels below."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, keys: Any, *arguments: Any) -> torch.Tensor:
            ctx.arguments = arguments
            below = keys & torch._C._after_autograd_keyset  # noqa: SLF001
            with (
                torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
                torch.enable_grad(),  # for the levels below
                torch.autograd.forward_ad._set_fwd_grad_enabled(True),  # noqa: SLF001
            ):
                result: torch.Tensor = operator.redispatch(below, x, *arguments)
            return result

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
            nothing = (None,) * (1 + len(ctx.arguments))
            return operator(cotangent, *transposed(*ctx.arguments)), *nothing

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
            result: torch.Tensor = operator(tangent, *ctx.arguments)
            return result

    def differentiable(keys: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        with enable_single_level_autograd_function():
            result: torch.Tensor = Linear.apply(x, keys, *arguments)  # type: ignore[attr-defined]
        return result

    def batched(
        info: Any,  # noqa: ARG001
        in_dims: tuple[int | None, ...],
        x: torch.Tensor,
        *arguments: Any,
    ) -> tuple[torch.Tensor, int]:
        result = operator(x.movedim(cast("int", in_dims[0]), -1), *arguments)
        return result, result.ndim - 1

    def traced(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        del func, types, kwargs
        with mode:
            return compute(*args)

    library.impl(operator, compute, "CompositeExplicitAutograd")
    library.impl(operator, differentiable, "Autograd", with_keyset=True)
    torch.library.register_fake(name, compute, lib=library)
    torch.library.register_vmap(name, batched, lib=library)
    torch.library.register_torch_dispatch(name, ProxyTorchDispatchMode, traced, lib=library)
    _OPERATORS.append(library)
    return cast("Callable[..., torch.Tensor]", operator)


_OPERATORS: list[torch.library.Library] = []
"""Kept: an operator lives as long as its library."""


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


def after_surrounding_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the backward pass that this thread's pass was begun in has ended well.

    As :func:`after_backward`, for the outermost pass, which goes on when the passes inside of it are over.
    It takes callbacks only while its own nodes run, so they come with the next node behind the function whose
    backward has begun the inner pass. No public name up to torch 2.15.

    Returns:
        Whether there is such a pass: one in which a Python function's backward called ``backward()``.
    """
    frame, around = sys._getframe(), None  # noqa: SLF001
    while (caller := frame.f_back) is not None:
        if caller.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            around = caller
        frame = caller
    if around is None:
        return False
    following = [node for node, _ in around.f_locals["self"].next_functions if node is not None]
    if not following:
        return False

    def first_of_the_rest(_: Any) -> None:
        handle.remove()
        after_backward(callback)

    handle = following[0].register_prehook(first_of_the_rest)
    return True


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


def saved_tensor_hooks() -> object:
    """Return the hooks that a tensor saved for backward goes through now; ``None`` if there are none.

    They are other ones each time a checkpoint runs its function. No public name up to torch 2.15. torch 2.6
    does not tell: there they seem to be other ones in every call.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001
    if top is None:
        return object()
    hooks = top(False)
    return None if hooks is None else hooks[0]


def register_comm_hook(
    ddp: DistributedDataParallel, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
) -> None:
    """Register a communication hook, and leave nothing behind in a model that takes none any more.

    As after ``_register_builtin_comm_hook``, which leaves no trace in Python: ``ddp.register_comm_hook``
    raises RuntimeError then, and keeps the hook in its list. No public name for that up to torch 2.15.

    Raises:
        RuntimeError: The model has a hook.
    """
    before = list(ddp._comm_hooks)  # noqa: SLF001
    try:
        ddp.register_comm_hook(state, hook)
    except BaseException:
        ddp._comm_hooks[:] = before  # noqa: SLF001
        raise


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the communication hooks that a model has, with their states. No public name up to torch 2.15."""
    return list(ddp._comm_hooks)  # noqa: SLF001


FUSED_CHECK = "_need_device_dtype_check_for_fused"
"""An attribute of fused SGD and Adagrad: the next step has to look at its parameters' devices, as only the
first one does."""

_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__
_STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
_STEP_POST_HOOKS = "_optimizer_step_post_hooks"


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step pre-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    own: Mapping[int, Callable[..., Any]] = getattr(optimizer, _STEP_PRE_HOOKS)
    return {**_optimizer._global_optimizer_pre_hooks, **own}  # noqa: SLF001


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step post-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    own: Mapping[int, Callable[..., Any]] = getattr(optimizer, _STEP_POST_HOOKS)
    return {**_optimizer._global_optimizer_post_hooks, **own}  # noqa: SLF001


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Call an optimizer's ``step`` without any hooks, those of all optimizers included.

    Torch puts what calls them around the ``step`` of a class. No public name up to torch 2.15.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is _CALLS_HOOKS:
        step = step.__wrapped__
    step(optimizer, *arguments)


def without_step_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's attributes for another object that steps without the optimizer's step hooks."""
    return {**attributes, _STEP_PRE_HOOKS: OrderedDict(), _STEP_POST_HOOKS: OrderedDict()}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, though nobody called ``step()``.

    They warn otherwise. The attribute that they ask has no public name up to torch 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001


@contextlib.contextmanager
def keep_versions(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take nothing that happens to these tensors for a write: autograd finds them as it has left them.

    For tensors that get their own memory back in the end. No public name up to torch 2.15.
    """
    keep: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # noqa: SLF001
    with contextlib.ExitStack() as stack:
        for tensor in tensors:  # one by one, since torch 2.6 takes no more
            stack.enter_context(keep(tensor))
        yield


_SUBNORMAL = 5e-324


def flushes_denormals() -> bool:
    """Return whether arithmetic of this thread takes subnormal numbers for zero.

    What ``torch.set_flush_denormal`` sets, of the thread that calls it; torch has no function that reads it.
    """
    return _SUBNORMAL * 1.0 == 0.0


@contextlib.contextmanager
def compiling_refused() -> Iterator[None]:
    """Let a function of ``torch.compile`` raise where it would be compiled."""
    stance = getattr(torch.compiler, "set_stance", None)
    # Whoever has compiled anything has loaded this module, which takes seconds.
    with (
        contextlib.nullcontext()
        if stance is None or "torch._dynamo" not in sys.modules
        else stance("fail_on_recompile")
    ):
        yield
