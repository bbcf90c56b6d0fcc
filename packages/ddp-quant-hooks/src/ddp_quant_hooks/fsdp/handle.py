"""A collective for gradients that a state takes over: its keys, its steps and its residuals."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist

from ddp_quant_hooks.feedback.residuals import Key
from ddp_quant_hooks.feedback.step import Outcome, Step, value_count
from ddp_quant_hooks.fsdp.replacement import Replacement
from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.states import AveragingState
from dist_utils import require_same_terms
from dist_utils.torch_compat import after_backward, graph_task_id, inside_backward

BeginUse: TypeAlias = Callable[[torch.Tensor, int], tuple[Key, Step]]
"""Begins a module's next use, of which these are the gradients, for this many shards.

Returns what their residuals belong to, and the step that they are part of.
"""


class Handle(Replacement):
    """The changes that :func:`quantize_all_reduce` or :func:`quantize_reduce_scatter` made to a model.

    Attributes:
        keys: Names of the model's FSDP modules, in the model's order, under which residuals are kept.
    """

    _purpose = "gradients"
    _same_shards: ClassVar[bool]
    """Whether the ranks of the state's group must hold the same shards."""

    def __init__(self, model: torch.nn.Module, state: AveragingState) -> None:
        if not isinstance(state, AveragingState):
            raise TypeError(
                f"{self._function}: state must be a state of this package, such as QuantizedAllreduceState, "
                f"got {type(state).__name__}"
            )
        self._state = state
        self._agreed: tuple[Step, set[int]] | None = None
        """The running step, and autograd's tasks at whose end the ranks agree on it."""
        super().__init__(model)
        state.coordinates = self._places()
        self._warn_of_parameters_outside()
        _forget_another_model(self._modules, state)
        self.keys = [module.name for module in self._modules]
        self._replace()
        _handles[id(state)] = self

    @abstractmethod
    def _refuse_module(self, module: ShardedModule, ranks: list[int]) -> None:
        """Raise a ``ValueError`` if the ranks of the state's group cannot average a module's gradients."""

    @abstractmethod
    def _hook_of(self, module: ShardedModule, begin_use: BeginUse) -> Any:
        """Return what FSDP is to call for a module's gradients."""

    def remove(self) -> None:
        """Restore what FSDP did before. A second call does nothing.

        Residuals stay in the state, until it is used for another model.
        """
        if self._replaced:
            _handles.pop(id(self._state), None)
        super().remove()

    def _substitute(self, module: ShardedModule) -> Any:
        return self._hook_of(module, partial(self._begin_use, module))

    def _places(self) -> list[str]:
        """Return this rank's coordinates in the meshes of the model's parameters."""
        return sorted({place for module in self._modules for place in module.places})

    def _refuse(self) -> None:
        """Raise a ``ValueError`` unless this rank can use the state for these modules."""
        state, places = self._state, self._places()
        if id(state) in _handles:
            raise ValueError("the state is used for a model: make one for each, or remove() the other handle")
        state.average.refuse_flat("FSDP hands over a module's parameters as one flat tensor")
        ranks = dist.get_process_group_ranks(state.process_group)
        for module in self._modules:
            self._refuse_module(module, ranks)
        if state.feedback.keys and state.coordinates not in (None, places):
            raise ValueError(
                f"the state has residuals of shards {state.coordinates}, but this rank has {places}"
            )

    def _groups(self) -> list[dist.ProcessGroup]:
        """Return the state's group, and those of the model's meshes."""
        return [self._state.process_group, *(one for module in self._modules for one in module.mesh_groups)]

    def _agree_in(self, group: dist.ProcessGroup, problem: Exception | None) -> None:
        """Compare modules, in the state's group also their shards, and whether residuals are kept.

        With residuals each pass ends with a collective in the groups that FSDP uses.
        """
        ranks, own = map(dist.get_process_group_ranks, (group, self._state.process_group))
        terms: dict[str, object] = {
            f"module {module.name!r}": (
                module.shapes,
                module.places if self._same_shards and ranks == own else [],
            )
            for module in self._modules
            if ranks == own or group in module.mesh_groups
        }
        terms["keeps residuals"] = self._state.feedback.wanted
        require_same_terms(group, self._function, terms, problem=problem)

    def _warn_of_parameters_outside(self) -> None:
        """Warn of parameters that no FSDP module has: they would drift apart."""
        sharded: set[int] = set().union(*(module.parameter_ids for module in self._modules))
        others = [
            key for key, one in self._model.named_parameters() if one.requires_grad and id(one) not in sharded
        ]
        if others:
            warnings.warn(
                f"{self._function} does not average gradients of {others}: fully_shard was applied to no "
                "module that has them, or was told to ignore them",
                stacklevel=4,
            )

    def _begin_use(self, module: ShardedModule, gradients: torch.Tensor, shards: int) -> tuple[Key, Step]:
        """Begin a module's next use: its key is its name, then ``name#2``, ... in the same pass.

        It begins without residuals if it has the gradients of other parameters than before. FSDP hands over
        one flat tensor of those that got one: if some got none, nobody knows which.
        """
        state, name = self._state, module.name
        self._require_no_later_module(module)
        if self._agreed is None:  # no pass so far
            self._require_own_residuals()
        state.refuse_capture(gradients)
        feedback, step = state.feedback, state.feedback.begin_tensors()
        if not feedback.wanted:
            return Key.of(name, gradients), step
        if inside_backward():
            name = step.unused_key(name)
            self._agree_at_end(step, gradients.device)
        step.use([name])
        trained, known = module.trained, feedback.keys.get(name)
        has_all = gradients.numel() == shards * sum(shape.numel() for _, shape in trained)
        has_same = known is None or (
            known.count == value_count(gradients) and known.contents in (None, trained)
        )
        if not (has_all and has_same):
            feedback.free(name)
        key = feedback.key_of(name, gradients)
        key.contents = trained if has_all else []
        return key, step

    def _agree_at_end(self, step: Step, device: torch.device) -> None:
        """Let a step count on all ranks of FSDP's meshes or on none, as ``GradScaler`` skips it.

        Once for each pass, at its end: inside the pass FSDP's other collectives would wait for it.
        """
        if self._agreed is None or self._agreed[0] is not step:
            self._agreed = step, set()
        task = graph_task_id()
        if task not in self._agreed[1]:
            self._agreed[1].add(task)
            after_backward(partial(_agree_on_finite, self._modules, self._state, step.outcome, device))

    def _require_own_residuals(self) -> None:
        """Raise if the state has residuals of a model with other modules."""
        kept = self._state.feedback.keys
        if kept and not kept.keys() & {*self.keys}:
            raise RuntimeError(
                f"the state's residuals are of {[*kept]}, but the model has {self.keys}: go on without them, "
                "or name its modules as in the run that saved them"
            )


