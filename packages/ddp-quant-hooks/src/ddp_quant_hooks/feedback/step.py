"""One step: which buckets or calls belong to it, how it ended, and whether its rounding errors count."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dist_utils import torch_compat
from dist_utils.comm_hooks import Bucket
from dist_utils.process_groups import record_use

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_OUTSIDE = -1
"""Autograd's task outside of any backward pass."""


def value_count(tensor: torch.Tensor) -> int:
    """Return how many real values a tensor has; a complex number has two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class Outcome:
    """Whether an exchange of a step has raised, or has given a mean that is not finite. For any thread.

    Separate from the step, because callbacks of collectives write to it. They run on the process group's own
    threads, which may be the last to drop them. A callback that owned the step, and through it the state and
    the group, would end the group on that thread; the group would wait for the same thread, and abort the
    process.

    Attributes:
        broken: Whether an exchange has raised.
    """

    def __init__(self) -> None:
        self.broken = False
        self._flags: list[torch.Tensor] = []
        self._any_flag: dict[torch.device, torch.Tensor] = {}

    def not_finite(self, flag: torch.Tensor) -> None:
        """Note whether a value of a mean is not finite, as a flag on any device."""
        self._flags.append(flag)

    def __enter__(self) -> Self:
        """Begin a block: an error in it breaks the step."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.broken = True

    def of(self, done: torch.futures.Future[T]) -> T:
        """Return the value of an exchange's future, or note its error. For callbacks."""
        with self:
            return done.value()

    def look_at(self, mean: torch.Tensor) -> None:
        """Note whether a value of a mean is not finite."""
        self.not_finite(~(mean.coalesce().values() if mean.is_sparse else mean).isfinite().all())

    def any_so_far(self, device: torch.device) -> torch.Tensor:
        """Return on ``device`` whether a value of any mean was not finite, of the exchanges that are over."""
        flags = list(self._flags)
        for flag in flags:
            record_use(flag)  # made on a side stream, which owns its memory
        none = torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([none, *(flag.to(device, non_blocking=True) for flag in flags)]).any()

    def any_not_finite(self, device: torch.device) -> torch.Tensor:
        """Return :meth:`any_so_far`, once for each device. All exchanges must be over."""
        if device not in self._any_flag:
            self._any_flag[device] = self.any_so_far(device)
        record_use(self._any_flag[device])  # perhaps made on another stream
        return self._any_flag[device]


