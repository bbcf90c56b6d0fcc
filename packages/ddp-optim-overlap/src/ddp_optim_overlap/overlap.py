"""The function that users call, and the handle that it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.errors import ConfigError, StepReport
from ddp_optim_overlap.model import (
    averaged_parameters,
    inner_ddp,
    inner_optimizer,
    require_ddp_options,
    require_group,
    require_one_first_bucket,
    sparse_parameters,
)
from ddp_optim_overlap.optimizers.admission import require_supported
from ddp_optim_overlap.optimizers.step_calls import LoopStepper
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.passes.release import GradientRelease
from ddp_optim_overlap.slot import EngineSlot, another_hook, comm_hooks, register_comm_hook, slot_of
from dist_utils.comm_hooks import BucketWatch, CommHook
from dist_utils.torch_compat import inside_backward

if TYPE_CHECKING:
    from typing_extensions import Self


class OverlapHandle:
    """The handle that :func:`overlap_optimizer` returns. As a context manager it ends the overlap on exit.

    You need not keep it: the overlap lasts as long as the model.

    Attributes:
        optimizers: The user's own optimizers, without their wrappers.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: tuple[torch.optim.Optimizer, ...],
        stepper: LoopStepper,
    ) -> None:
        self.optimizers = optimizers
        self._engine = engine
        self._stepper = stepper

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has finished the last backward pass's step.

        ``backward()`` returns with this rank's parameters stepped, so this call is needed only to learn early
        of another rank's failure, for instance before a checkpoint is written. Without it the next
        ``backward()`` raises, before anything is averaged.

        Args:
            timeout: In seconds; ``None`` for as long as the process group allows, as always on an
                accelerator.

        Returns:
            What was stepped, and how much of the time was hidden.

        Raises:
            OverlapError: The first error, which ``backward()`` may have raised before.
            ConfigError: A backward pass is running, around this call or in another thread; it continues.
            TimeoutError: A peer has not finished.
        """
        report = self._engine.wait(timeout)
        self._stepper.require_unchanged()
        return report

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Make backward passes only average; ``optimizer.step()`` is then an ordinary step, without ``clip``.

        Use it on every rank: for evaluation with gradients, and for accumulation without ``no_sync()``. As in
        the ordinary loop, a pass may add to gradients that a step has used, once ``step()`` was called for
        that.
        """
        gradients = self._engine.gradients
        before, added = self._engine.paused, gradients.may_be_added_to
        gradients.may_be_added_to = not self._stepper.expects_a_call()
        self._engine.paused = True
        try:
            yield
        finally:
            self._engine.paused = before
            gradients.may_be_added_to = added

    def remove(self) -> None:
        """End the overlap: the hook still averages, and the ordinary loop steps.

        DDP cannot remove a communication hook. :func:`overlap_optimizer` may be called again. After an error
        every ``.grad`` is ``None``: no step can use them again. Calling this twice is harmless.

        Raises:
            ConfigError: A backward pass is stepping, around this call or in another thread.
        """
        self._engine.refuse_inside_pass("remove()")
        self._engine.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def overlap_optimizer(
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    comm_hook: CommHook | None = None,
    comm_state: object = None,
    steps_per_parameter: bool = False,
    clip: ClipPolicy | None = None,
    unused: Literal["skip", "step"] = "skip",
    release_gradients: bool = False,
) -> OverlapHandle:
    """Step an optimizer bucket by bucket inside ``backward()``, bitwise equal to an ordinary loop.

    The loop may stay as it is. Its ``optimizer.step()`` then does not step and takes a fraction of a
    millisecond. You may remove it, but it raises errors with their type and notices gradients that were
    changed too late.

    On CPUs the thread of ``backward()`` steps at its end, where it would only wait for the last averages: a
    part as soon as its step takes six milliseconds, and the rest at last. On accelerators each step is
    enqueued behind its average.

    ``backward()`` raises errors with a report of what was stepped: :class:`CommunicationError`,
    :class:`StepError`. A second backward pass that adds to used gradients raises :class:`DoubleBackwardError`
    at once. If only one rank's step fails, the others raise in ``handle.wait()``, or in the next
    ``backward()`` before anything is averaged. An error is raised again by every later call, also by
    ``optimizer.step()``, until ``handle.remove()``.

    Args:
        ddp: A model without a communication hook, on every rank. Also a module that was given to
            ``torch.distributed._composable.replicate()``, which communicates now if it has not run yet.
        optimizer: One or several optimizers over parameters of ``ddp``. For a wrapper of Accelerate or
            Lightning, the optimizer inside it is used. It stays in use: schedulers, parameter groups,
            ``state_dict`` and ``load_state_dict`` work as always. Every class of ``torch.optim`` that steps
            per parameter is taken (all but LBFGS), with foreach and fused; other classes if declared.
        comm_hook: The hook that averages the gradients, as for ``register_comm_hook``. The value of its
            future is used, whether it is the bucket's own buffer or a new tensor. ``None``: bitwise the
            average that DDP computes itself (with one exception: see the documentation's limits).
        comm_state: The first argument of ``comm_hook``.
        steps_per_parameter: Declare that ``optimizer`` steps per parameter although its class is none of
            torch's: see :func:`declare_steps_per_parameter` for what that means, and to declare a class once.
            A short trial on a small copy must agree.
        clip: A :class:`ClipPolicy`. For the norm of all gradients, and for a ``GradScaler``, use the ordinary
            loop: both need the last gradient before the first step.
        unused: What happens to a parameter that no rank has used (``find_unused_parameters``,
            ``static_graph``): ``"skip"`` leaves it alone, as the ordinary loop does. ``"step"`` steps it
            with a zero gradient, so that momentum and weight decay move it, and saves a small
            all-reduce per bucket.
        release_gradients: Free a bucket's gradients as soon as it is stepped, until the next pass needs the
            memory. Only if the optimizers have all trained parameters of the model. After ``backward()``
            every ``.grad`` is ``None``, as after ``zero_grad()``. Where memory cannot be freed page by page
            (on accelerators, and on CPUs without Linux), ``gradient_as_bucket_view``,
            ``find_unused_parameters`` and ``static_graph`` must be off.

    Returns:
        A handle, which need not be kept.

    Raises:
        ConfigError: The options, the model or the loop would lead to wrong steps, an optimizer is overlapped
            already, or this is called inside ``backward()``.
        UnsupportedOptimizerError: It needs a closure, is sharded over ranks, is none of torch's and not
            declared, or the trial has found that it does not step per parameter.
        UnsupportedGradientError: It is one of torch's, and cannot step the sparse gradients of the model.
        TypeError, ValueError: An argument has the wrong type or value. All errors are raised before any
            communication; ``backward()`` and ``optimizer.step()`` raise a ConfigError for later problems.

    Cost:
        One private process group, with a thread that sleeps until the end, made by the first backward pass.
        No memory besides the optimizer's own. One all-reduce of five numbers per step, and one of a value per
        parameter if some may be unused. With ``release_gradients``, from the second pass on, four buckets of
        gradients exist at a time instead of all; ``backward()`` waits when it gets further ahead, and every
        pass allocates new memory.

    Example:
        >>> optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)  # doctest: +SKIP
        >>> overlap_optimizer(ddp, optimizer)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     ddp(batch).mean().backward()  # steps, bucket by bucket
        ...     optimizer.step()  # nothing left to do
    """
    given = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if inside_backward():
        raise ConfigError(
            "overlap_optimizer() inside backward(), whose first gradients may be gone: call it before"
        )
    optimizers = tuple(dict.fromkeys(map(inner_optimizer, given)))  # one that is given twice steps once
    _require_arguments(optimizers, clip, unused)
    ddp = inner_ddp(ddp)
    require_ddp_options(ddp)  # before the hook is looked at: mixed precision has one of its own
    require_one_first_bucket(ddp)
    slot = _own_slot(ddp)
    if comm_hook is not None:
        require_group(ddp, comm_hook, comm_state)
    sparse = sparse_parameters(ddp)
    require_supported(optimizers, declared=steps_per_parameter, sparse=sparse)
    if sparse and clip is not None:
        raise ConfigError(f"gradients of {', '.join(sparse.values())} are sparse: they cannot be clipped")

    stepper = LoopStepper(optimizers, clip=clip, sparse=sparse)
    stepper.require_averaged(averaged_parameters(ddp))
    engine = Engine(
        ddp,
        stepper,
        comm_hook,
        comm_state,
        skips_unused=unused == "skip",
        release=GradientRelease(ddp, stepper.parts) if release_gradients else None,
        passes=0 if slot is None or slot.engine is None else slot.engine.passes,
    )
    try:
        stepper.attach(engine)
        if slot is None:
            slot = EngineSlot()
            slot.put(engine)
            register_comm_hook(ddp, slot, slot.hook)
    except BaseException:
        engine.remove()
        raise
    slot.put(engine)
    slot.watch = slot.watch or BucketWatch(ddp, "the overlapped step", slot)
    return OverlapHandle(engine, optimizers, stepper)


def _require_arguments(
    optimizers: tuple[torch.optim.Optimizer, ...], clip: ClipPolicy | None, unused: str
) -> None:
    """Raise if an argument has the wrong type or value."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not optimizers:
        raise ConfigError("there is no optimizer to step")
    if clip is not None and not isinstance(clip, ClipPolicy):
        raise TypeError(f"clip must be a ClipPolicy, got {clip!r}")
    if unused not in ("skip", "step"):
        raise ValueError(f"unused must be 'skip' or 'step', got {unused!r}")


def _own_slot(ddp: DistributedDataParallel) -> EngineSlot | None:
    """Return the slot that an earlier, removed overlap left in the model; raise if another hook is there."""
    for hook, _ in comm_hooks(ddp):
        slot = slot_of(hook)
        if slot is None or slot.make is not None or slot.engine is None:  # else it is a drop-in's
            raise another_hook(hook)
        if not slot.engine.is_removed:
            raise ConfigError("this model already has an overlapped optimizer: remove() that one first")
        return slot
    return None
