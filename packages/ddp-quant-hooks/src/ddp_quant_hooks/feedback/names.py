"""The names of a model's parameters, which are the same in every run and with any wrapper."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "_checkpoint_wrapped_module")
"""What ``torch.compile`` and ``checkpoint_wrapper`` call a module in the wrappers that they make. No public
names up to torch 2.15."""


class ModelNames:
    """The parameters of a model by name: of the one that a state is bound to, or of one that is given.

    Names are without the prefixes of ``DistributedDataParallel`` and ``torch.compile``.

    Attributes:
        digest: Of the names of the parameters that the bound model averages; empty before :meth:`bind`.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._bound: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Use the names of this model from now on. It is not kept alive."""
        self._model = weakref.ref(ddp)
        self._bound = WeakIdKeyDictionary({one: name for name, one in _parameters(ddp).items()})
        # Those that DDP ignores may differ between ranks, as experts do.
        averaged = [
            without_wrappers(name)
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        ]
        self.digest = hashlib.sha256("\n".join(averaged).encode(errors="surrogatepass")).hexdigest()[:16]

    def parameters(self, given: torch.nn.Module | None, method: str) -> Mapping[str, torch.Tensor]:
        """Return the parameters of the given model, or of the bound one, by name.

        Args:
            given: From the user.
            method: What needs them, for messages.

        Raises:
            TypeError: It is not a module.
            ValueError: None is given, and none is bound.
        """
        model = given if given is not None or self._model is None else self._model()
        if model is None:
            raise ValueError(
                f"{method}() needs the model whose gradients are averaged: give it, or tell the state once "
                "by bind(ddp)" + ("" if self._model is None else ", whose model is gone now")
            )
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a module, got {type(model).__name__}")
        names = _parameters(model)
        if self._model is None or model is not self._model():
            return names
        # From the first forward pass on, a model with tensor parallel does not list what DDP averages.
        bound = self._bound.items()  # type: ignore[no-untyped-call]
        return {**{name: parameter for parameter, name in bound}, **names}

    def find(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter of the bound model; ``None``: it has no such parameter."""
        name: str | None = self._bound.get(parameter, None)  # type: ignore[no-untyped-call]
        return name

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter of the bound model, or its shape; for messages."""
        name = self.find(parameter)
        return f"of shape {tuple(parameter.shape)}" if name is None else repr(name)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    while isinstance(model, DistributedDataParallel) or hasattr(model, _COMPILED):
        model = getattr(model, "module" if isinstance(model, DistributedDataParallel) else _COMPILED)
    return {without_wrappers(name): parameter for name, parameter in model.named_parameters()}


def without_wrappers(name: str) -> str:
    """Return the name of a parameter or module without the parts that wrappers have added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
