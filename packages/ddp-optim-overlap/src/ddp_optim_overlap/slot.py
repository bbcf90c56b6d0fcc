"""The part of an overlap that DDP keeps for good: its communication hook, and the engine behind it."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.model import require_ddp_options
from ddp_optim_overlap.passes.engine import Engine
from dist_utils.comm_hooks import BucketWatch
from dist_utils.torch_compat import GradBucket, private


class EngineSlot:
    """Passes buckets to an engine, which can be replaced, as a hook cannot. It ends with the model.

    A copy of the model (``deepcopy``, ``torch.save``) has no hook in its reducer, and an empty slot: it
    averages as plain DDP does, until it gets a hook of its own.

    Args:
        make: Makes the engine, before the first forward pass of the model that has the hook: called with the
            model, and the state that the hook was registered with.

    Attributes:
        make: As given.
        engine: The engine, if there is one yet.
        watch: Is told of every bucket, if set.
    """

    def __init__(self, make: Callable[[DistributedDataParallel, object], Engine] | None = None) -> None:
        self.make = make
        self.engine: Engine | None = None
        self.watch: BucketWatch | None = None
        self._end: weakref.finalize[..., EngineSlot] | None = None

    def __reduce__(self) -> tuple[type["EngineSlot"], tuple[()]]:
        return EngineSlot, ()

    def put(self, engine: Engine) -> None:
        """Pass buckets to this engine from now on."""
        if self._end is not None:
            self._end.detach()  # it would keep the engine before
        self._end = weakref.finalize(self, engine.remove)
        self._end.atexit = False
        self.engine = engine

    def hook(self, hook_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the communication hook for one bucket."""
        del hook_state
        if self.watch is not None:
            self.watch.bucket_came()
        if self.engine is None:
            raise ConfigError(
                "this hook has no engine: register it before the model is called, for one model, not inside "
                "another hook; a copy of a hook needs overlap_optimizer() for its own model"
            )
        return self.engine.hook(bucket)


@functools.cache
def start_before_forward() -> None:
    """Let every DDP model start the engines of its hooks when it is called, or takes part in ``join()``.

    A global forward pre-hook would do, too, but every module in the process would call it, and no compiler
    can trace it. ``replicate()`` calls the same method. No public name up to torch 2.15.
    """
    pre_forward: Any = private(DistributedDataParallel, "_pre_forward", "finding the model of a hook")
    untraced: Any = torch.compiler.disable  # what a start asks cannot be traced
    start = untraced(_start)

    @functools.wraps(pre_forward)
    def start_before(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        start(ddp)
        return pre_forward(ddp, *args, **kwargs)

    model_class: Any = DistributedDataParallel
    join_hook = model_class.join_hook

    @functools.wraps(join_hook)
    def start_before_join(ddp: DistributedDataParallel, **options: Any) -> Any:
        start(ddp)  # a rank without any data never calls the model
        return join_hook(ddp, **options)

    model_class._pre_forward = start_before  # noqa: SLF001
    model_class.join_hook = start_before_join


before_start: list[Callable[[DistributedDataParallel], None]] = []
"""Called before, with every model: may register a hook."""


def _start(ddp: DistributedDataParallel) -> None:
    for call in before_start:
        call(ddp)
    for hook, state in comm_hooks(ddp):
        slot = slot_of(hook)
        if slot is not None and slot.make is not None and slot.engine is None:
            require_ddp_options(ddp)
            slot.put(slot.make(ddp, state))


def register_comm_hook(
    ddp: DistributedDataParallel, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
) -> None:
    """Register the communication hook of a model that has none in Python, or change nothing.

    A model accepts none after ``_register_builtin_comm_hook``, which leaves no trace in Python:
    ``ddp.register_comm_hook`` then raises RuntimeError, but keeps the hook in its list. No public name for
    that up to torch 2.15.

    Raises:
        ConfigError: The model has a built-in hook.
    """
    hooks = comm_hooks(ddp)
    before = list(hooks)
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        hooks[:] = before
        raise another_hook() from error


def another_hook(hook: object = None) -> ConfigError:
    """Return the error for a model that has a communication hook already: this one, or a built-in one."""
    name = "a built-in one" if hook is None else getattr(hook, "__qualname__", type(hook).__name__)
    return ConfigError(
        f"this model already has a communication hook, {name}: give it, or its counterpart, to "
        "overlap_optimizer as comm_hook= instead, since DDP takes only one"
    )


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return a model's own list of its communication hooks and states. No public name up to torch 2.15.

    A copy of a model has a copy of the list, but its reducer has no hook: an empty slot is taken out.
    """
    hooks: list[tuple[Callable[..., Any], object]] = private(ddp, "_comm_hooks", "an overlap beside hooks")
    hooks[:] = [one for one in hooks if not _is_empty(slot_of(one[0]))]
    return hooks


def slot_of(hook: object) -> EngineSlot | None:
    """Return the slot whose method a communication hook is; ``None`` if it is another hook."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, EngineSlot) else None


def _is_empty(slot: EngineSlot | None) -> bool:
    return slot is not None and slot.make is None and slot.engine is None
