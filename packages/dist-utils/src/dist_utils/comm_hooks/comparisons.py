"""Check that all ranks give the same bucket to the same hook, or make the same call, before it is sent."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dist_utils.process_groups import GroupLike, OrderedWorker, resolve_group
from dist_utils.process_groups.errors import FirstError
from dist_utils.process_groups.known_terms import KnownTerms


class Bucket(Protocol):
    """The parts of ``GradBucket`` that are compared."""

    def index(self) -> int:
        """Return its number in the pass."""

    def buffer(self) -> torch.Tensor:
        """Return its gradients."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that these belong to."""


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, KnownTerms] = weakref.WeakKeyDictionary()


def require_same_bucket(
    owner: GroupLike | OrderedWorker, title: str, options: Mapping[str, object], bucket: Bucket
) -> None:
    """Return if all ranks give the same bucket to the same hook with the same options, or raise on all ranks.

    The ranks are compared (see :func:`dist_utils.require_same_terms`) for every new bucket: in a model's
    first backward pass, and after ``DistributedDataParallel`` has rebuilt its buckets. If they do not agree,
    every later call for this owner raises the same error, as the ranks may have come differently far: go on
    with a new worker, or a new process group.

    Ranks that have used two hooks around one network, and then continue with different ones, are not
    compared again.

    Args:
        owner: A worker, or a process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD. A
            refusal is the worker's first error, and ends its private group. That of a group is raised for
            everything that is compared in this way and has no worker.
        title: The name of the hook.
        options: What must be equal, by name.
        bucket: From ``DistributedDataParallel``.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or earlier.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known bucket; otherwise half a millisecond or more.
    """
    buffer = bucket.buffer()
    terms = {
        **options,
        "bucket": buffer.dtype,
        "values in the bucket": buffer.numel(),
        "sparse": buffer.is_sparse,
        "index of the bucket": bucket.index(),
    }
    _require(owner, title, terms, bucket.parameters()[0])


def require_same_call(
    owner: GroupLike | OrderedWorker,
    title: str,
    terms: Mapping[str, object],
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Return if all ranks make the same call on plain tensors, or raise on all.

    Like :func:`require_same_bucket`, for tensors outside of buckets.

    Args:
        owner: Likewise.
        title: The name of the function.
        terms: What must be equal, by name.
        tensors: The tensors of the call: their number, lengths, dtypes and kinds of device must be equal.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or earlier.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known call; otherwise half a millisecond or more. Calls whose tensors have
        another length in every step are compared in every step.
    """
    if tensors:
        terms = {**terms, "tensors": [(one.numel(), one.dtype, one.device.type) for one in tensors]}
    _require(owner, title, terms)


def _require(
    owner: GroupLike | OrderedWorker, title: str, terms: Mapping[str, object], about: object | None = None
) -> None:
    if isinstance(owner, OrderedWorker):
        owner.require_same_terms(title, terms, about=about)
    else:
        group = resolve_group(owner)
        _of_groups.setdefault(group, KnownTerms(FirstError())).require(group, title, terms, about)
