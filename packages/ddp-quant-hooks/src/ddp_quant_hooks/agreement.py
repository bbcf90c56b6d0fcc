"""Compare the ranks' options and buckets before they average something new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ddp_quant_hooks.resume import Bucket
from dist_utils import OrderedWorker
from dist_utils.comm_hooks import require_same_bucket, require_same_call

__all__ = ["Agreement"]


class Agreement:
    """Compares buckets and calls of a state with those of the other ranks.

    Holds no reference to the state, so that the state is freed as soon as its owner drops it.

    Args:
        name: The name of the state's class.

    Attributes:
        first: What is averaged when the state's worker makes its private group, for the terms compared then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.first = ""

    def on_bucket(self, worker: OrderedWorker, bucket: Bucket) -> None:
        """Compare, before a new bucket, what must be identical on all ranks.

        Args:
            worker: The worker of the state.
            bucket: The bucket.

        Raises:
            AgreementError: Something differs, or a rank does not take part.
        """
        buffer = bucket.buffer()
        self.first = f"{buffer.numel()} values of {buffer.dtype}"
        require_same_bucket(worker, self._name, {}, bucket)

    def on_call(
        self,
        worker: OrderedWorker,
        call: str,
        terms: Mapping[str, object],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Like :meth:`on_bucket`, before a call on plain tensors.

        Args:
            worker: The worker of the state.
            call: The name of the function.
            terms: What must be identical on all ranks, by name.
            tensors: The tensors of the call.
        """
        more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
        self.first = f"{call}() of {tensors[0].numel()} values of {tensors[0].dtype}{more}"
        require_same_call(worker, call, terms, tensors)
