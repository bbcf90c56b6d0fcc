"""Products of gradients and their low-rank factors, as torch operators: the reference for the bits.

A matrix of rows and columns is the sum of a gradient and of what earlier steps have left of it. Factors are
kept column by column: the left one as ``(rank, rows)``, the right one as ``(rank, columns)``. Every sum has
one order, whatever computes it, and each operator rounds once:

- along a row there are 16 sums, of every 16th product each, which are then added in pairs;
- down the columns, blocks of 256 rows are summed one row after another, and then the sums of the blocks;
- over the columns of factors, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch.nn.functional import pad

from ddp_quant_hooks.kernels import rotation
from ddp_quant_hooks.kernels.call import RESIDUAL_DTYPES, VALUE_DTYPES, check_tensor

SUMS_OF_ROW = 16
ROWS_OF_SUM = 256

DEPENDENT = 2.0**-32
"""A column of a factor is dropped if the squared length of what the columns before it leave is a smaller part
of its own: it would be rounding errors, of which Gram's matrix in fp64 has some 2^-50."""


LEAST_SQUARE = 2.0**-14
"""Added to mean squares of rows and columns, which are relative to the largest one."""


class Matrix(NamedTuple):
    """A gradient's place in memory, and what belongs to it.

    Attributes:
        values: The gradient, of shape (rows, columns), contiguous; fp32, bf16 or fp16.
        residual: What earlier steps have left, bf16, of the same shape; ``None``: nothing.
    """

    values: torch.Tensor
    residual: torch.Tensor | None

    def sum(self) -> torch.Tensor:
        """Return both together, in fp32. A finite value stays finite."""
        values = self.values.float()
        if self.residual is None:
            return values
        largest = torch.finfo(torch.float32).max
        return torch.where(values.isfinite(), (values + self.residual).clamp(-largest, largest), values)


