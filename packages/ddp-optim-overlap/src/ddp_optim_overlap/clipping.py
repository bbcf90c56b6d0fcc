"""Gradient clipping: which policies are exact, and which are approximate."""

from __future__ import annotations

import abc
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_optim_overlap.errors import ConfigError

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class ClipPolicy(abc.ABC):
    """How to limit averaged gradients before a step uses them."""

    def attach(self, overlap: object) -> None:  # noqa: B027 - most policies remember nothing
        """Called when an overlap begins to use the policy. May raise."""

    def release(self, overlap: object, *, failed: bool) -> None:  # noqa: B027
        """Called when an overlap has ended; if it has failed, ranks may have seen different gradients."""

    def begin(self) -> None:  # noqa: B027
        """Called when a step begins."""

    def join(self) -> None:  # noqa: B027
        """Called instead, under ``join()``, on a rank that has no data for the step. May raise."""

    @abc.abstractmethod
    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Limit the gradients of one bucket's parameters."""

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm of the step's averaged gradients before clipping, where the policy computes it."""
        return None


@dataclass(frozen=True)
class ByValue(ClipPolicy):
    """Clamp every value into ``[-max_value, max_value]``: exactly ``torch.nn.utils.clip_grad_value_``.

    Args:
        max_value: The limit, positive.
    """

    max_value: float

    def __post_init__(self) -> None:
        _require_positive("max_value", self.max_value)

    def terms(self) -> dict[str, object]:
        """Return the limit."""
        return {"max_value": self.max_value}

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clamp in place."""
        if _gradients(parameters):  # torch needs at least one
            torch.nn.utils.clip_grad_value_(parameters, self.max_value)


@dataclass
class _NormLimit(ClipPolicy):
    max_norm: float

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)

    def terms(self) -> dict[str, object]:
        """Return the limit."""
        return {"max_norm": self.max_norm}


@dataclass
class PerBucketNorm(_NormLimit):
    """An approximation: scale the gradients of every bucket so that their norm is at most ``max_norm``.

    Buckets with small gradients keep them, so directions change; the whole norm can reach
    ``max_norm * sqrt(buckets)``. How parameters fall into buckets depends on ``bucket_cap_mb``.

    Args:
        max_norm: The limit of each bucket's 2-norm, positive.
    """

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Scale in place."""
        gradients = _gradients(parameters)
        _scale(gradients, self.max_norm, _norm(gradients, parameters[0].device))


@dataclass
class PreviousStepNorm(_NormLimit):
    """An approximation: scale by the factor that ``clip_grad_norm_`` would have used in the previous step.

    A sudden large gradient is clipped one step late. While no norm is known yet, every bucket is
    limited as by :class:`PerBucketNorm`: in a first step, and in the first one after an error. Not under
    ``join()``: a rank without data computes no norm. Each overlap needs a policy of its own.

    Args:
        max_norm: The limit of the 2-norm, positive.
        previous: The norm to begin with, the same on all ranks; on resuming, the saved :attr:`norm`.
    """

    previous: float | torch.Tensor | None = None
    _squares: list[torch.Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _overlap: weakref.ref[object] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.previous is not None and not self.previous >= 0:
            raise ValueError(f"previous must be a norm, which is not negative, got {self.previous}")

    def terms(self) -> dict[str, object]:
        """Return the limit, and the norm to begin with."""
        return {**super().terms(), "previous": None if self._newest is None else float(self._newest)}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: everything but the overlap."""
        return {**vars(self), "_overlap": None}

    def attach(self, overlap: object) -> None:
        """Refuse a second overlap: each would clip by the norms of both."""
        if self._user is not None:
            gc.collect()  # a model is part of cycles, and may be waiting for this
        if self._user is not None:
            raise ConfigError("another overlap uses this PreviousStepNorm: make one for each model")
        self._overlap = weakref.ref(overlap)

    def release(self, overlap: object, *, failed: bool) -> None:
        """Let another overlap use the policy, without the norms of one that has failed."""
        if self._user is overlap:
            self._overlap = None
            if failed:
                self.previous, self._squares = None, []

    def begin(self) -> None:
        """Clip by the last step's norm from now on."""
        self.previous, self._squares = self._newest, []

    def join(self) -> None:
        """Refuse: the other ranks would clip by a newer norm from then on."""
        raise ConfigError(
            "PreviousStepNorm does not work under join(): a rank without data does not compute the norm, and "
            "would clip by an older one than the others. Use PerBucketNorm, or ByValue"
        )

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Scale in place by the previous norm, and remember this one."""
        gradients = _gradients(parameters)
        norm = _norm(gradients, parameters[0].device)
        self._squares.append(norm.square())
        _scale(gradients, self.max_norm, norm if self.previous is None else self.previous)

    @property
    def _user(self) -> object | None:
        return None if self._overlap is None else self._overlap()

    @property
    def _newest(self) -> float | torch.Tensor | None:
        return self.norm if self._squares else self.previous

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm in the last step, before clipping."""
        return torch.stack(self._squares).sum().sqrt() if self._squares else None


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all gradients, in fp32; zero, on ``device``, if there are none."""
    norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)).float() for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def _wide(gradient: torch.Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _scale(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | float) -> None:
    factor = torch.as_tensor(limit / (norm + _TINY)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
