"""Average FSDP's reduced gradients between nodes: when, and over which micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives import all_reduce
from ddp_quant_hooks.keys_of_pass import KeysOfPass
from ddp_quant_hooks.sharded_modules import ShardedModule
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import torch_compat

__all__ = ["ShardAverages"]


class ShardAverages:
    """Averages what the modules of one model have reduced.

    Sums for a later micro-batch wait from pass to pass where FSDP itself would keep them. A pass takes them
    out and puts them back at its end: a failed pass loses all of them, and the step must start over.

    Args:
        state: The state that averages.
        before_first: Called before anything is averaged. Lives as long as the hooks.
    """

    def __init__(self, state: QuantizedAllreduceState, before_first: Callable[[], None]) -> None:
        self.state = state
        self._before_first = before_first
        self.keys = KeysOfPass()
        self.at_end = EndOfBackward(self.put_sums_back)
        self._hooks: list[_Hook] = []

    def hook_of(self, key: str, module: ShardedModule) -> Callable[[torch.Tensor], None]:
        """Return the all-reduce hook of a module."""
        self._hooks.append(_Hook(self, key, module))
        return self._hooks[-1]

    def begin(self) -> None:
        """Note that a module has reduced its gradients: perhaps the first one of a pass."""
        self._before_first()
        if self.keys.begin():
            for hook in self._hooks:
                hook.begin_pass(last_ended_well=self.keys.last_ended_well)
        if torch_compat.inside_backward():
            self.at_end.begin()

    def put_sums_back(self) -> None:
        """Keep what was not averaged for the next pass."""
        for hook in self._hooks:
            hook.put_sum_back()


class _Hook:
    """The all-reduce hook of one module.

    Args:
        averages: The averages of the model.
        key: The module's.
        module: The module.
    """

    def __init__(self, averages: ShardAverages, key: str, module: ShardedModule) -> None:
        self._averages = averages
        self._key = key
        self._module = module
        self._not_averaged: torch.Tensor | None = None
        self._in_flight: torch.futures.Future[torch.Tensor] | None = None
        self._written: torch.Tensor | None = None  # by the exchange in flight

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average what was reduced, in place, or keep it for a later micro-batch."""
        self._averages.begin()
        if reduced.device.type != "cpu":  # made on FSDP's reduce-scatter stream, which owns its memory
            reduced.record_stream(torch.get_device_module(reduced.device).current_stream(reduced.device))
        if self._not_averaged is not None and self._not_averaged.shape != reduced.shape:
            raise ValueError(
                f"quantize_all_reduce: module {self._key!r}: {self._not_averaged.numel()} values were "
                f"reduced in a micro-batch and {reduced.numel()} in the next: with "
                "set_requires_all_reduce(False) the same parameters must have gradients in all of them"
            )
        if not self._module.all_reduce_wanted:
            self._keep(reduced)
        else:
            if self._not_averaged is not None:
                reduced += self._not_averaged
                self._not_averaged = None
            self._average(reduced)
        if not torch_compat.inside_backward():
            self._averages.put_sums_back()

    def begin_pass(self, *, last_ended_well: bool) -> None:
        """Take the waiting sum, if there is one, and keep a failed pass from writing gradients."""
        self._not_averaged = self._module.waiting_sum if last_ended_well else None
        self._module.waiting_sum = None
        if self._in_flight is not None and self._written is not None:
            with contextlib.suppress(Exception):  # its own pass raised it, if it got that far
                self._in_flight.wait()
            self._module.zero_gradients_in(self._written)
            self._in_flight = self._written = None

    def put_sum_back(self) -> None:
        """Keep what was not averaged for the next pass."""
        self._module.waiting_sum = self._not_averaged

    def _keep(self, reduced: torch.Tensor) -> None:
        """Put the sum aside, so that FSDP adds nothing to gradients."""
        if self._module.takes_gradients:
            raise ValueError(
                f"quantize_all_reduce: module {self._key!r} has a post-accumulate hook, which would get "
                "zeros in this micro-batch: accumulate with set_requires_gradient_sync(False)"
            )
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
        key = averages.state.stand_ins.key_for(averages.keys.next(self._key), reduced)
        beside = (
            reduced.device.type == "cpu"
            and torch_compat.inside_backward()
            and module.gradients_will_be(reduced)
        )
        if beside:
            self._in_flight = all_reduce(reduced, op, averages.state, async_op=True, key=key)
            self._written = reduced
            if self._in_flight.done():  # FSDP's next collective would wait for a rank that did not come here
                self._in_flight.wait()
            averages.at_end.add(self._wait)
            return
        self._wait()  # used twice in this pass: FSDP adds to what the first use is still averaging
        all_reduce(reduced, op, averages.state, key=key)

    def _wait(self) -> None:
        """Wait for what is in flight, and release its memory."""
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = self._written = None


class EndOfBackward:
    """What is left to do when the running backward pass has computed everything.

    FSDP queued its own callback before it reduced its first gradient, so this runs after it. Nothing is done
    in a pass that fails.

    Args:
        always: What to do in every pass.
    """

    def __init__(self, always: Callable[[], object]) -> None:
        self._always = always
        self._task = -1
        self._actions: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Note that a pass is running."""
        task = torch_compat.graph_task_id()
        if task != self._task or not self._actions:
            # A list for each pass: that of a failed pass is dropped.
            self._task, self._actions = task, [self._always]
            torch_compat.before_end_of_backward(partial(_do_all, self._actions))

    def add(self, action: Callable[[], object]) -> None:
        """Do ``action`` at the end, too. All are done; the first error is raised."""
        self._actions.append(action)


def _do_all(actions: list[Callable[[], object]]) -> None:
    with contextlib.ExitStack() as each:  # so that nothing writes gradients any more when an error is raised
        for action in actions:
            each.callback(action)
    actions.clear()


def _take_gradients_away(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