Kernel: TypeAlias = Literal["multiply", "multiply_transposed", "restore", "find_basis", "follow"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""In the order of ``LowRank`` in csrc/cpu_kernels.cpp."""

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class FactorCall(NamedTuple):
    """A call of a kernel on a matrix and factors of it, or on factors alone.

    Attributes:
        kernel: Which one.
        rows: Of the matrix.
        columns: Of the matrix; 0 if the kernel does not need them.
        rank: The number of columns of each factor.
        matrix: Without elements if the kernel needs factors alone.
        new_residual: As ``Work`` in csrc/cpu_low_rank.h and csrc/low_rank_kernels.cu has it, like all that
            follow; without elements if the kernel does not use it.
        left: Likewise.
        right: Likewise.
        mean_right: Likewise.
        sums: Likewise.
        weights: Likewise.
    """

    kernel: Kernel
    rows: int
    columns: int
    rank: int
    matrix: Matrix = Matrix(_NOTHING, None)
    new_residual: torch.Tensor = _NOTHING
    left: torch.Tensor = _NOTHING
    right: torch.Tensor = _NOTHING
    mean_right: torch.Tensor = _NOTHING
    sums: torch.Tensor = _NOTHING
    weights: torch.Tensor = _NOTHING

    @classmethod
    def multiply(cls, matrix: Matrix, right: torch.Tensor, left: torch.Tensor) -> FactorCall:
        """Return the call that writes the products of a matrix and the columns of a right factor.

        Args:
            matrix: Rows x columns.
            right: The factor; fp32, of shape (rank, columns).
            left: The output; fp32, of shape (rank, rows).
        """
        rows, columns = matrix.values.shape
        return cls("multiply", rows, columns, len(right), matrix, right=right, sums=left)

    @classmethod
    def multiply_transposed(cls, matrix: Matrix, left: torch.Tensor, right: torch.Tensor) -> FactorCall:
        """Return the call that writes the products of a matrix, transposed, and the columns of a left factor.

        Args:
            matrix: Rows x columns.
            left: The factor; fp32, of shape (rank, rows).
            right: The output; fp32, of shape (rank, columns).
        """
        rows, columns = matrix.values.shape
        return cls("multiply_transposed", rows, columns, len(left), matrix, left=left, sums=right)

    @classmethod
    def restore(
        cls,
        matrix: Matrix,
        left: torch.Tensor,
        right: torch.Tensor,
        mean_right: torch.Tensor,
        new_residual: torch.Tensor,
    ) -> FactorCall:
        """Return the call that writes the mean gradient in place of the own, and what is left of that.

        Autograd is not told of it.

        Args:
            matrix: Rows x columns; its values become ``left^T mean_right``.
            left: The left factor of all ranks; fp32, of shape (rank, rows).
            right: The right factor as this rank has contributed it; fp32, of shape (rank, columns).
            mean_right: The mean of all ranks' right factors.
            new_residual: The output for what this rank's factors leave: the matrix without ``left^T right``;
                bf16, without memory in common with the matrix.
        """
        rows, columns = matrix.values.shape
        return cls("restore", rows, columns, len(left), matrix, new_residual, left, right, mean_right)

    @classmethod
    def find_basis(cls, mean: torch.Tensor, left: torch.Tensor, weights: torch.Tensor) -> FactorCall:
        """Return the call that writes an orthonormal basis of a left factor's columns, with rows more alike.

        Rows are divided by the fourth roots of their mean squares first: with a few large rows, a low rank
        would be spent on these. All of it depends on the factor alone, so ranks that have the same one get
        the same bits. A column that depends on those before it becomes zero. From the first column with a NaN
        on, all are NaN.

        Args:
            mean: The left factor of all ranks; fp32, of shape (rank, rows).
            left: The output for the basis times the rows' scales; the same.
            weights: The output for the basis divided by the rows' scales; the same.
        """
        rank, rows = mean.shape
        return cls("find_basis", rows, 0, rank, left=mean, sums=left, weights=weights)

    @classmethod
    def follow(cls, left: torch.Tensor, right: torch.Tensor, next_right: torch.Tensor) -> FactorCall:
        """Return the call that writes the right factor for the next step.

        Columns of the matrix are divided by the fourth roots of their mean squares, as rows are: twice, once
        for the matrix and once for the factor.

        Args:
            left: The left factor of all ranks; fp32, of shape (rank, rows).
            right: The right factor of all ranks; fp32, of shape (rank, columns).
            next_right: The output, each column times a power of two. A column of zeros becomes one of signs,
                as it would stay zero for ever.
        """
        rank, rows = left.shape
        return cls("follow", rows, right.shape[1], rank, left=left, mean_right=right, sums=next_right)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return (self.left if self.sums is _NOTHING else self.sums).device

    def words(self) -> list[int]:
        """Return the sizes, and the addresses of all tensors; 0 where there is none."""
        values, residual = self.matrix
        return [
            self.rows,
            self.columns,
            self.rank,
            values.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            self.new_residual.data_ptr(),
            self.left.data_ptr(),
            self.right.data_ptr(),
            self.mean_right.data_ptr(),
            self.sums.data_ptr(),
            self.weights.data_ptr(),
        ]

    def check(self) -> None:
        """Raise unless the kernel can do this.

        Raises:
            TypeError: A tensor is of another dtype.
            ValueError: It is of another shape, on another device, or has gaps.
        """
        values, residual = self.matrix
        whole, left, right = (self.rows, self.columns), (self.rank, self.rows), (self.rank, self.columns)
        sums, fp32 = left if self.kernel in {"multiply", "find_basis"} else right, (torch.float32,)
        for name, tensor, dtypes, shape in (
            ("values", values, VALUE_DTYPES, whole),
            ("residual", residual, RESIDUAL_DTYPES, whole),
            ("new_residual", self.new_residual, RESIDUAL_DTYPES, whole),
            ("left", self.left, fp32, left),
            ("right", self.right, fp32, right),
            ("mean_right", self.mean_right, fp32, right),
            ("sums", self.sums, fp32, sums),
            ("weights", self.weights, fp32, left),
        ):
            if tensor is not None and tensor is not _NOTHING:
                check_tensor(name, tensor, dtypes, shape, self.device)


@torch.no_grad()
def run(calls: Sequence[FactorCall]) -> None:
    """Do calls; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
    for call in calls:
        _BY_NAME[call.kernel](call)


def _multiply(call: FactorCall) -> None:
    rows = _in_lanes(call.matrix.sum())  # (rows, pieces, lanes)
    factors = _in_lanes(call.right)
    for k in range(call.rank):
        call.sums[k] = _sum_of_lanes(rows, factors[k].unsqueeze(0))


def _multiply_transposed(call: FactorCall) -> None:
    whole = call.matrix.sum()
    missing = -len(whole) % ROWS_OF_SUM
    blocks = pad(whole, (0, 0, 0, missing)).view(-1, ROWS_OF_SUM, call.columns)
    weights = pad(call.left, (0, missing)).view(call.rank, -1, ROWS_OF_SUM)
    sums = torch.zeros(call.rank, len(blocks), call.columns, dtype=torch.float32, device=whole.device)
    for row in range(min(ROWS_OF_SUM, call.rows)):
        sums += weights[:, :, row, None] * blocks[:, row]
    call.sums.zero_()
    for block in sums.unbind(1):
        call.sums.add_(block)


def _restore(call: FactorCall) -> None:
    whole, values = call.matrix.sum(), call.matrix.values
    call.new_residual.copy_(whole - _product(call.left, call.right))
    mean = _product(call.left, call.mean_right)
    if values.dtype != torch.float32:  # a number that is finite stays so
        limits = torch.finfo(values.dtype)
        mean = mean.clamp(limits.min, limits.max)
    values.copy_(mean)
    values.masked_fill_(mean.isnan(), torch.nan)


def _find_basis(call: FactorCall) -> None:
    squares = call.left.double().square()
    largest = squares.amax(1)
    scales = _roots(squares, torch.where(largest == 0, 0.0, 1.0 / largest)).sqrt()
    columns = (call.left / scales).float()
    basis = torch.stack(_orthonormal(columns))
    call.sums.copy_(basis * scales)
    call.weights.copy_(basis / scales)


def _follow(call: FactorCall) -> None:
    columns = call.mean_right.double()
    columns = columns / _roots(columns.square(), call.left.double().square().amax(1))
    largest = columns.abs().amax(1, keepdim=True)
    signs = rotation.signs(columns.numel(), columns.device).view_as(columns)
    power = torch.frexp(largest).mantissa / largest
    call.sums.copy_(torch.where(largest == 0, signs, columns * power))


_BY_NAME = {
    "multiply": _multiply,
    "multiply_transposed": _multiply_transposed,
    "restore": _restore,
    "find_basis": _find_basis,
    "follow": _follow,
}


def _roots(squares: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return roots of the squares of all columns together, relative to the largest one."""
    total = torch.zeros(squares.shape[1], dtype=torch.float64, device=squares.device)
    for column, weight in zip(squares, weights, strict=True):
        total = total + column * weight
    largest = total.amax()
    return (torch.where(largest == 0, 0.0, total / largest) + LEAST_SQUARE).sqrt()


def _orthonormal(columns: torch.Tensor) -> list[torch.Tensor]:
    """Return an orthonormal basis of fp32 columns in fp64, by Cholesky's factor of their Gram matrix."""
    wide = columns.double()
    lanes = _in_lanes(wide)
    rest = torch.stack([_sum_of_lanes(lanes, one.unsqueeze(0)) for one in lanes.unbind()])
    own, lower, basis = rest.diagonal().clone(), torch.zeros_like(rest), list[torch.Tensor]()
    for k, original in enumerate(wide.unbind()):
        column = original
        pivot = rest[k, k]
        dropped, root = pivot <= DEPENDENT * own[k], pivot.sqrt()
        lower[:, k] = torch.where(dropped, 0.0, rest[:, k] / root)
        rest = rest - lower[:, k, None] * lower[None, :, k]
        for before, other in enumerate(basis):
            column = column - lower[k, before] * other
        basis.append(torch.where(dropped, 0.0, column / root))
    return basis


def _in_lanes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of numbers as (rows, pieces, lanes), padded with zeros."""
    return pad(rows, (0, -rows.shape[1] % SUMS_OF_ROW)).view(len(rows), -1, SUMS_OF_ROW)


def _sum_of_lanes(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's products with another."""
    sums = torch.zeros(len(rows), SUMS_OF_ROW, dtype=rows.dtype, device=rows.device)
    for piece, other in zip(rows.unbind(1), others.unbind(1), strict=True):
        sums = sums + piece * other
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, 1)
        sums = low + high
    return sums[:, 0]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float32, device=left.device)
    for column, row in zip(left, right, strict=True):
        total = total + column[:, None] * row
    return total
