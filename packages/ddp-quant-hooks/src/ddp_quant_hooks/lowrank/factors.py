"""The mean of all ranks' matrices as a product of two factors, of which only the factors are sent.

With M the sum of a rank's gradient and of what earlier steps have left of it, and Q the right factor of the
last step:

1. P = M Q; the mean of P over all ranks.
2. U, an orthonormal basis of P's columns; Q = M^T U; the mean of Q over all ranks.
3. The gradient becomes U mean(Q)^T. M - U Q^T is left for the next step, with this rank's Q as it was sent.

All that is not worth a factor goes along with P. (PowerSGD, Vogels et al. 2019, with rounded factors, rows
and columns made alike, and residuals of a rank's own factor.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

import torch

from ddp_quant_hooks.exchange.plan import Span
from ddp_quant_hooks.exchange.values import Values, put_back
from ddp_quant_hooks.kernels import dispatch
from ddp_quant_hooks.kernels.low_rank import FactorCall, Matrix

RankRule: TypeAlias = int | Literal["auto"]
"""The number of columns of factors: of all, or by the sides of each matrix."""

LEAST_REDUCTION = 2
"""A matrix has factors if they are so many times fewer numbers than it has. Below that, few bits send hardly
more, and round only."""

MOST_SECTIONS = 2
"""Factors are averaged in so many sections: one is computed while another is sent."""

LEAST_SECTION = 1 << 15
"""The numbers in factors of a section, at least: with fewer, a message takes less time than its beginning."""


@dataclass(frozen=True)
class MatrixPart:
    """A matrix among the values of a bucket.

    Attributes:
        start: Where it begins.
        rows: The number of its rows.
        columns: The number of its columns.
        rank: The number of columns of each factor.
        owner: Its place among the owners of the bucket.
    """

    start: int
    rows: int
    columns: int
    rank: int
    owner: int = 0

    @property
    def span(self) -> Span:
        """Where it is in the bucket."""
        return Span(self.start, self.start + self.rows * self.columns)

    def in_bucket(self, values: torch.Tensor) -> torch.Tensor:
        """Return the matrix, given something of all values of the bucket."""
        return values[self.span.start : self.span.stop].view(self.rows, self.columns)


@dataclass(frozen=True)
class Arrangement:
    """Which values of a bucket are matrices with factors.

    Attributes:
        matrices: In the order of the bucket.
        rest: The other values.
    """

    matrices: tuple[MatrixPart, ...]
    rest: tuple[Span, ...]

    @cached_property
    def left_lengths(self) -> list[int]:
        """The number of values of each left factor, and then of each part of the rest."""
        return [one.rank * one.rows for one in self.matrices] + [len(span) for span in self.rest]

    @cached_property
    def right_lengths(self) -> list[int]:
        """The number of values of each right factor."""
        return [one.rank * one.columns for one in self.matrices]

    @cached_property
    def matrix_lengths(self) -> list[int]:
        """The number of values of each matrix."""
        return [len(one.span) for one in self.matrices]

    def of_matrices(self, span: Span) -> Iterator[Span]:
        """Yield where a part of all matrices, one after another, is in the bucket."""
        before = 0
        for whole in (one.span for one in self.matrices):
            low, high = max(span.start - before, 0), min(span.stop - before, len(whole))
            if low < high:
                yield Span(whole.start + low, whole.start + high, span.weight)
            before += len(whole)

    def in_sections(self) -> list[Arrangement]:
        """Return this in parts that send about the same, and not too little.

        The rest is in the last one: what the first one sends is waited for with least to do meanwhile.
        """
        sent = [one.rank * (one.rows + one.columns) for one in self.matrices]
        count = max(1, min(MOST_SECTIONS, sum(sent) // LEAST_SECTION))
        sections, before = [list[MatrixPart]() for _ in range(count)], 0
        for part, length in zip(self.matrices, sent, strict=True):
            sections[(before + length // 2) * count // sum(sent)].append(part)
            before += length
        *others, last = [tuple(some) for some in sections if some] or [()]
        return [*(Arrangement(some, ()) for some in others), Arrangement(last, self.rest)]


def matrix_shape(shape: Sequence[int], strides: Sequence[int] | None = None) -> tuple[int, int]:
    """Return rows and columns of a parameter's values in memory: its outermost dimension there, and the rest.

    Args:
        shape: Of the parameter. Dimensions of length 1 do not count.
        strides: Likewise; ``None``: of a contiguous tensor.
    """
    sizes = [size for size in shape if size != 1]
    if strides is not None:
        both = zip(strides, shape, strict=True)
        sizes = [size for stride, size in sorted(both, key=lambda one: -one[0]) if size != 1]
    rows, columns = (sizes or [1])[0], 1
    for size in sizes[1:]:
        columns *= size
    return rows, columns


def rank_of(rows: int, columns: int, rule: RankRule) -> int:
    """Return the number of columns that a matrix's factors have.

    By the shorter side, four for each time that it doubles: 8 from 128 on, 12 from 256, 16 from 512.
    """
    if rule != "auto":
        return rule
    return 4 * max(1, min(rows, columns).bit_length() - 6)


def arrange(
    shapes: Sequence[tuple[int, int]], rule: RankRule, owners: Sequence[int] | None = None
) -> Arrangement:
    """Decide which of the neighboring matrices of these shapes are worth factors, of which rank.

    Args:
        shapes: The rows and columns of each.
        rule: For the rank.
        owners: The place of each one's owner; ``None``: each has one of its own.
    """
    matrices, rest = list[MatrixPart](), list[Span]()
    starts = accumulate((rows * columns for rows, columns in shapes), initial=0)
    for owner, (rows, columns), start in zip(owners or range(len(shapes)), shapes, starts, strict=False):
        rank = rank_of(rows, columns, rule)
        if rows * columns >= LEAST_REDUCTION * rank * (rows + columns) > 0:
            matrices.append(MatrixPart(start, rows, columns, rank, owner))
        elif rows * columns:
            begins = rest.pop().start if rest and rest[-1].stop == start else start
            rest.append(Span(begins, start + rows * columns))
    return Arrangement(tuple(matrices), tuple(rest))


class Factors:
    """One average of a bucket's matrices: three methods, with a mean over the ranks after the first two.

    Args:
        arrangement: Of the bucket's values.
        values: All of them.
        residual: What earlier steps have left of them, bf16; ``None``: nothing.
        new_residual: The output for what this step leaves, bf16; without memory in common with ``residual``.
        right: The right factors of the last step, fp32, one after another.
        next_right: The output for those of the next step; it may be the same memory.
        left_over: The output for what this step leaves of matrices, bf16, one after another; ``None``: it
            goes where ``new_residual`` has them.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        values: Values,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor,
        right: torch.Tensor,
        next_right: torch.Tensor,
        left_over: torch.Tensor | None = None,
    ) -> None:
        self._parts, self._values = arrangement.matrices, values
        self._left_lengths, self._right_lengths = arrangement.left_lengths, arrangement.right_lengths
        self._matrices = [
            Matrix(
                values.parts(part.span)[0].view(part.rows, part.columns),  # a matrix is within one tensor
                None if residual is None else part.in_bucket(residual),
            )
            for part in self._parts
        ]
        self._new_residuals = [part.in_bucket(new_residual) for part in self._parts]
        self._matrix_lengths = arrangement.matrix_lengths
        self._left_over = self._new_residuals if left_over is None else self._of_matrices(left_over)
        self._rest = _Rest(arrangement.rest, values, residual, new_residual)
        self._right, self._next_right = self._rights(right), self._rights(next_right)
        self._device = values.device

    def left_row(self) -> torch.Tensor:
        """Return this rank's left factors and the rest, to be averaged over the ranks in place."""
        row = torch.empty(sum(self._left_lengths), dtype=torch.float32, device=self._device)
        lefts, rest = self._lefts(row)
        dispatch.run_on_factors([*map(FactorCall.multiply, self._matrices, self._right, lefts)], check=False)
        self._rest.write_sum(rest)
        self._row = row
        return row

    def right_row(self, lost: torch.Tensor) -> torch.Tensor:
        """Return this rank's right factors, to be averaged over the ranks in place.

        Args:
            lost: What :meth:`left_row` has lost by rounding on this rank, of its share of the mean.
        """
        means, rest = self._lefts(self._row)
        of_matrices = self._row[: len(self._row) - len(rest)]
        self._left, _ = self._lefts(torch.empty_like(of_matrices))
        weights, _ = self._lefts(torch.empty_like(of_matrices))
        self._row = torch.empty(sum(self._right_lengths), dtype=torch.float32, device=self._device)
        rights = self._rights(self._row)
        calls = [*map(FactorCall.find_basis, means, self._left, weights)]
        calls += map(FactorCall.multiply_transposed, self._matrices, weights, rights)
        dispatch.run_on_factors(calls, check=False)
        self._rest.put_mean(rest, lost[len(lost) - len(rest) :])
        self._own = self._row.clone()
        return self._row

    def restore(self, lost: torch.Tensor) -> None:
        """Write the mean gradient, what is left of this rank's own, and the factors for the next step.

        Args:
            lost: What :meth:`right_row` has lost by rounding on this rank, of its share of the mean.
        """
        self._own -= lost
        means, owns = self._rights(self._row), self._rights(self._own)
        calls = [*map(FactorCall.restore, self._matrices, self._left, owns, means, self._left_over)]
        calls += map(FactorCall.follow, self._left, means, self._next_right)
        dispatch.run_on_factors(calls, check=False)
        self._values.mark_written()

    def add(self, row: torch.Tensor, lost: torch.Tensor) -> None:
        """Add to the mean gradient what :meth:`restore` has left over, after its average.

        Args:
            row: The mean of all matrices' rests, fp32; overwritten.
            lost: What this rank has lost of its own share of them.
        """
        for matrix, rest, error, new_residual in zip(
            self._matrices, self._of_matrices(row), self._of_matrices(lost), self._new_residuals, strict=True
        ):
            limits = torch.finfo(matrix.values.dtype)
            matrix.values.copy_(rest.add_(matrix.values).clamp_(limits.min, limits.max))
            new_residual.copy_(error)

    def _of_matrices(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices in a row."""
        parts = torch.split(row, self._matrix_lengths) if self._matrix_lengths else ()
        return [one.view(part.rows, part.columns) for one, part in zip(parts, self._parts, strict=True)]

    def _lefts(self, row: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the left factors in a row, and the rest behind them."""
        lengths = self._left_lengths[: len(self._parts)]
        *parts, rest = torch.split(row, [*lengths, len(row) - sum(lengths)])
        return [one.view(part.rank, -1) for one, part in zip(parts, self._parts, strict=True)], rest

    def _rights(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the right factors in a row."""
        parts = torch.split(row, self._right_lengths)
        return [one.view(part.rank, -1) for one, part in zip(parts, self._parts, strict=True)]


class _Rest:
    """Values that have no factors.

    Args:
        spans: Where they are in the bucket.
        values: Of the whole bucket.
        residual: Likewise, or ``None``.
        new_residual: Likewise.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        values: Values,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor,
    ) -> None:
        self._values = values.parts_of(spans)
        self._residuals = [] if residual is None else [residual[one.start : one.stop] for one in spans]
        self._new_residuals = [new_residual[one.start : one.stop] for one in spans]

    def write_sum(self, row: torch.Tensor) -> None:
        """Write the values and what is left of earlier ones."""
        if self._values:
            row.copy_(torch.cat(self._values))
        if self._residuals:
            row += torch.cat(self._residuals).float()

    def put_mean(self, mean: torch.Tensor, lost: torch.Tensor) -> None:
        """Write the mean in place of the values, and keep what was lost."""
        if self._values:
            limits = torch.finfo(self._values[0].dtype)
            put_back(self._values, mean.clamp(limits.min, limits.max))  # a mean that was finite stays so
            put_back(self._new_residuals, lost)
