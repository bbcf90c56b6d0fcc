"""Average one bucket in few bits, as decided: a job for the state's worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks import exact_parameters
from ddp_quant_hooks.decisions import Decision
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.statistics import ring_bytes
from ddp_quant_hooks.values import Values

__all__ = ["Averaged", "average"]


class Averaged(NamedTuple):
    """The result of averaging a bucket.

    Attributes:
        bytes_sent: By this rank.
        error: The error relative to the exact mean, if it was measured.
    """

    bytes_sent: int
    error: torch.Tensor | None


def average(
    group: dist.ProcessGroup,
    decision: Decision,
    route: Route,
    failed: Callable[[torch.Tensor], None] | None,
) -> Averaged:
    """Average a bucket in place; every rank ends with the same bits.

    Args:
        group: The process group whose ranks average.
        decision: The decision about the bucket.
        route: The route of its values.
        failed: Called with flags that say whether a value of the mean is not finite; ``None`` if that is not
            needed.
    """
    values, exact = decision.values, decision.exact
    assert values is not None
    bytes_sent = 0
    reference = apart = error = None
    if decision.sampled:
        reference = values.to(torch.float32) / group.size()
        bytes_sent += _all_reduce(reference, group)
    if exact:
        apart = exact_parameters.set_apart(exact, group.size())
        bytes_sent += _all_reduce(apart, group)
        if failed is not None:
            failed(~apart.isfinite().all())
    bytes_sent += route.average(group, values, decision.kept, failed, decision.label)
    if apart is not None:
        exact_parameters.put_back(exact, apart)
    if reference is not None:
        error = _relative_error(values, reference)
    return Averaged(bytes_sent, error)


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum ``values`` in place, and return the bytes sent."""
    dist.all_reduce(values, group=group)
    return ring_bytes(values.nbytes, group.size())


def _relative_error(values: Values, exact: torch.Tensor) -> torch.Tensor:
    difference = (values.to(torch.float32) - exact).norm()
    return torch.where(difference == 0, 0.0, difference / exact.norm())