_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
"""By the ``id`` of their states. A handle lives as long as the modules, whose hooks have it and its state."""

_last_use: weakref.WeakKeyDictionary[AveragingState, tuple[list[weakref.ref[torch.nn.Module]], int]] = (
    weakref.WeakKeyDictionary()
)
"""The modules that each state was used for last, and how often it had loaded residuals then."""


def _forget_another_model(modules: Sequence[ShardedModule], state: AveragingState) -> None:
    """Forget residuals of another model, whose modules may have the same names, unless they were loaded."""
    feedback, known = state.feedback, _last_use.get(state)
    here = [weakref.ref(module.module) for module in modules]
    if known is not None and known[0] != here and known[1] == feedback.loads:
        state.wait()
        feedback.forget()
    _last_use[state] = here, feedback.loads


def _agree_on_finite(
    modules: Sequence[ShardedModule], state: AveragingState, outcome: Outcome, device: torch.device
) -> None:
    """Let a step count on no rank if an average is not finite on one of those that share a module."""
    with outcome:
        state.wait()  # for what is noted on its thread, and on a stream of its own
        groups = {id(group): group for module in modules for group in module.groups}
        own = dist.get_process_group_ranks(state.process_group)  # which have agreed in each exchange
        flag = outcome.any_so_far(device).to(torch.int32)
        for group in groups.values():
            if group.size() > 1 and dist.get_process_group_ranks(group) != own:
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        outcome.not_finite(flag.bool())