class _Gradients:
    """The gradients of a bucket's parameters, as they were when it came.

    Args:
        bucket: From DDP.
    """

    def __init__(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        start, nbytes = (0, 0) if buffer.is_sparse else (buffer.data_ptr(), buffer.nbytes)
        self._memory = range(start, start + nbytes)
        self._parameters = bucket.parameters()
        self._versions = _versions(self._parameters)

    @property
    def first(self) -> torch.Tensor | None:
        """The first parameter that had a gradient."""
        with_versions = zip(self._parameters, self._versions, strict=True)
        return next((one for one, version in with_versions if version is not None), None)

    def unused(self) -> list[torch.Tensor]:
        """Return the parameters that have not got a mean, when the pass is over: no rank has used them.

        DDP leaves them as they were, without a gradient or with one that has memory of its own, as of zeros.
        """
        before_and_now = zip(self._parameters, self._versions, _versions(self._parameters), strict=True)
        unwritten = [one for one, before, now in before_and_now if before == now]
        return [one for one in unwritten if one.grad is None or not self._has_memory_of(one.grad)]

    def _has_memory_of(self, gradient: torch.Tensor) -> bool:
        return gradient.is_sparse or gradient.data_ptr() in self._memory


def _versions(parameters: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each gradient was written; ``None``: there is none."""
    read = torch_compat.version_reader()
    return [None if (gradient := one.grad) is None else read(gradient) for one in parameters]


class Kind(enum.Enum):
    """What makes up a step."""

    BACKWARD = "the buckets of a backward pass"
    CALL = "one call on plain tensors, or all calls inside one backward()"
    BLOCK = "all calls on plain tensors in a with block"


class Step:
    """A backward pass of DDP, or calls on plain tensors that count together.

    Autograd reports each pass that ends well. A step that is still running when the next one begins has
    failed: in the user's code or on a peer. One that has failed in communication has a broken outcome. Jobs
    write only to the outcome of their step, so that late jobs of a failed one do not disturb the next.

    Args:
        kind: What makes it up. A block lasts until it is closed.

    Attributes:
        kind: As given.
        outcome: The outcome of its exchanges.
        outside: Whether it is outside of any ``backward()``, whose end autograd would report.
        unused: Parameters that no rank has used. DDP discards their averages (``find_unused_parameters``).
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.outcome = Outcome()
        self.outside = False
        self.unused: list[torch.Tensor] = []
        self._running = int(kind is Kind.BLOCK)  # passes and blocks that have not ended, or have raised
        self._discarded = False
        self._takes_passes = True
        # Reentrant checkpoints run passes inside the pass; a bucket or a call may come in any of them.
        self._tasks: set[int] = set()
        self._surrounded = False
        self._last_index = -1
        self._keys: set[str] = set()
        self._gradients: list[_Gradients] = []

    @property
    def open(self) -> bool:
        """Whether it is a block that has not ended."""
        return self.kind is Kind.BLOCK and self._running > 0

    @property
    def ended_well(self) -> bool:
        """Whether it is over and has not failed, here and, as far as its communication shows, elsewhere."""
        return not (self._running or self.outcome.broken)

    @property
    def counts(self) -> bool:
        """Whether an optimizer step may follow, as far as is known without asking an accelerator."""
        return self.ended_well and not self._discarded

    def includes_bucket(self, task: int, index: int) -> bool:
        """Return whether a bucket that comes now belongs to this step.

        ======================================== ==========================================================
        it comes in                              it belongs to the step
        ======================================== ==========================================================
        a pass of the step, or one around it     always
        another pass inside of a pass            if its index is larger than the last one's
        no pass: join(), a hook called by hand   if the step is outside of any, too, and its index is larger
        ======================================== ==========================================================

        The index alone does not tell: buckets that no rank uses are left out, and in the first pass of a
        static graph all have index 0.

        Args:
            task: Autograd's task; -1 outside of ``backward()``.
            index: The index of the bucket.
        """
        if self.kind is Kind.BLOCK:
            return False
        larger = index > self._last_index
        if task == _OUTSIDE or self.outside:
            return larger and self.outside and task == _OUTSIDE and self._takes_passes
        return self._has_pass(task) or (larger and self._may_gain_a_pass())

    def includes_call(self, task: int) -> bool:
        """Return whether a call on plain tensors that comes now belongs to this step.

        To an open block always; inside ``backward()``, in a pass of the step or one around it, or in another
        pass inside of a pass unless the step has ended well. Any other call is a step of its own.

        Args:
            task: Autograd's task; -1 outside of ``backward()``.
        """
        if self.kind is Kind.BLOCK:
            return self.open
        if task == _OUTSIDE or self.outside:
            return False
        return self._has_pass(task) or (not self.ended_well and self._may_gain_a_pass())

    def take_no_more_passes(self) -> None:
        """Let no pass belong to this step but those that it has been in: it may have raised."""
        self._takes_passes = False

    def _may_gain_a_pass(self) -> bool:
        """Return whether a pass that runs inside another one now may belong to this step, too."""
        return self._takes_passes and torch_compat.inside_nested_backward()

    def _has_pass(self, task: int) -> bool:
        """Return whether a pass is one of this step's, or around them: those have smaller numbers."""
        return task in self._tasks or task < max(self._tasks)

    def add_bucket(self, task: int, bucket: Bucket) -> None:
        """Note a bucket that belongs to this step, before it is averaged."""
        self._last_index = bucket.index()
        self._add(task)
        if self.outside or self._surrounded:
            return  # join() gets no gradients; reentrant checkpoints support no unused parameters
        self._gradients.append(_Gradients(bucket))

    def add_call(self, task: int) -> None:
        """Note a call that belongs to this step."""
        if self.kind is not Kind.BLOCK:
            self._add(task)

    def use(self, keys: Sequence[str]) -> None:
        """Note that a call has these keys.

        Raises:
            ValueError: Another call of this step has one of them.
        """
        for key in keys:
            if key in self._keys:
                raise ValueError(f"the key {key!r} was used in this step: what it lost would be added twice")
        self._keys.update(keys)

    def unused_key(self, key: str) -> str:
        """Return ``key``, or ``key#2``, ``key#3``, ..., whichever no call of this step has used yet."""
        name, number = key, 1
        while name in self._keys:
            number += 1
            name = f"{key}#{number}"
        return name

    def discard(self) -> None:
        """Note that no optimizer step uses what this step has averaged."""
        self._discarded = True

    def _add(self, task: int) -> None:
        if task == _OUTSIDE:
            self.outside = True
        elif task not in self._tasks:
            if not self._tasks:
                self._surrounded = _after_surrounding_backward(self.end_part)
                self._running += self._surrounded
            self._tasks.add(task)
            self._running += 1
            torch_compat.after_backward(self._end_task)

    def _end_task(self) -> None:
        self.end_part()
        first = next((one for bucket in self._gradients if (one := bucket.first) is not None), None)
        # An optimizer inside backward() removes all gradients, which then show nothing.
        if first is not None and first.grad is not None:
            self.unused += [one for bucket in self._gradients for one in bucket.unused()]
        self._gradients = []

    def end_part(self) -> None:
        """Note that a pass has ended without an error, or a block in any way."""
        self._running -= 1


def _after_surrounding_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the outermost backward pass around this thread's has ended without an error.

    Like ``torch_compat.after_backward``, for the outermost pass, which continues when the passes inside it
    are over. It accepts callbacks only while its own nodes run, so the callback is queued by the next node
    after the function whose backward began the inner pass.

    Returns:
        Whether there is such a pass, one in which a Python function's backward called ``backward()``.
    """
    nodes = [node for node in torch_compat.surrounding_nodes() if node is not None]
    if not nodes:
        return False
    following = [node for node, _ in nodes[-1].next_functions if node is not None]
    if not following:
        return False

    def first_of_the_rest(_: Any) -> None:
        handle.remove()
        torch_compat.after_backward(callback)

    handle = following[0].register_prehook(first_of_the_rest)
    return True
