"""What gathers leave behind for later ones, on streams of their own, and whether there will be one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.tensors.calls import outside_graphs
from dist_utils.process_groups import record_use


class KeptMemory:
    """Memory that is used several times, each time perhaps on another stream of an accelerator.

    Args:
        tensor: The memory.

    Attributes:
        tensor: The memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._used: Any = None

    def begin_use(self) -> None:
        """Let the current stream use it after the streams that have used it before."""
        if self._used is not None:
            self._stream().wait_event(self._used)
            record_use(self.tensor)

    def end_use(self) -> None:
        """Note that the current stream has used it."""
        if self.tensor.device.type != "cpu":
            record_use(self.tensor)
            self._used = self._stream().record_event()

    def _stream(self) -> Any:
        return torch.get_device_module(self.tensor.device).current_stream(self.tensor.device)


class TrainingForward:
    """Whether a forward pass is running whose backward pass autograd records.

    FSDP gathers inside of ``torch.no_grad()``, where nothing tells.

    Args:
        modules: FSDP modules, each of which gathers itself and others as soon as its forward pass begins.
    """

    def __init__(self, modules: Sequence[ShardedModule]) -> None:
        self._running = False
        every = [one for module in modules for one in module.group.modules]
        self._hooks = [
            handle
            for module in every
            for handle in (
                module.register_forward_pre_hook(self._begin, prepend=True),
                module.register_forward_hook(self._end),
            )
        ]

    def __call__(self) -> bool:
        """Return whether one is running."""
        return self._running

    def stop(self) -> None:
        """Watch no more."""
        self._running = False
        for hook in self._hooks:
            hook.remove()

    @outside_graphs
    def _begin(self, *_: object) -> None:
        self._running = torch.is_grad_enabled()

    @outside_graphs
    def _end(self, *_: object) -> None:
        self._running = False
