"""FSDP's reduced gradients averaged between nodes: when, over which micro-batches, and beside what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives import all_reduce
from ddp_quant_hooks.keys_of_pass import KeysOfPass
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import torch_compat
from dist_utils.torch_compat import ShardedModule

__all__ = ["ShardAverages"]


class ShardAverages:
    """Averages what the modules of one model have reduced.

    Args:
        state: What averages.
    """

    def __init__(self, state: QuantizedAllreduceState) -> None:
        self.state = state
        self.keys = KeysOfPass()
        self.at_end = EndOfBackward()

    def hook_of(self, key: str, module: ShardedModule, alive: object) -> Callable[[torch.Tensor], None]:
        """Return the all-reduce hook of a module, which keeps ``alive`` alive."""
        return _Hook(self, key, module, alive)


class _Hook:
    """The all-reduce hook of one module.

    Args:
        averages: Of the model.
        key: The module's.
        module: The module.
        alive: What must live as long as the hook.
    """

    def __init__(self, averages: ShardAverages, key: str, module: ShardedModule, alive: object) -> None:
        self._alive = alive
        self._averages = averages
        self._key = key
        self._module = module
        self._not_averaged: torch.Tensor | None = None
        self._in_flight: torch.futures.Future[torch.Tensor] | None = None

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average what was reduced, in place, or keep it for a later micro-batch."""
        if self._not_averaged is not None and self._not_averaged.shape != reduced.shape:
            raise ValueError(
                f"quantize_all_reduce: module {self._key!r}: {self._not_averaged.numel()} values were "
                f"reduced in a micro-batch and {reduced.numel()} in the next: with "
                "set_requires_all_reduce(False) the same parameters must have gradients in all of them"
            )
        if not self._module.all_reduce_wanted:
            self._keep(reduced)
            return
        if self._not_averaged is not None:
            reduced += self._not_averaged
            self._not_averaged = None
        self._average(reduced)

    def _keep(self, reduced: torch.Tensor) -> None:
        """Put the sum aside, so that FSDP adds nothing to gradients."""
        if self._not_averaged is None:
            self._not_averaged = reduced.clone()
        else:
            self._not_averaged += reduced
        reduced.zero_()
        without = [parameter for parameter in self._module.parameters if parameter.grad is None]
        if torch_compat.inside_backward():
            self._averages.at_end.add(partial(_take_gradients_away, without))

    def _average(self, reduced: torch.Tensor) -> None:
        averages, module = self._averages, self._module
        # A factor divides the sum over all ranks, as on a mesh for HSDP.
        op = dist.ReduceOp.AVG if module.divide_factor is None else dist.ReduceOp.SUM
        key = averages.keys.next(self._key)
        beside = (
            reduced.device.type == "cpu"
            and torch_compat.inside_backward()
            and module.gradients_will_be(reduced)
        )
        if beside:
            future = all_reduce(reduced, op, averages.state, async_op=True, key=key)
            self._in_flight = future
            averages.at_end.add(future.wait)
            return
        # Used twice in this pass: FSDP adds to what the first use is still averaging.
        before, self._in_flight = self._in_flight, None
        if before is not None and not before.done():
            before.wait()
        if reduced.device.type != "cpu":  # made on FSDP's reduce-scatter stream, whose memory it is
            reduced.record_stream(torch.get_device_module(reduced.device).current_stream(reduced.device))
        all_reduce(reduced, op, averages.state, key=key)


class EndOfBackward:
    """What is left to do when the backward pass that is running has computed everything.

    FSDP has asked to be called then before its first gradient was reduced, so what comes here runs
    after it. Nothing is done in a pass that fails.
    """

    def __init__(self) -> None:
        self._task = -1
        self._actions: list[Callable[[], object]] = []

    def add(self, action: Callable[[], object]) -> None:
        """Do ``action`` at the end. All are done; the first error is raised."""
        task = torch_compat.graph_task_id()
        if task != self._task or not self._actions:
            # A list for each pass: that of one that failed is forgotten.
            self._task, self._actions = task, []
            torch_compat.before_end_of_backward(partial(_do_all, self._actions))
        self._actions.append(action)


def _do_all(actions: list[Callable[[], object]]) -> None:
    with contextlib.ExitStack() as each:  # so that nothing writes gradients any more when an error is raised
        for action in actions:
            each.callback(action)
    actions.clear()


def _take_gradients_away(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
