"""The options of a state: checked when it is made, and compared between ranks before the first bucket."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch

from ddp_quant_hooks.exchange.placement import INTRA_NODE
from ddp_quant_hooks.kernels.layout import Format, Layout

_EXACT_BYTES_PER_RANK, _MOST_EXACT_BYTES = 1 << 17, 1 << 20
"""On loopback 8 bits took 1.2 of fp32's time for 256 KiB on two ranks and 0.9 for 1 MiB; on eight, 1.5 for
512 KiB and 0.9 for 4 MiB. DDP's first bucket of 1 MiB is never below them."""

_FORMATS: dict[int, Format] = {16: "bfloat16", 8: "int8", 4: "int4"}

_OF_BLOCKS = ("block_size", "gather", "rotate")
"""Options that 16 bits do not have."""

ErrorFeedback: TypeAlias = Literal["none", "shard", "both"]


@dataclass(frozen=True)
class Options:
    """A user's options, with the defaults filled in; see ``QuantizedAllreduceState``."""

    bits: Literal[16, 8, 4]
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
        return Layout(_FORMATS[self.bits], self.block_size, self.rotate)

    @property
    def gather_layout(self) -> Layout:
        """The format in which averages are sent."""
        # 16-bit floats round relative to each value: a block's largest value costs the others nothing.
        return Layout(self.gather, self.block_size, self.rotate and self.gather != "fp16")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments with which a state has these options."""
        given = asdict(self)
        for name in _OF_BLOCKS if self.bits == 16 else ():
            del given[name]
        return given

    def layouts(self, dtype: torch.dtype) -> tuple[Layout, Layout]:
        """Return the formats in which values of a dtype, and averages of them, are sent."""
        if self.bits == 16 and dtype == torch.float16:  # which has more digits than bfloat16
            return (Layout("float16", self.block_size),) * 2
        return self.scatter_layout, self.gather_layout


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
    if bits not in _FORMATS:
        raise ValueError(f"bits must be 16, 8 or 4, got {bits!r}")
    if bits == 16:
        _refuse_with_floats(
            gather=gather,
            block_size=block_size,
            rotate=rotate or None,
            error_feedback=None if error_feedback == "none" else error_feedback,
        )
        gather, rotate = "bfloat16", False
    else:
        gather = _choice("gather", gather, _FORMATS[bits], ("int8", "int4", "fp16"))
    if gather == "int4" and bits != 4:
        raise ValueError("gather='int4' needs bits=4: averages would be rounded more than values")
    default_feedback = "both" if bits == 4 else "none"
    if not isinstance(exact_1d, bool):
        raise TypeError(f"exact_1d must be True or False, got {exact_1d!r}")
    block_size = _whole("block_size", (32 if bits == 4 else 128) if block_size is None else block_size)
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


def _refuse_with_floats(**options: Any) -> None:
    """Raise if an option is given that 16 bits do not have."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} does not work with bits=16: values become 16-bit floats, which have no "
                "blocks, and leave nothing to feed back"
            )


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
