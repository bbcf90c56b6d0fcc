"""Detect a backward pass that reads a parameter after stepping it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_optim_overlap.errors import WeightReuseError
from dist_utils.torch_compat import inside_backward


class WeightWatch:
    """Makes every use of a stepped parameter in the rest of one backward pass an error.

    A checkpointed block runs its forward pass again inside the backward pass. If it reads a parameter
    without a gradient (``weight.detach()``, a module under ``no_grad``), that parameter may have been
    stepped by then, and the recomputed values are not those that the loss was computed from. autograd
    does not notice.

    Meanwhile the parameter gets a class whose torch functions all raise.
    """

    def __init__(self) -> None:
        self._classes: list[tuple[torch.Tensor, type]] = []
        self._watching = True
        self._lock = threading.Lock()  # steps run on the worker, the end of the pass does not

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch these parameters until the backward pass ends."""
        with self._lock:
            if self._watching:
                for parameter in parameters:
                    self._classes.append((parameter, type(parameter)))
                    parameter.__class__ = _watched_class(type(parameter))

    def end(self) -> None:
        """End the backward pass: give the parameters their class back."""
        with self._lock:
            self._watching = False
            while self._classes:
                parameter, own = self._classes.pop()
                parameter.__class__ = own


_DESCRIPTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "is_sparse", "layout", "ndim", "requires_grad", "shape")
} | {
    torch.Tensor.dim,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.stride,
}
"""Functions that are still allowed on a stepped parameter, because none depends on its values."""


@functools.cache
def _watched_class(own: type) -> type:
    return type(own.__name__, (own,), {"__torch_function__": classmethod(_refuse)})


def _refuse(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    del cls
    if inside_backward() and func not in _DESCRIPTIONS:
        raise WeightReuseError(
            f"{getattr(func, '__name__', func)} reads a parameter in the backward pass that has already "
            "stepped it, as a checkpointed block does that uses a weight without its gradient: the result "
            "would not be that of the forward pass. Use the ordinary loop, or no checkpoint there"
        )
    ordinary: Callable[..., Any] = torch.nn.Parameter.__torch_function__
    return ordinary(func, types, args, kwargs or {})
