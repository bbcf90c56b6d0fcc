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
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ddp_quant_hooks.kernels import rotation
from ddp_quant_hooks.kernels.call import VALUE_DTYPES

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

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.values.device

    def sum(self) -> torch.Tensor:
        """Return both together, in fp32. A finite value stays finite."""
        values = self.values.float()
        if self.residual is None:
            return values
        largest = torch.finfo(torch.float32).max
        return torch.where(values.isfinite(), (values + self.residual).clamp(-largest, largest), values)


def check(matrix: Matrix, *, left: torch.Tensor, right: torch.Tensor) -> None:
    """Raise unless the kernels can work on a matrix and two factors of it.

    Raises:
        TypeError: A tensor is of another dtype.
        ValueError: It is of another shape, on another device, or has gaps.
    """
    values, residual = matrix
    if values.dtype not in VALUE_DTYPES:
        raise TypeError(f"values must be of {' or '.join(map(str, VALUE_DTYPES))}, got {values.dtype}")
    rows, columns = values.shape
    _check("values", values, values.dtype, (rows, columns), values.device)
    if residual is not None:
        _check("residual", residual, torch.bfloat16, (rows, columns), values.device)
    check_factors((len(left), rows), values.device, left=left)
    check_factors((len(left), columns), values.device, right=right)


def check_factors(shape: Sequence[int], device: torch.device, **factors: torch.Tensor) -> None:
    """Raise unless factors are of this shape. Raises as :func:`check`."""
    for name, factor in factors.items():
        _check(name, factor, torch.float32, shape, device)


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be of {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be contiguous, of shape {tuple(shape)} and on {device}, got {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )


@torch.no_grad()
def multiply(matrix: Matrix, right: torch.Tensor, left: torch.Tensor) -> None:
    """Write the products of a matrix and the columns of a right factor.

    Args:
        matrix: Rows x columns.
        right: The factor; fp32, of shape (rank, columns).
        left: The output; fp32, of shape (rank, rows).
    """
    rows = _in_lanes(matrix.sum())  # (rows, pieces, lanes)
    factors = _in_lanes(right)
    for k in range(len(right)):
        left[k] = _sum_of_lanes(rows, factors[k].unsqueeze(0))


@torch.no_grad()
def multiply_transposed(matrix: Matrix, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write the products of a matrix, transposed, and the columns of a left factor.

    Args:
        matrix: Rows x columns.
        left: The factor; fp32, of shape (rank, rows).
        right: The output; fp32, of shape (rank, columns).
    """
    whole = matrix.sum()
    missing = -len(whole) % ROWS_OF_SUM
    blocks = pad(whole, (0, 0, 0, missing)).view(-1, ROWS_OF_SUM, whole.shape[1])
    weights = pad(left, (0, missing)).view(len(left), -1, ROWS_OF_SUM)
    sums = torch.zeros(len(left), len(blocks), whole.shape[1], dtype=torch.float32, device=whole.device)
    for row in range(min(ROWS_OF_SUM, len(whole))):
        sums += weights[:, :, row, None] * blocks[:, row]
    right.zero_()
    for block in sums.unbind(1):
        right += block


@torch.no_grad()
def restore(
    matrix: Matrix,
    left: torch.Tensor,
    right: torch.Tensor,
    mean_right: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Write the mean of all ranks' gradients in place of the own, and what this rank's factors leave.

    Args:
        matrix: Rows x columns; its values become ``left^T mean_right``.
        left: The left factor of all ranks; fp32, of shape (rank, rows).
        right: The right factor as this rank has contributed it; fp32, of shape (rank, columns).
        mean_right: The mean of all ranks' right factors.
        new_residual: The output for the matrix without ``left^T right``; bf16, without memory in common with
            the matrix.
    """
    whole, limits = matrix.sum(), torch.finfo(matrix.values.dtype)
    new_residual.copy_(whole - _product(left, right))
    mean = _product(left, mean_right)
    matrix.values.copy_(mean.clamp(limits.min, limits.max))
    matrix.values.masked_fill_(mean.isnan(), torch.nan)


@torch.no_grad()
def find_basis(mean: torch.Tensor, left: torch.Tensor, weights: torch.Tensor) -> None:
    """Write an orthonormal basis of what a left factor's columns span, with rows that are more alike.

    Rows are divided by the fourth roots of their mean squares first: with a few large rows, a low rank would
    be spent on these. All of it depends on the factor alone, so ranks that have the same one get the same
    bits. A column that depends on those before it becomes zero. From the first column with a NaN on, all are
    NaN.

    Args:
        mean: The left factor of all ranks; fp32, of shape (rank, rows).
        left: The output for the basis times the rows' scales; the same.
        weights: The output for the basis divided by the rows' scales; the same.
    """
    squares = mean.double().square()
    largest = squares.amax(1)
    scales = _roots(squares, torch.where(largest == 0, 0.0, 1.0 / largest)).sqrt()
    columns = (mean / scales).float()
    basis = torch.stack(_orthonormal(columns))
    left.copy_(basis * scales)
    weights.copy_(basis / scales)


@torch.no_grad()
def follow(left: torch.Tensor, right: torch.Tensor, next_right: torch.Tensor) -> None:
    """Write the right factor for the next step.

    Columns of the matrix are divided by the fourth roots of their mean squares, as rows are: twice, once for
    the matrix and once for the factor.

    Args:
        left: The left factor of all ranks; fp32, of shape (rank, rows).
        right: The right factor of all ranks; fp32, of shape (rank, columns).
        next_right: The output, each column times a power of two. A column of zeros becomes one of signs, as
            it would stay zero for ever.
    """
    columns = right.double()
    columns = columns / _roots(columns.square(), left.double().square().amax(1))
    largest = columns.abs().amax(1, keepdim=True)
    signs = rotation.signs(right.numel(), right.device).view_as(right)
    power = torch.frexp(largest).mantissa / largest
    next_right.copy_(torch.where(largest == 0, signs, columns * power))


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
