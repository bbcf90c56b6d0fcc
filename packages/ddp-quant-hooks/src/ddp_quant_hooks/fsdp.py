"""FSDP2: average gradients of ``fully_shard`` between nodes, or reduce and scatter them, in few bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import torch

from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.sharded_averages import ShardAverages
from ddp_quant_hooks.sharded_models import (
    agreed_modules,
    key_of,
    refuse_for_all_reduce,
    refuse_for_reduce_scatter,
)
from ddp_quant_hooks.sharded_modules import ShardedModule, sharded_modules
from ddp_quant_hooks.sharded_scatter import is_quantized, reduce_scatter_class
from ddp_quant_hooks.state import QuantizedAllreduceState

__all__ = ["Handle", "quantize_all_reduce", "quantize_reduce_scatter"]

_handles: weakref.WeakKeyDictionary[QuantizedAllreduceState, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)
"""The handle of each state in use. A handle lives as long as the model."""


class Handle:
    """The changes that :func:`quantize_all_reduce` or :func:`quantize_reduce_scatter` made to a model.

    Attributes:
        keys: Names of the model's FSDP modules, in the model's order, under which residuals are kept.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        state: QuantizedAllreduceState,
        keys: list[str],
        has_ours: Callable[[ShardedModule], bool],
    ) -> None:
        self.keys = keys
        self._name = name
        self._model = weakref.ref(model)
        self._state = state
        self._has_ours = has_ours
        self._complete = False
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Restore what FSDP did before. Residuals stay in the state. A second call does nothing.

        Sums that wait for a later micro-batch are dropped.
        """
        for undo in self._undo:
            undo()
        self._undo.clear()
        if _handles.get(self._state, lambda: None)() is self:
            del _handles[self._state]

    def _require_all(self) -> None:
        """Raise, once, if ``fully_shard`` was applied to more modules or residuals of others were loaded."""
        model = self._model()
        if model is None or self._complete:
            return
        later = [key_of(module) for module in sharded_modules(model) if not self._has_ours(module)]
        if later:
            raise RuntimeError(
                f"fully_shard was applied to {later} after {self._name}, which does nothing for their "
                "gradients: apply it before"
            )
        loaded = self._state.feedback.loaded
        if loaded is not None and loaded.keys and not loaded.keys.keys() & {*self.keys}:
            raise RuntimeError(
                f"the residuals that were loaded are of {[*loaded.keys]}, but the model has {self.keys}: go "
                "on without them, or name its modules as in the run that saved them"
            )
        self._complete = True


def quantize_all_reduce(model: torch.nn.Module, state: QuantizedAllreduceState) -> Handle:
    """Average between nodes, with 8 or 4 bits a value, the gradients that FSDP has reduced inside a node.

    For models that ``fully_shard`` has sharded over the ranks of a node, or over this rank alone (a mesh of
    one rank, for plain data parallelism). The result is that of native HSDP, which has a mesh of two
    dimensions: the mean over all ranks.

    Every module that ``fully_shard`` was applied to sends its gradients as soon as they are reduced inside
    the node. On CPUs they are sent while backward goes on, and waited for when it ends; no hook should read
    gradients before. A module waits for its own gradients at once if they are not views of what was reduced:
    they are added to earlier ones, have another dtype than the reduction, are offloaded, or a post-accumulate
    hook takes them. On GPUs the stream of FSDP's all-reduce waits, and with NCCL the host does not.

    With error feedback, one ``backward()`` is one step; it must not be inside ``state.step()``. With several
    micro-batches, nothing is averaged during ``set_requires_gradient_sync(False)`` or
    ``set_requires_all_reduce(False)``, and the last one averages their sum. With the latter, reduced
    gradients are kept apart from ``.grad``, which stays as it is; if a pass fails, or FSDP's
    ``reset_iter_state()`` is called, they are dropped, and the step starts over.

    Args:
        model: An FSDP module, or a module that contains some, after ``fully_shard`` has been applied to all
            of them. Neither on a mesh for HSDP nor from ``replicate()``. Parameters outside of them are not
            averaged, as in FSDP; a warning names them.
        state: Its process group joins the ranks with the same shards on all nodes. One for each model.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no FSDP module; one averages between nodes itself or has an all-reduce hook; the
            state is already used for a model, has ``exact_1d`` or the residuals of other shards, or its group
            has other ranks of this node. The other ranks of the group get an AgreementError.
        AgreementError: The ranks of the group have different models or different shards, including those of
            tensor parallelism.
        RuntimeError: This torch has no ``FSDPModule.set_all_reduce_hook`` (2.6). ``backward()`` raises it
            when a peer fails: then close the state on every rank.

    Cost:
        Collective, over the store. Each ``backward()`` takes what :func:`ddp_quant_hooks.all_reduce` takes
        for this rank's shards of each module.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))  # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
        >>> quantize_all_reduce(model, QuantizedAllreduceState(mesh["node"]))  # doctest: +SKIP
    """
    name = "quantize_all_reduce"
    modules = agreed_modules(name, model, state, "set_all_reduce_hook", refuse_for_all_reduce, in_use=_in_use)
    handle = Handle(name, model, state, list(modules), lambda module: module.all_reduce_hook is not None)
    averages = ShardAverages(state, handle._require_all)  # noqa: SLF001 - its maker
    for key, module in modules.items():
        hook = averages.hook_of(key, module)
        module.set_all_reduce_hook(hook)
        handle._undo.append(partial(_take_hook_away, module, hook))  # noqa: SLF001
    _handles[state] = weakref.ref(handle)
    return handle


def quantize_reduce_scatter(model: torch.nn.Module, state: QuantizedAllreduceState) -> Handle:
    """Reduce and scatter FSDP's gradients with 8 or 4 bits a value: for sharding across slow links.

    Every module that ``fully_shard`` was applied to gets :func:`ddp_quant_hooks.reduce_scatter_tensor` as its
    reduce-scatter (``FSDPModule.set_custom_reduce_scatter``). Parameters are gathered as they are: weights
    stay exact. One ``backward()`` is one step, with error feedback (``"both"``).

    Args:
        model: As for :func:`quantize_all_reduce`, on a mesh with shards; for HSDP too.
        state: Its process group has the ranks that FSDP shards over. One for each model; not a hierarchical
            one.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError, ValueError, AgreementError, RuntimeError: As :func:`quantize_all_reduce`; or a module
            has the reduce-scatter of another state. ``backward()`` raises a ValueError if a divide factor
            asks for an operation that is neither sum nor mean.

    Cost:
        Collective, over the store. Each ``backward()`` takes what
        :func:`ddp_quant_hooks.reduce_scatter_tensor` takes for each module's gradients, and waits for it.

    Example:
        >>> fully_shard(model)  # doctest: +SKIP
        >>> quantize_reduce_scatter(model, QuantizedAllreduceState())  # doctest: +SKIP
    """
    name = "quantize_reduce_scatter"
    if isinstance(state, HierarchicalAllreduceState):
        raise TypeError(f"{name} supports no hierarchical state: give a QuantizedAllreduceState")
    modules = agreed_modules(
        name, model, state, "set_custom_reduce_scatter", refuse_for_reduce_scatter, in_use=_in_use
    )
    handle = Handle(name, model, state, list(modules), lambda module: is_quantized(module.reduce_scatter))
    reduce_scatter = reduce_scatter_class(state, handle._require_all)  # noqa: SLF001
    for key, module in modules.items():
        ours, before = reduce_scatter(key), module.reduce_scatter
        module.set_reduce_scatter(ours)
        handle._undo.append(partial(_put_reduce_scatter_back, module, ours, before))  # noqa: SLF001
    _handles[state] = weakref.ref(handle)
    return handle


def _in_use(state: QuantizedAllreduceState) -> bool:
    """Return whether a model uses the state. FSDP's modules are in cycles: a deleted one may linger."""
    handle = _handles.get(state)
    if handle is not None and handle() is not None:
        gc.collect()
    return handle is not None and handle() is not None


def _take_hook_away(module: ShardedModule, hook: Callable[[torch.Tensor], None]) -> None:
    if module.all_reduce_hook is hook:  # not the user's own, set later
        module.set_all_reduce_hook(None)
        module.waiting_sum = None


def _put_reduce_scatter_back(module: ShardedModule, ours: object, before: object) -> None:
    if module.reduce_scatter is ours:
        module.set_reduce_scatter(before)
