"""What both functions for FSDP2 share: a model's sharded modules, checks on all ranks, and the handle."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ddp_quant_hooks.feedback.names import without_wrappers
from ddp_quant_hooks.feedback.step import Outcome, Step, value_count
from ddp_quant_hooks.states import QuantizedAllreduceState
from dist_utils import require_same_terms
from dist_utils.torch_compat import after_backward, graph_task_id, inside_backward, private

_PURPOSE = "averaging gradients under fully_shard"

KeyOf: TypeAlias = Callable[[torch.Tensor, int], str]
"""Gives the key of a module's next use, of which these are the gradients, for this many shards."""


class ShardedModule(NamedTuple):
    """A module that ``fully_shard`` was applied to, with its own parameters.

    Most of it has no public name up to torch 2.15.

    Attributes:
        name: The name of the module in the model; ``"(model)"`` for the model itself.
        module: The module.
        group: FSDP's own record of its parameters.
    """

    name: str
    module: Any
    group: Any

    @property
    def replicated(self) -> bool:
        """Whether FSDP averages over several shard groups itself, on a mesh for HSDP or for replicas."""
        return hasattr(self.group.mesh_info, "replicate_process_group")

    @property
    def shard_ranks(self) -> list[int]:
        """The global ranks that hold its shards; none where it is only replicated."""
        group = getattr(self.group.mesh_info, "shard_process_group", None)
        return [] if group is None else dist.get_process_group_ranks(group)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The shapes of its unsharded parameters, by their names in their modules."""
        return [
            (private(kept, "_module_info", _PURPOSE).param_name, tuple(kept.sharded_param.shape))
            for kept in self.group.fsdp_params
        ]

    @property
    def places(self) -> list[str]:
        """This rank's coordinates in the meshes of its parameters, including those of tensor parallelism."""
        meshes = [kept.sharded_param.device_mesh for kept in self.group.fsdp_params]
        return sorted({f"{tuple(mesh.get_coordinate() or ())} of {tuple(mesh.shape)}" for mesh in meshes})

    @property
    def parameter_ids(self) -> set[int]:
        """The ``id`` of everything that stands for one of its parameters, sharded or gathered."""
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return {id(getattr(kept, form, None)) for kept in self.group.fsdp_params for form in forms}

    @property
    def trained(self) -> list[tuple[int, int]]:
        """The numbers of the parameters that need gradients, and how many values a shard has of each."""
        return [
            (number, kept.padded_sharded_param_size.numel())
            for number, kept in enumerate(self.group.fsdp_params)
            if kept.sharded_param.requires_grad
        ]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that reduce its gradients now: of its shards, and of their replicas."""
        names = ["shard_process_group", *(["replicate_process_group"] if self.group.all_reduce_grads else [])]
        return [getattr(self.group.mesh_info, name) for name in names if hasattr(self.group.mesh_info, name)]

    @property
    def has_divide_factor(self) -> bool:
        """Whether the sum of gradients is divided by something else than the number of ranks."""
        older = getattr(self.group, "reduce_scatter_divide_factor", None)  # its name before torch 2.8
        return getattr(self.group, "gradient_divide_factor", older) is not None

    def reduction(self, record: str) -> Any:
        """Return what FSDP calls for its gradients, by the name in FSDP's record."""
        return private(self.group, record, _PURPOSE)


