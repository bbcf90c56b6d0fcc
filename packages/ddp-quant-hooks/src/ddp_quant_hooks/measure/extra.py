"""The command's own dependencies: the extra ``measure``."""

from __future__ import annotations

import importlib.util

__all__ = ["MissingExtraError", "require_extra"]


class MissingExtraError(ImportError):
    """The library that draws tables and the progress bar is not installed."""


def require_extra() -> None:
    """Return if rich is installed.

    Raises:
        MissingExtraError: It is not; the message says how to install it.
    """
    if importlib.util.find_spec("rich") is None:
        raise MissingExtraError(
            'tables and progress bar need rich: pip install "ddp-quant-hooks[measure]"', name="rich"
        )
