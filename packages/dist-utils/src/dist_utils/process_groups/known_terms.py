"""What ranks have agreed on, remembered: each new thing is compared once, and a refusal stays."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from dist_utils.process_groups.agreement import require_same_terms
from dist_utils.process_groups.errors import same_error
from dist_utils.process_groups.groups import GroupLike, resolve_group

__all__ = ["Bucket", "KnownTerms", "require_same_bucket", "require_same_call"]

_MOST_CALLS = 1 << 16
"""How many calls are remembered, by digests of 32 bytes; then all are compared anew."""


class Bucket(Protocol):
    """The parts of ``GradBucket`` that identify it."""

    def index(self) -> int:
        """Return its number in the pass."""

    def buffer(self) -> torch.Tensor:
        """Return its gradients."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that these belong to."""


class KnownTerms:
    """The terms on which ranks have agreed, and the first refusal, which is raised again from then on.

    After a refusal ranks no longer know which of them has come how far: another comparison could take a late
    rank for one that is ahead. So there is none until all ranks make a new object.
    """

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self._calls: set[bytes] = set()
        self._buckets: Any = WeakIdKeyDictionary()  # by the first parameter of a bucket

    def require_call(
        self,
        group: dist.ProcessGroup,
        title: str,
        terms: Mapping[str, object],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Compare a call on tensors with those of the other ranks, unless it is known."""
        if tensors:
            kinds = [(one.numel(), one.dtype, one.device.type) for one in tensors]
            terms = {**terms, "tensors": kinds}
        if len(self._calls) >= _MOST_CALLS:  # on all ranks at once, as all know the same calls
            self._calls.clear()
        self._require(self._calls, group, title, terms)

    def require_bucket(
        self, group: dist.ProcessGroup, title: str, options: Mapping[str, object], bucket: Bucket
    ) -> None:
        """Compare a bucket and the options of its hook with the other ranks', unless they are known."""
        buffer = bucket.buffer()
        terms = {
            **options,
            "bucket": buffer.dtype,
            "values in the bucket": buffer.numel(),
            "sparse": buffer.is_sparse,
            "index of the bucket": bucket.index(),
        }
        known = self._buckets.setdefault(bucket.parameters()[0], set())
        self._require(known, group, title, terms)

    def _require(
        self, known: set[bytes], group: dist.ProcessGroup, title: str, terms: Mapping[str, object]
    ) -> None:
        if group.size() == 1:
            return
        if self.refusal is not None:
            raise same_error(self.refusal)
        key = hashlib.sha256(f"{title} {terms}".encode(errors="surrogatepass")).digest()
        if key in known:
            return
        try:
            require_same_terms(group, title, terms)
        except Exception as error:
            self.refusal = same_error(error)
            raise
        known.add(key)


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, KnownTerms] = weakref.WeakKeyDictionary()


def _of_group(process_group: GroupLike) -> tuple[dist.ProcessGroup, KnownTerms]:
    group = resolve_group(process_group)
    return group, _of_groups.setdefault(group, KnownTerms())


def require_same_bucket(
    process_group: GroupLike, title: str, options: Mapping[str, object], bucket: Bucket
) -> None:
    """Return if all ranks give the same bucket to the same hook with the same options, or raise on all ranks.

    The ranks are compared (see :func:`dist_utils.require_same_terms`) for every new bucket: in a model's
    first backward pass, and after ``DistributedDataParallel`` has rebuilt its buckets. If they do not agree,
    every later call for this group raises the same error, as the ranks may have come differently far: go on
    with a new process group. A hook with a :class:`HookState` uses the state's own comparison, of which
    ``close()`` makes a new one.

    Ranks that have used two hooks around one network, and then continue with different ones, are not
    compared again.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: The name of the hook.
        options: What must be equal, by name.
        bucket: From ``DistributedDataParallel``.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or for an earlier bucket.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known bucket; otherwise half a millisecond or more.
    """
    group, known = _of_group(process_group)
    known.require_bucket(group, title, options, bucket)


def require_same_call(
    process_group: GroupLike,
    title: str,
    terms: Mapping[str, object],
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Return if all ranks make the same call on plain tensors, or raise on all.

    Like :func:`require_same_bucket`, for tensors outside of buckets.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        title: The name of the function.
        terms: What must be equal, by name.
        tensors: The tensors of the call: their number, lengths, dtypes and kinds of device must be equal.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or for an earlier call.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known call; otherwise half a millisecond or more. Calls whose tensors have
        another length in every step are compared in every step.
    """
    group, known = _of_group(process_group)
    known.require_call(group, title, terms, tensors)
