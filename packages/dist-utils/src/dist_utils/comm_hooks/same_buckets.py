"""Check that all ranks give the same bucket to the same hook, before any of it is sent."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from dist_utils import torch_compat
from dist_utils.process_groups.groups import GroupLike, resolve_group
from dist_utils.process_groups.terms import AgreementError, require_same_terms

__all__ = ["require_same_bucket", "require_same_call"]


_MOST_CALLS = 1 << 16
"""How many calls of a group or an owner are remembered, by digests: 22 MB at most, if all differ."""


class _Bucket(Protocol):
    """The parts of ``GradBucket`` that are used here."""

    def index(self) -> int: ...

    def buffer(self) -> torch.Tensor: ...

    def parameters(self) -> list[torch.Tensor]: ...


class _Failure(NamedTuple):
    """A failed comparison of the ranks, and the backward pass in which it failed."""

    text: str
    task: int
    place: int

    def concerns(self, index: int) -> bool:
        """Return whether the current bucket, which has this index, belongs to the same pass."""
        task = torch_compat.graph_task_id()
        if task == self.task and task != -1:
            return True
        # The task does not identify the pass outside of autograd, as in join(), or with reentrant
        # checkpoints.
        return index > self.place and (task == self.task or torch_compat.inside_nested_backward())


class _Agreed:
    """What all ranks have agreed on for the buckets that begin with one parameter.

    A bucket may be checked several times, for example by hooks inside hooks. The checks of the last backward
    pass, in the same order, need not be repeated. Every other check is made, even one that was made long ago:
    ranks that have used several hooks in turn around the same network may continue with different ones.
    """

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._pass = 0
        self._place = 0

    def includes(self, key: str, passes: _Passes) -> bool:
        """Return whether ``key`` need not be compared now."""
        repeated = self._place == len(self._keys) and key in self._keys[-1:]
        number = passes.number(self, begins=self._place == len(self._keys) and key in self._keys[:1])
        if number != self._pass:
            self._pass, self._place = number, 0
        if self._place < len(self._keys) and self._keys[self._place] == key:
            self._place += 1
            return True
        # Outside of backward passes one hook may be called repeatedly.
        return repeated and number < 0

    def add(self, key: str) -> None:
        """Record that all ranks agree on ``key``, which was not included before."""
        self._keys[self._place :] = [key]
        self._place += 1


class _Passes:
    """Distinguishes the backward passes of a group."""

    def __init__(self) -> None:
        self._outside = -1
        self._last: _Agreed | None = None

    def number(self, asked: _Agreed, *, begins: bool) -> int:
        """Return the number of the pass that a check belongs to.

        Inside autograd it follows autograd's own number. Outside, in ``join()`` and where hooks are called by
        hand, a new pass begins with a check of another bucket than the last one, or when the first check of
        the same bucket is repeated.
        """
        before, self._last = self._last, asked
        task = torch_compat.graph_task_id()
        if task != -1:
            return task + 1
        if before is not asked or begins:
            self._outside -= 1
        return self._outside


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, WeakIdKeyDictionary] = weakref.WeakKeyDictionary()
"""Keyed by the first parameter of a bucket."""
_agreed_calls: weakref.WeakKeyDictionary[object, dict[str, _Agreed]] = weakref.WeakKeyDictionary()
"""By group or owner, and by a digest of title and terms, the latest call last."""
_passes: weakref.WeakKeyDictionary[dist.ProcessGroup, _Passes] = weakref.WeakKeyDictionary()
_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, _Failure] = weakref.WeakKeyDictionary()


def require_same_bucket(
    process_group: GroupLike, title: str, options: Mapping[str, object], bucket: _Bucket
) -> None:
    """Return if all ranks give the same bucket to the same hook with the same options, or raise on all ranks.

    The ranks are compared (see :func:`dist_utils.require_same_terms`) for every new bucket: in a model's
    first backward pass, and after ``DistributedDataParallel`` has rebuilt its buckets. A known bucket is
    compared again if another bucket, hook or option was used in between, for example when a new model is made
    around the same network. (Models that share layers and step in turns are compared every time.) If the
    ranks do not agree, the rest of the pass is refused without another comparison, because that would mistake
    a late rank for one that is further ahead.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: The name of the hook.
        options: What must be equal, by name.
        bucket: From ``DistributedDataParallel``.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, or for an earlier bucket of this pass.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known bucket; otherwise some requests to the store.
    """
    buffer = bucket.buffer()
    terms = {
        **options,
        "bucket": buffer.dtype,
        "values in the bucket": buffer.numel(),
        "sparse": buffer.is_sparse,
        "index of the bucket": bucket.index(),
    }
    group = resolve_group(process_group)
    agreed: _Agreed = _agreed.setdefault(group, WeakIdKeyDictionary()).setdefault(  # type: ignore[no-untyped-call]
        bucket.parameters()[0], _Agreed()
    )
    _require_same(group, title, terms, agreed, f"{title} {terms!r}", bucket.index())


def require_same_call(
    process_group: GroupLike, title: str, terms: Mapping[str, object], *, owner: object | None = None
) -> None:
    """Return if all ranks make the same call on plain tensors, or raise on all.

    Like :func:`require_same_bucket`, for tensors outside of buckets.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: The name of the function.
        terms: What must be equal, by name.
        owner: An object, such as a worker: its calls are remembered as long as it exists. The terms must tell
            one owner from another. ``None``: the process group.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known call, one of the latest 65536; otherwise some requests to the store.
    """
    group = resolve_group(process_group)
    # The terms of a call on many tensors are long.
    call = hashlib.sha256(f"{title} {terms!r}".encode(errors="surrogatepass")).hexdigest()
    calls = _agreed_calls.setdefault(group if owner is None else owner, {})
    agreed = calls.pop(call, None) or _Agreed()
    calls[call] = agreed  # the latest one comes last
    if len(calls) > _MOST_CALLS:
        calls.pop(next(iter(calls)))
    _require_same(group, title, terms, agreed, call, None)


def _require_same(
    group: dist.ProcessGroup,
    title: str,
    terms: Mapping[str, object],
    agreed: _Agreed,
    key: str,
    index: int | None,
) -> None:
    """Compare the ranks unless ``key`` is known. With a bucket's ``index``, a failure ends the pass."""
    if group.size() == 1:
        return
    failure = _failures.get(group)
    if failure is not None and index is not None:
        if failure.concerns(index):
            raise AgreementError(failure.text)
        _failures.pop(group, None)  # another pass has begun
    if agreed.includes(key, _passes.setdefault(group, _Passes())):
        return
    try:
        require_same_terms(group, title, terms)
    except RuntimeError as error:
        if index is not None:
            _failures[group] = _Failure(str(error), torch_compat.graph_task_id(), index)
        raise
    agreed.add(key)
