"""One number for the bits of many tensors, computed where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dist_utils.module_state.broadcasts import flat_values

_ROW = 1 << 16
"""Words of four bytes that are summed to one number; as many factors are made for every fingerprint."""

_ROWS_AT_ONCE = 64
"""Rows whose products are in memory at the same time: 32 MiB."""

_JOINED = 64
"""Small tensors that are copied together, so that many of them take few kernels."""


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor's values, in the order of its indices."""
    return flat_values(tensor.detach()).view(torch.uint8)


@torch.no_grad()
def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one 64-bit number that differs if the bits of the tensors do.

    It is a sum of products with pseudo-random factors, modulo 2**64 and therefore in any order: two sets of
    values that were not made for it get the same number with a probability of about 2**-32. The lengths of
    the tensors are not part of it.

    Args:
        tensors: Dense, on one device. At least one.

    Returns:
        A tensor of one element and dtype int64 on their device. Nothing waits for the device.

    Cost:
        About three kernels for every 16 MiB, or for 64 small tensors, and 64 MiB of memory meanwhile.
    """
    factors = _factors(tensors[0].device)
    sums = [_sums(_words(part), factors) for part in _parts(tensors)]
    while len(sums) > 1 or sums[0].numel() > 1:
        sums = [_sums(torch.cat(sums).view(torch.int32), factors)]
    return sums[0]


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all tensors: a large tensor's by themselves, those of small ones together."""
    small = []
    for tensor in tensors:
        if tensor.nbytes >= 4 * _ROW:
            yield octets(tensor)
        else:
            small.append(tensor)
    for start in range(0, len(small), _JOINED):
        yield torch.cat([octets(tensor) for tensor in small[start : start + _JOINED]])


def _words(part: torch.Tensor) -> torch.Tensor:
    """Return bytes as words of four, the last one filled up with zeros."""
    missing = -part.numel() % 4
    if missing or part.storage_offset() % 4:
        part = torch.nn.functional.pad(part, (0, missing)).clone()
    return part.view(torch.int32)


def _sums(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the products of every row of words with the factors."""
    whole = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = words[whole.numel() :]
    rows = [
        (whole[start : start + _ROWS_AT_ONCE] * factors).sum(1)
        for start in range(0, len(whole), _ROWS_AT_ONCE)
    ]
    return torch.cat([*rows, (rest * factors[: rest.numel()]).sum().view(1)])


def _factors(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, identical on every rank, and leave random generators alone."""
    numbers = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # of SplitMix64
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers | 1