class Handle(ABC):
    """The changes that :func:`quantize_all_reduce` or :func:`quantize_reduce_scatter` made to a model.

    Attributes:
        keys: Names of the model's FSDP modules, in the model's order, under which residuals are kept.
    """

    _name: ClassVar[str]
    """The name of the user's function, for messages."""
    _method: ClassVar[str]
    """The method of ``FSDPModule`` that replaces what FSDP calls for a module's gradients."""
    _record: ClassVar[str]
    """What it replaces, by the name in FSDP's record."""
    _same_shards: ClassVar[bool]
    """Whether the ranks of the state's group must hold the same shards."""

    def __init__(self, model: torch.nn.Module, state: QuantizedAllreduceState) -> None:
        self._model, self._state = model, state
        modules = self._agree_on_modules()
        _forget_another_model(modules, state)
        self.keys = [module.name for module in modules]
        self._complete = False
        self._modules = modules
        self._agreed: tuple[Step, set[int]] | None = None
        """The running step, and autograd's tasks at whose end the ranks agree on it."""
        self._replaced: list[tuple[ShardedModule, Any, Any]] = []
        for module in modules:
            ours = self._hook_of(module, partial(self._key_of, module))
            self._replaced.append((module, ours, module.reduction(self._record)))
            getattr(module.module, self._method)(ours)
        _handles[id(state)] = self

    @abstractmethod
    def _refuse_module(self, module: ShardedModule, ranks: list[int]) -> None:
        """Raise a ``ValueError`` if the ranks of the state's group cannot average a module's gradients."""

    @abstractmethod
    def _hook_of(self, module: ShardedModule, key_of: KeyOf) -> Any:
        """Return what FSDP is to call for a module's gradients."""

    def remove(self) -> None:
        """Restore what FSDP did before. A second call does nothing.

        Residuals stay in the state, until it is used for another model.
        """
        for module, ours, before in self._replaced:
            if module.reduction(self._record) is ours:  # not the user's own, set later
                getattr(module.module, self._method)(before)
            _handles.pop(id(self._state), None)
        self._replaced.clear()

    def _key_of(self, module: ShardedModule, gradients: torch.Tensor, shards: int) -> str:
        """Return the key of a module's next use: its name, then ``name#2``, ``name#3`` in the same pass.

        It begins without residuals if it has the gradients of other parameters than before. FSDP hands over
        one flat tensor of those that got one: if some got none, nobody knows which.
        """
        if not self._complete:
            self._require_all()
        key, feedback = module.name, self._state.feedback
        if not feedback.wanted:
            return key
        if inside_backward():
            step = feedback.begin_tensors()
            key = step.unused_key(key)
            self._agree_at_end(step, gradients.device)
        trained, count, known = module.trained, value_count(gradients), feedback.keys.get(key)
        has_all = gradients.numel() == shards * sum(length for _, length in trained)
        has_same = known is None or (known.count, known.contents or trained) == (count, trained)
        if not (has_all and has_same):
            feedback.free(key)
        feedback.key(key, count).contents = trained
        return key

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

    def _require_all(self) -> None:
        """Raise, once, if ``fully_shard`` was applied to more modules or residuals are of others."""
        modules, kept = _sharded_modules(self._model, self._name, self._method), self._state.feedback.keys
        later = [module.name for module in modules if module.name not in self.keys]
        if later:
            raise RuntimeError(
                f"fully_shard was applied to {later} after {self._name}, which does nothing for "
                "their gradients: apply it before"
            )
        if kept and not kept.keys() & {*self.keys}:
            raise RuntimeError(
                f"the state's residuals are of {[*kept]}, but the model has {self.keys}: go on without them, "
                "or name its modules as in the run that saved them"
            )
        self._complete = True

    def _agree_on_modules(self) -> list[ShardedModule]:
        """Return the model's FSDP modules, if no rank has a reason to refuse."""
        name, model, state = self._name, self._model, self._state
        if not isinstance(state, QuantizedAllreduceState):
            raise TypeError(f"{name}: state must be a QuantizedAllreduceState, got {type(state).__name__}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{name}: model must be a module, got {type(model).__name__}")
        problem, modules, places = None, [], []
        try:
            modules = _sharded_modules(model, name, self._method)
            places = sorted({place for module in modules for place in module.places})
            self._refuse(modules, places)
        except ValueError as error:  # the other ranks must hear of it
            problem = ValueError(f"{name}: {error}")
        terms = {
            f"module {module.name!r}": (module.shapes, module.places if self._same_shards else [])
            for module in modules
        }
        require_same_terms(state.process_group, name, terms, problem=problem)
        state.places = places
        sharded: set[int] = set().union(*(module.parameter_ids for module in modules))
        others = [
            key for key, one in model.named_parameters() if one.requires_grad and id(one) not in sharded
        ]
        if others:  # they would drift apart
            warnings.warn(
                f"{name} does not average gradients of {others}: fully_shard was applied to no module that "
                "has them, or was told to ignore them",
                stacklevel=4,
            )
        return modules

    def _refuse(self, modules: list[ShardedModule], places: list[str]) -> None:
        """Raise a ``ValueError`` unless this rank can use the state for these modules."""
        state = self._state
        if id(state) in _handles:
            raise ValueError("the state is used for a model: make one for each, or remove() the other handle")
        if state.options.exact_1d:
            raise ValueError(
                "exact_1d does not work: FSDP hands over a module's parameters as one flat tensor"
            )
        if not modules:
            raise ValueError("fully_shard was applied neither to the model nor to a module in it")
        ranks = dist.get_process_group_ranks(state.process_group)
        for module in modules:
            self._refuse_module(module, ranks)
        if state.feedback.keys and state.places not in (None, places):
            raise ValueError(f"the state has residuals of shards {state.places}, but this rank has {places}")


