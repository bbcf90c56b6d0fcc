"""What gathers leave behind for later ones, on streams of their own, and whether there will be one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.tensors.calls import outside_graphs
from dist_utils.process_groups import record_use
from dist_utils.torch_compat import private


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


class ForwardPasses:
    """The forward passes that are running, which nothing tells where FSDP gathers.

    Args:
        modules: FSDP modules, each of which gathers itself and others as soon as its forward pass begins.
        needs_no_backward: Called when autograd has recorded nothing in the forward pass of a module.
    """

    def __init__(
        self, modules: Sequence[ShardedModule], needs_no_backward: Callable[[ShardedModule], None]
    ) -> None:
        self._needs_no_backward = needs_no_backward
        self._recorded: list[bool] = []
        """Of each that is running, the innermost last: whether autograd records it."""
        self._hooks = [
            handle
            for module in modules
            for one in module.group.modules
            for handle in (
                one.register_forward_pre_hook(self._begin, prepend=True),
                # Passes that fail end, too, as do those of a checkpoint that has seen enough.
                one.register_forward_hook(partial(self._end, module), always_call=True),
            )
        ]

    @property
    def recorded(self) -> bool:
        """Whether autograd records the innermost one, for a backward pass; not if there is none."""
        return bool(self._recorded) and self._recorded[-1]

    def stop(self) -> None:
        """Watch no more."""
        self._recorded.clear()
        for hook in self._hooks:
            hook.remove()

    @outside_graphs
    def _begin(self, *_: object) -> None:
        self._recorded.append(torch.is_grad_enabled())

    @outside_graphs
    def _end(self, module: ShardedModule, _module: object, _inputs: object, output: object) -> None:
        # There is none where the handle was removed during the pass, or another hook failed before ours.
        recorded = bool(self._recorded) and self._recorded.pop()
        leaves = private("torch.utils._pytree", "tree_leaves", "finding tensors in outputs")(output)
        if recorded and not any(getattr(leaf, "requires_grad", False) for leaf in leaves):
            self._needs_no_backward(module)
