"""The ring sum of fp32, as in Gloo, with which the hooks are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from many_ranks.programs import Messages, Program, Start, Step
from many_ranks.recording import Begin, Compute, Wait

__all__ = ["ring"]

_LONGEST = 1 << 20
"""The longest message in bytes; each rank's part has at least two, so that one is sent while one is added."""


def ring(world: int, buckets: Sequence[int], *, played: int | None = None) -> Program:
    """Return the program of ring all-reduces of fp32: each W - 1 rounds of adding, W - 1 of copying.

    Args:
        world: Number of ranks.
        buckets: The number of values of each bucket.
        played: Play only this many ranks, if all are alike and none shares a link: they take as long as all.
    """
    steps: list[Step] = []
    ranks = played or world
    number = 0
    for bucket, count in enumerate(buckets):
        size = 4 * count
        parts = max(2, -(-size // (world * _LONGEST)))
        length = -(-size // (world * parts * 4)) * 4
        messages = Messages(
            np.arange(ranks)[None], np.array([1]), np.full((1, ranks), length), of_sender=True
        )
        steps.append(Begin(bucket))
        rounds = 2 * (world - 1)
        for turn in range(rounds + 1):
            for part in range(parts):
                before = number + (turn - 1) * parts + part
                if turn:
                    steps.append(Wait(before))
                    if turn < world:
                        steps.append(Compute("elementwise", length // 4, 1))
                if turn < rounds:
                    steps.append(Start(before + parts, messages))
        number += rounds * parts
    return Program(ranks, steps, 1)
