"""One number for the bits of many tensors, computed where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dist_utils.module_state.broadcasts import flat_values

_WORDS = 1 << 22
"""Words of four bytes whose products are in memory at the same time: 32 MiB, as are their factors."""

_JOINED = 64
"""Small tensors that are copied together, so that many of them take few kernels."""

_MULTIPLIERS = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Of SplitMix64."""


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor's values, in the order of its indices."""
    return flat_values(tensor.detach()).view(torch.uint8)


@torch.no_grad()
def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one 64-bit number that differs if the bits of the tensors do.

    It is a sum of products with pseudo-random odd factors, modulo 2**64: two sets of values that were not
    made for it get the same number with a probability of about 2**-32, and never if one word differs. The
    lengths of the tensors are not part of it.

    Args:
        tensors: Dense, on one device. At least one.

    Returns:
        A tensor of one element and dtype int64 on their device. Nothing waits for the device.

    Cost:
        About four kernels for every 16 MiB, or for 64 small tensors, and 64 MiB of memory meanwhile.
    """
    pieces = [piece for words in _words(tensors) for piece in torch.split(words, _WORDS)]
    factors = _factors(max(map(len, pieces)), pieces[0].device)
    total = factors.new_zeros(1)
    for piece in pieces:
        total = total * _MULTIPLIERS[0] + (piece * factors[: len(piece)]).sum()
    return total


def _words(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all tensors as words of four: a large tensor's, or those of several small ones."""
    small = [octets(tensor) for tensor in tensors if tensor.nbytes < _WORDS // 16]
    parts = [octets(tensor) for tensor in tensors if tensor.nbytes >= _WORDS // 16]
    parts += [torch.cat(small[start : start + _JOINED]) for start in range(0, len(small), _JOINED)]
    for part in parts:
        missing = -part.numel() % 4
        fits = not missing and part.storage_offset() % 4 == 0
        yield (part if fits else torch.nn.functional.pad(part, (0, missing)).clone()).view(torch.int32)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, identical on every rank, and leave random generators alone."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MULTIPLIERS[0]
    for shift, factor in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers | 1
