"""The function that users call, and the handle that it returns."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.averaging import average_like_ddp
from ddp_optim_overlap.bucket_memory import memory_of
from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.ddp_hooks import comm_hooks, register_comm_hook
from ddp_optim_overlap.engine import Engine
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.gradient_release import GradientRelease, require_owned, require_readable
from ddp_optim_overlap.optimizers import OverlappedOptimizers
from ddp_optim_overlap.partial_steps import PartialSteps
from ddp_optim_overlap.refusals import (
    averaged_parameters,
    require_ddp_options,
    require_group,
    require_kinds,
    require_optimizers,
    require_options,
    require_own_parameters,
)
from ddp_optim_overlap.report import StepReport
from ddp_optim_overlap.shared_memory import require_separate_memory
from ddp_optim_overlap.wrappers import inner_ddp, inner_optimizer
from dist_utils.comm_hooks import CommHook
from dist_utils.torch_compat import GradBucket, inside_backward

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OverlapHandle", "OverlapMode", "overlap_optimizer"]


class OverlapMode(Enum):
    """When parameters are stepped."""

    BUCKET = "bucket"
    """Step each bucket's parameters as soon as it is averaged, while later ones are computed and averaged."""
    AFTER_REDUCE = "after_reduce"
    """Step all parameters at the end of ``backward()``, for anything that needs all gradients."""


class OverlapHandle:
    """The handle that :func:`overlap_optimizer` returns. As a context manager it ends the overlap on exit.

    You need not keep it: the overlap lasts as long as the model.

    Attributes:
        optimizers: The user's own optimizers, without their wrappers.
        mode: When parameters are stepped.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: tuple[torch.optim.Optimizer, ...],
        mode: OverlapMode,
        calls: OverlappedOptimizers,
    ) -> None:
        self.optimizers = optimizers
        self.mode = mode
        self._engine = engine
        self._calls = calls

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has finished the last backward pass's step.

        ``backward()`` returns with this rank's parameters stepped, so this call is needed only to learn early
        of another rank's failure, for instance before a checkpoint is written. Without it the next
        ``backward()`` raises on CPUs, before anything is stepped.

        Args:
            timeout: In seconds; ``None`` for as long as the process group allows. On an accelerator nothing
                is waited for.

        Returns:
            What was stepped, and how much of the time was hidden.

        Raises:
            OverlapError: The first error, of its own type; ``backward()`` raises it as ``RuntimeError``.
            ConfigError: A backward pass is running, around this call or in another thread; it continues.
            TimeoutError: A peer has not finished.
        """
        report = self._engine.wait(timeout)
        self._calls.require_unchanged()
        return report

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Make backward passes only average; ``optimizer.step()`` is then an ordinary step.

        Use it on every rank: for evaluation with gradients, and for accumulation without ``no_sync()``.
        """
        if self._engine.removed:
            raise ConfigError("this overlap was removed")
        before, self._engine.paused = self._engine.paused, True
        try:
            yield
        finally:
            self._engine.paused = before

    def remove(self) -> None:
        """End the overlap: the hook still averages, and the ordinary loop steps.

        DDP cannot remove a communication hook. :func:`overlap_optimizer` may be called again. Calling
        this twice is harmless.

        Raises:
            ConfigError: A backward pass is stepping, around this call or in another thread.
        """
        self._engine.refuse_inside_pass()
        self._calls.remove()
        self._engine.remove()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _HookSlot:
    """The state of the hook that DDP keeps for good, so that the engine behind it can be replaced.

    A copy of the model (``deepcopy``, ``torch.save``) has no hook in its reducer, and an empty slot: it
    averages as plain DDP does, until :func:`overlap_optimizer` is called for it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine

    def __getstate__(self) -> dict[str, None]:
        return {"engine": None}


