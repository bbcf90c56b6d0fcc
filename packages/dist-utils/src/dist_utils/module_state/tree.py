"""Which modules contain which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["get_root_modules"]


def get_root_modules(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those modules that are inside none of the others, in their order.

    Args:
        modules: Any modules, related or not.

    Cost:
        One walk through every module's descendants.

    Source:
        ``torch.distributed.utils._get_root_modules``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        >>> get_root_modules([model[0], model]) == [model]
        True
    """
    inside = {descendant for module in modules for descendant in module.modules() if descendant is not module}
    return [module for module in modules if module not in inside]
