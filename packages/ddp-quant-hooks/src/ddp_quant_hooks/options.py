"""The options of a state: checked when it is made, and compared between ranks before the first bucket."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ddp_quant_hooks.exchange.placement import INTRA_NODE
from ddp_quant_hooks.kernels.layout import Format, Layout

_EXACT_BYTES_PER_RANK, _MOST_EXACT_BYTES = 1 << 17, 1 << 20
"""On loopback 8 bits took 1.2 of fp32's time for 256 KiB on two ranks and 0.9 for 1 MiB; on eight, 1.5 for
512 KiB and 0.9 for 4 MiB. DDP's first bucket of 1 MiB is never below them."""

ErrorFeedback: TypeAlias = Literal["none", "shard", "both"]


@dataclass(frozen=True)
class Options:
    """A user's options, with the defaults filled in; see ``QuantizedAllreduceState``."""

    bits: Literal[8, 4]
    block_size: int
    gather: Format
    rotate: bool
    error_feedback: ErrorFeedback
    min_bytes: int | None
    exact_1d: bool
    sample_every: int
    levels: tuple[int, ...] | None
    intra_node: Literal["auto", "full", "quantized", "flat"]

    def least_bytes(self, ranks: int) -> int:
        """Return how many bytes a bucket must have to be sent in few bits, with this number of ranks."""
        by_default = min(_EXACT_BYTES_PER_RANK * ranks, _MOST_EXACT_BYTES)
        return by_default if self.min_bytes is None else self.min_bytes

    @property
    def scatter_layout(self) -> Layout:
        """The format in which values are sent."""
        return Layout("int8" if self.bits == 8 else "int4", self.block_size, self.rotate)

    @property
    def gather_layout(self) -> Layout:
        """The format in which averages are sent."""
        # 16-bit floats round relative to each value: a block's largest value costs the others nothing.
        return Layout(self.gather, self.block_size, self.rotate and self.gather != "fp16")


def check_options(
    *,
    bits: Any,
    block_size: Any,
    gather: Any,
    rotate: Any,
    error_feedback: Any,
    min_bytes: Any,
    exact_1d: Any,
    sample_every: Any,
    levels: Any,
    intra_node: Any,
) -> Options:
    """Return the options after checking their types and values.

    Raises:
        TypeError: An option is of another type.
        ValueError: An option has an unknown value.
    """
    bits = _whole("bits", bits)
    if bits not in {8, 4}:
        raise ValueError(f"bits must be 8 or 4, got {bits!r}")
    few = "int8" if bits == 8 else "int4"
    gather = _choice("gather", gather, few, ("int8", "int4", "fp16"))
    if gather == "int4" and bits != 4:
        raise ValueError("gather='int4' needs bits=4: averages would be rounded more than values")
    default_feedback = "none" if bits == 8 else "both"
    if not isinstance(exact_1d, bool):
        raise TypeError(f"exact_1d must be True or False, got {exact_1d!r}")
    block_size = _whole("block_size", (128 if bits == 8 else 32) if block_size is None else block_size)
    if not (rotate is None or isinstance(rotate, bool)):
        raise TypeError(f"rotate must be None, True or False, got {rotate!r}")
    options = Options(
        bits=bits,
        block_size=block_size,
        gather=gather,
        rotate=True if rotate is None else rotate,
        error_feedback=_choice("error_feedback", error_feedback, default_feedback, ("none", "shard", "both")),
        min_bytes=None if min_bytes is None else _count("min_bytes", min_bytes),
        exact_1d=exact_1d,
        sample_every=_count("sample_every", sample_every),
        levels=None if levels is None else _sizes("levels", levels),
        intra_node=_choice("intra_node", intra_node, "auto" if levels is None else "flat", INTRA_NODE),
    )
    options.scatter_layout  # noqa: B018 - raises if there is no such block
    return options


def _choice(name: str, value: Any, default: str, choices: tuple[str, ...]) -> Any:
    if value is None:
        return default
    allowed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return value


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence of integers, got {value!r}")
    sizes = tuple(_whole(f"{name}[{place}]", size) for place, size in enumerate(value))
    if not sizes or (min(sizes) < 2 and sizes != (1,)):
        raise ValueError(f"{name} must be numbers of at least 2, got {value!r}")
    return sizes


def whole_number(name: str, value: Any, *, at_least: int) -> int:
    """Return an option that is a whole number.

    Raises:
        TypeError: It is none.
        ValueError: It is too small.
    """
    number = _whole(name, value)
    if number < at_least:
        raise ValueError(f"{name} must be a number of at least {at_least}, got {number!r}")
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return operator.index(value)


def _count(name: str, value: Any) -> int:
    return whole_number(name, value, at_least=0)