def overlapped_step_hook(state: _HookSlot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket and step its parameters; :func:`overlap_optimizer` registers this hook."""
    if state.engine is None:
        raise ConfigError("a copied hook has no engine: call overlap_optimizer() for this model")
    return state.engine.take(bucket)


def overlap_optimizer(
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    comm_hook: CommHook | None = None,
    comm_state: object = None,
    mode: OverlapMode = OverlapMode.BUCKET,
    clip: ClipPolicy | None = None,
    scaler: torch.amp.grad_scaler.GradScaler | None = None,
    unused: Literal["skip", "step"] = "skip",
    check: bool = False,
    release_gradients: bool = False,
) -> OverlapHandle:
    """Step an optimizer bucket by bucket inside ``backward()``, bitwise equal to an ordinary loop.

    The loop may stay as it is. Its ``optimizer.step()`` then does not step and takes a fraction of a
    millisecond. You may remove it, but it raises errors with their type and notices gradients that were
    changed too late.

    Errors inside ``backward()`` are raised there as ``RuntimeError`` with their text, and by
    ``optimizer.step()`` and ``handle.wait()`` with their type and a report of what was stepped:
    :class:`CommunicationError`, :class:`StepError`. A second backward pass that adds to used gradients raises
    :class:`DoubleBackwardError` at once. If only one rank's step fails, on CPUs the others raise in
    ``handle.wait()``, or in the next ``backward()`` before anything is stepped.

    Args:
        ddp: A model without a communication hook, on every rank. Also a module that was given to
            ``torch.distributed._composable.replicate()``.
        optimizer: One or several optimizers over parameters of ``ddp``. For a wrapper of Accelerate or
            Lightning, the optimizer inside it is used. It stays in use: schedulers, parameter groups,
            ``state_dict`` and ``load_state_dict`` work as always. Any optimizer that steps per parameter
            works, including foreach and fused; it is tried with small values first, and checked in real
            steps. ``AFTER_REDUCE`` also takes optimizers that couple parameters.
        comm_hook: The hook that averages the gradients, as for ``register_comm_hook``. The value of its
            future is used, whether it is the bucket's own buffer or a new tensor. ``None``: bitwise the
            average that DDP computes itself (with one exception: see the documentation's corner cases).
        comm_state: The first argument of ``comm_hook``.
        mode: ``BUCKET`` steps each bucket's parameters at once, ``AFTER_REDUCE`` all of them after the last.
        clip: A :class:`ClipPolicy`. :class:`GlobalNorm` needs ``AFTER_REDUCE``.
        scaler: A ``GradScaler``; needs ``AFTER_REDUCE``. The loop scales the loss and calls
            ``scaler.update()``; ``unscale_`` and ``step`` of the scaler are called here.
        unused: What happens to a parameter that no rank has used (``find_unused_parameters``,
            ``static_graph``): ``"skip"`` leaves it alone, as the ordinary loop does. ``"step"`` steps it
            with a zero gradient, so that momentum and weight decay move it, and saves a small
            all-reduce per bucket.
        check: Raise :class:`WeightReuseError` if a checkpointed block reads a parameter after its step.
            For debugging; costs a little for every parameter.
        release_gradients: Free a bucket's gradients as soon as it is stepped, until the next pass needs the
            memory. Only in ``BUCKET`` mode, and if the optimizers have all trained parameters of the model.
            After ``backward()`` every ``.grad`` is ``None``, as after ``zero_grad()``. Where memory cannot be
            freed page by page (on accelerators, and on CPUs without Linux), ``gradient_as_bucket_view``,
            ``find_unused_parameters`` and ``static_graph`` must be off.

    Returns:
        A handle, which need not be kept.

    Raises:
        ConfigError: The options, the model or the loop would lead to wrong steps, or this is called inside
            ``backward()``.
        UnsupportedOptimizerError: It needs a closure, couples parameters, or is sharded over ranks.
            ``backward()`` and ``optimizer.step()`` raise it for problems that only real steps show.
        UnsupportedGradientError: It cannot step sparse gradients, and the model has some.
        TypeError, ValueError: An argument has the wrong type or value. All errors are raised before any
            communication; ``backward()`` and ``optimizer.step()`` raise a ConfigError for later problems.

    Cost:
        One thread and one private process group, made by the first backward pass. No memory besides the
        optimizer's own; the trial takes a few MiB and a fraction of a second. One all-reduce of a single
        value per step; if parameters may be unused, one of a value per parameter for every bucket. With
        ``release_gradients``, from the second pass on, four buckets of gradients exist at a time instead of
        all; ``backward()`` waits when it gets further ahead, and every pass allocates new memory.

    Example:
        >>> optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)  # doctest: +SKIP
        >>> overlap_optimizer(ddp, optimizer)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     ddp(batch).mean().backward()  # steps, bucket by bucket
        ...     optimizer.step()  # nothing left to do
    """
    given = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    if inside_backward():
        raise ConfigError(
            "overlap_optimizer() inside backward(), whose first gradients may be gone: call it before"
        )
    require_kinds(given, clip, unused)
    optimizers = tuple(map(inner_optimizer, given))
    require_kinds(optimizers, clip, unused)  # two wrappers may hold the same optimizer
    ddp = inner_ddp(ddp)
    require_ddp_options(ddp)  # before the hook is looked at: mixed precision has one of its own
    slot = _own_slot(ddp)
    if not isinstance(mode, OverlapMode):
        raise TypeError(f"mode must be an OverlapMode, got {mode!r}")
    whole = mode is OverlapMode.AFTER_REDUCE
    require_options(whole=whole, clip=clip, scaler=scaler, unused=unused, release_gradients=release_gradients)
    require_own_parameters(ddp, optimizers)
    if comm_hook is not None:
        require_group(ddp, comm_hook, comm_state)
    if not whole:
        require_separate_memory(optimizers)
    tried = require_optimizers(optimizers, ddp.module, whole=whole, clip=clip)

    overlapped = OverlappedOptimizers(
        optimizers,
        tried,
        model=list(ddp.parameters()),
        whole=whole,
        clip=clip,
        scaler=scaler,
    )
    overlapped.refuse_pre_hooks()
    release = _release(ddp, overlapped.parts) if release_gradients else None
    engine = Engine(
        ddp.process_group,
        list(ddp.parameters()),
        overlapped,
        comm_hook or average_like_ddp,
        ddp.process_group if comm_hook is None else comm_state,
        unused_possible=partial(_may_leave_out, weakref.ref(ddp), told=unused == "skip" and not whole),
        model=weakref.ref(ddp),
        check=check,
        release=release,
    )
    if slot is None:
        _register(ddp, engine)
    else:
        if slot.engine is not None:
            slot.engine.gradients.stop()
            engine.known_buckets = slot.engine.known_buckets
        slot.engine = engine
    # A handle may outlive the model, but the engine's views of DDP's buckets must not.
    weakref.finalize(ddp, engine.known_buckets.forget).atexit = False
    overlapped.attach(engine)
    return OverlapHandle(engine, optimizers, mode, overlapped)


def _may_leave_out(ddp: "weakref.ref[DistributedDataParallel]", *, told: bool) -> bool:
    """Whether the ranks must tell which parameters got a gradient. The graph may be made static later."""
    model = ddp()
    return told and model is not None and (model.find_unused_parameters or model.static_graph)


def _release(ddp: DistributedDataParallel, parts: PartialSteps) -> GradientRelease:
    memory = memory_of(list(ddp.parameters()))
    may_leave_out = partial(_may_leave_out, weakref.ref(ddp), told=True)
    require_readable(memory, may_leave_out=may_leave_out(), as_view=ddp.gradient_as_bucket_view)
    require_owned(averaged_parameters(ddp), parts.parameters)
    return GradientRelease(memory, ddp.process_group, steps=parts, may_leave_out=may_leave_out)


def _register(ddp: DistributedDataParallel, engine: Engine) -> None:
    try:
        register_comm_hook(ddp, _HookSlot(engine), overlapped_step_hook)
    except RuntimeError as error:
        engine.remove()
        raise ConfigError(
            "this model already has a communication hook, one of DDP's built-in ones: give its counterpart "
            "to overlap_optimizer as comm_hook= instead, since DDP takes only one"
        ) from error


def _own_slot(ddp: DistributedDataParallel) -> _HookSlot | None:
    """Return the slot that an earlier, removed overlap left in the model; raise if another hook is there."""
    for hook, state in comm_hooks(ddp):
        if not isinstance(state, _HookSlot):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise ConfigError(
                f"this model already has the communication hook {name}: give it to overlap_optimizer as "
                "comm_hook= instead, since DDP takes only one"
            )
        if state.engine is None:
            continue
        if not state.engine.removed:
            raise ConfigError("this model already has an overlapped optimizer: remove() that one first")
        return state
    return None