_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
"""By the ``id`` of their states. A handle lives as long as the modules, whose hooks have it and its state."""

_last_use: weakref.WeakKeyDictionary[
    QuantizedAllreduceState, tuple[list[weakref.ref[torch.nn.Module]], int]
] = weakref.WeakKeyDictionary()
"""The modules that each state was used for last, and how often it had loaded residuals then."""


def _forget_another_model(modules: Sequence[ShardedModule], state: QuantizedAllreduceState) -> None:
    """Forget residuals of another model, whose modules may have the same names, unless they were loaded."""
    feedback, known = state.feedback, _last_use.get(state)
    here = [weakref.ref(module.module) for module in modules]
    if known is not None and known[0] != here and known[1] == feedback.loads:
        state.wait()
        feedback.forget()
    _last_use[state] = here, feedback.loads


def _agree_on_finite(
    modules: Sequence[ShardedModule], state: QuantizedAllreduceState, outcome: Outcome, device: torch.device
) -> None:
    """Let a step count on no rank if an average is not finite on one of those that share a module."""
    with outcome.watch():
        state.wait()  # for what is noted on its thread, and on a stream of its own
        groups = {id(group): group for module in modules for group in module.groups}
        own = dist.get_process_group_ranks(state.process_group)  # which have agreed in each exchange
        flag = outcome.any_so_far(device).to(torch.int32)
        for group in groups.values():
            if group.size() > 1 and dist.get_process_group_ranks(group) != own:
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        outcome.not_finite(flag.bool())


def _sharded_modules(model: torch.nn.Module, name: str, method: str) -> list[ShardedModule]:
    """Return the modules that ``fully_shard`` was applied to and that have parameters, in the model's order.

    Modules that were given to one ``fully_shard`` call together count as one, with the first one's name.
    Names are those without the wrappers of ``torch.compile`` and of checkpoints.

    Raises:
        MissingTorchFeatureError: This torch's FSDP has no such method.
        ValueError: A module has several groups of parameters, each with a mesh of its own.
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - takes a second, and few programs need it

    private(FSDPModule, method, name)
    found: dict[int, ShardedModule] = {}
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            key = without_wrappers(path) or "(model)"
            state = private(module, "_get_fsdp_state", _PURPOSE)()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = groups or [private(state, "_fsdp_param_group", _PURPOSE)]  # all that torch 2.9 has
            if len(groups) > 1:
                raise ValueError(
                    f"module {key!r} has several groups of parameters, which FSDP gives no hooks"
                )
            found.setdefault(id(groups[0]), ShardedModule(key, module, groups[0]))
    return [module for module in found.values() if module.group is not None]
