"""Hooks that are not in use: a warning where a model trains without the hook that was meant for it."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_utils import torch_compat

_PASSES = 2


class BucketWatch:
    """Warn once if two backward passes of a model have ended and the hook has received no bucket.

    A hook that is not registered with the module that trains goes unnoticed: gradients are averaged in full
    precision. This happens if a framework accepts a hook and ignores it, or wraps the model again.

    Passes without communication (``no_sync()``) do not count, nor do those of DDP's Python reducer, which has
    no buckets.

    Args:
        ddp: The model. Not kept alive by the watch; it keeps the watch alive until that ends.
        state: The name of the hook's state, for the warning.

    Cost:
        An autograd hook on every trained parameter, until the first bucket arrives or the warning is given.

    Example:
        >>> watch = BucketWatch(ddp, "MyState")  # doctest: +SKIP
        >>> watch.end()  # when a bucket has arrived # doctest: +SKIP
    """

    def __init__(self, ddp: DistributedDataParallel, state: str) -> None:
        self._ddp = weakref.ref(ddp)
        self._state = state
        self._passes = 0
        self._last_pass = -1
        self._hooks: list[Any] = []
        if _gives_buckets(ddp):
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._got_gradient)  # type: ignore[no-untyped-call]
                for parameter in ddp.parameters()
                if parameter.requires_grad
            ]

    def end(self) -> None:
        """Stop watching: a bucket has arrived, or none is expected."""
        while self._hooks:
            self._hooks.pop().remove()

    def _got_gradient(self, _: torch.Tensor) -> None:
        ddp = self._ddp()
        if ddp is None:
            self.end()
            return
        current = torch_compat.graph_task_id()
        if current == self._last_pass or not ddp.require_forward_param_sync:  # inside no_sync()
            return
        self._last_pass = current
        if torch_compat.inside_nested_backward():  # the pass around it is counted
            return
        self._passes += 1
        if self._passes >= _PASSES:
            torch_compat.after_backward(self._warn)

    def _warn(self) -> None:
        if not self._hooks:
            return
        self.end()
        warnings.warn(
            f"{_PASSES} backward passes of a model are over, and the communication hook of the {self._state} "
            "that is bound to it has got no bucket: the hook is not registered with the "
            "DistributedDataParallel module that trains, and gradients are averaged without it. Call "
            "register_comm_hook(state, hook) of the module itself, where a framework does not",
            stacklevel=2,
        )


def _gives_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether a model gives its hook buckets, which DDP's Python reducer does not.

    No public name up to torch 2.15.
    """
    return not torch_compat.private(ddp, "_use_python_reducer", "noticing hooks that get no bucket")
