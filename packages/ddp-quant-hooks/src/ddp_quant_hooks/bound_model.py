"""The model whose gradients a state averages: bound once, or given in every call."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from dist_utils.comm_hooks import BucketWatch
from dist_utils.process_groups import group_of_model

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BoundModel"]

_COMPILED = "_orig_mod"
"""What ``torch.compile`` calls a module in the wrapper that it makes."""


class BoundModel:
    """The part of a hook's state that knows the model and the names of its parameters."""

    _group: dist.ProcessGroup | None

    def __init__(self) -> None:
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # for messages
        self._watch: BucketWatch | None = None
        self._bound_names: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """The group that averages."""

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Bind this state to its model, so that no other call needs the model.

        A state without a process group takes the model's. The model is not kept alive.

        If two backward passes of the model end and the state's hook has received no bucket, a warning says
        so: the hook is not registered with this module, perhaps because a framework ignored it.

        Args:
            ddp: The ``DistributedDataParallel`` module whose gradients are averaged.

        Returns:
            The state itself.

        Raises:
            TypeError: ``ddp`` is not a ``DistributedDataParallel`` module.
            ValueError: It averages over other ranks than this state.

        Example:
            >>> ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)  # doctest: +SKIP
        """
        self.remember(ddp)
        self.bucket_came()  # or no bucket of an earlier model is expected any more
        self._watch = BucketWatch(ddp, type(self).__name__)
        return self

    def remember(self, ddp: DistributedDataParallel) -> None:
        """Remember a model as :meth:`bind` does, without a warning if no bucket arrives.

        Raises:
            TypeError, ValueError: As :meth:`bind`.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"bind() takes a DistributedDataParallel module, got {type(ddp).__name__}")
        self._use_group_of(ddp)
        self._model = weakref.ref(ddp)
        self._bound_names = WeakIdKeyDictionary()
        for name, parameter in self._known_names(ddp).items():
            self._bound_names[parameter] = name

    def bucket_came(self) -> None:
        """Note that a bucket of the model has arrived, so the hook is in use."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _parameters_of(self, model: torch.nn.Module | None, method: str) -> Mapping[str, torch.Tensor]:
        bound = None if self._model is None else self._model()
        if model is None:
            model = bound
            if model is None:
                raise ValueError(
                    f"{method}() needs the model whose gradients are averaged: give it, or tell the state "
                    "once by bind(ddp)" + ("" if self._model is None else ", whose model is gone now")
                )
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a module, got {type(model).__name__}")
        names = self._known_names(model)
        if model is not bound:
            return names
        # From the first forward pass on, a model with tensor parallel does not list what DDP averages.
        remembered = self._bound_names.items()  # type: ignore[no-untyped-call]
        return {**{name: parameter for parameter, name in remembered}, **names}

    def _known_names(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        names = _parameter_names(model)
        for name, parameter in names.items():
            self._names[parameter] = name
        return names

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._names.get(parameter, None)  # type: ignore[no-untyped-call]
        return f"of shape {tuple(parameter.shape)}" if name is None else repr(name)

    def _use_group_of(self, ddp: DistributedDataParallel) -> None:
        """Take a model's group, or raise if it has other ranks than this state's."""
        self._group = group_of_model(ddp, self._group)


def _parameter_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a model's parameters by the names that they have without wrappers.

    ``DistributedDataParallel`` puts ``module.`` before all names, ``torch.compile`` puts ``_orig_mod.``
    before those of a compiled module, wherever it stands; the latter has no public name up to torch 2.15.
    """
    while isinstance(model, DistributedDataParallel) or hasattr(model, _COMPILED):
        inner = "module" if isinstance(model, DistributedDataParallel) else _COMPILED
        model = getattr(model, inner)
    return {
        ".".join(part for part in name.split(".") if part != _COMPILED): parameter
        for name, parameter in model.named_parameters()
    }
