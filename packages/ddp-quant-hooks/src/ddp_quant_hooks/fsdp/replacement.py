"""A collective of FSDP2 that is replaced in all modules of a model, after checks on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_quant_hooks.fsdp.sharded_module import ShardedModule, sharded_modules
from dist_utils import AgreementError


class Substitute:
    """What FSDP calls instead of a collective of its own.

    torch's class for it has no public name up to torch 2.15, and nothing asks for it.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)


class Replacement(ABC):
    """One of FSDP's collectives, replaced in every FSDP module of a model until :meth:`remove`.

    Args:
        model: The model.

    Raises:
        TypeError, ValueError: This rank cannot replace it. The other ranks get an ``AgreementError``, which
            all ranks get if their modules differ.
        MissingTorchFeatureError: This torch cannot replace it.
    """

    _function: ClassVar[str]
    """The name of the user's function, for messages."""
    _method: ClassVar[str]
    """The method of ``FSDPModule`` that sets what FSDP calls."""
    _record: ClassVar[str]
    """What it sets, by the name in FSDP's record."""
    _purpose: ClassVar[str]
    """What the model's modules lack without it, for messages."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules: list[ShardedModule] = []
        self._replaced: list[tuple[ShardedModule, Any, Any]] = []
        self._used_since_look: set[ShardedModule] = set()
        problem: Exception | None = None
        try:
            self._modules = sharded_modules(model, self._function, self._method)
            for module in self._modules:  # they are known by now, and with them who must hear of it
                module.refuse_several_groups()
            self._refuse()
        except (TypeError, ValueError) as error:  # the other ranks must hear of it
            problem = type(error)(f"{self._function}: {error}")
        self._agree(problem)

    @abstractmethod
    def _refuse(self) -> None:
        """Raise a ``TypeError`` or a ``ValueError`` if this rank cannot replace the modules' collective."""

    @abstractmethod
    def _groups(self) -> Iterable[dist.ProcessGroup]:
        """Return the groups whose ranks must replace the same modules' collectives, in one order."""

    @abstractmethod
    def _agree_in(self, group: dist.ProcessGroup, problem: Exception | None) -> None:
        """Raise on all ranks of a group if what they replace differs, or one of them has a problem."""

    def _agree(self, problem: Exception | None) -> None:
        """Compare the modules with other ranks.

        Twice: what a group finds is told in those that had agreed before, so that a mesh has handles on all
        of its ranks or on none.

        Raises:
            TypeError, ValueError: ``problem``, if there is one.
            AgreementError: The modules differ, or another rank has a problem.
        """
        for group in [*dict.fromkeys(self._groups())] * 2:
            try:
                self._agree_in(group, problem)
            except Exception as error:  # noqa: BLE001, PERF203 - the other groups must hear of it
                problem = problem or error
                if isinstance(error, AgreementError) and error.missing:
                    break  # ranks of the other groups have waited for this one as long
        if problem is not None:
            raise problem

    @abstractmethod
    def _substitute(self, module: ShardedModule) -> Any:
        """Return what FSDP is to call for a module."""

    def _replace(self) -> None:
        """Set the substitutes."""
        for module in self._modules:
            ours = self._substitute(module)
            self._replaced.append((module, ours, module.collective(self._record)))
            getattr(module.module, self._method)(ours)

    def remove(self) -> None:
        """Restore what FSDP did before. A second call does nothing."""
        for module, ours, before in self._replaced:
            if module.collective(self._record) is ours:  # not the user's own, set later
                getattr(module.module, self._method)(before)
        self._replaced.clear()

    def _require_no_later_module(self, used: ShardedModule) -> None:
        """Raise, if ``fully_shard`` was applied to more modules. Looks once in a pass.

        A pass has begun where a module is used that was used since the last look. FSDP takes modules at any
        time: one that comes when others have run already is a root of its own.

        Args:
            used: The module that is used now.
        """
        if self._used_since_look and used not in self._used_since_look:
            self._used_since_look.add(used)
            return
        self._used_since_look = {used}
        known = {id(module.group) for module in self._modules}
        found = sharded_modules(self._model, self._function, self._method)
        later = [module.name for module in found if id(module.group) not in known]
        if later:
            raise RuntimeError(
                f"fully_shard was applied to {later} after {self._function}, which does nothing for "
                f"their {self._purpose}: apply it before, or remove() the handle and call again"
            )
