"""Times and sizes as people read them."""

from __future__ import annotations

__all__ = ["mebibytes", "milliseconds"]


def milliseconds(seconds: float) -> str:
    """Return a time in ms with three digits, or with all digits before the point."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def mebibytes(size: int) -> str:
    """Return a size in MiB."""
    return f"{size / 2**20:g} MiB"
