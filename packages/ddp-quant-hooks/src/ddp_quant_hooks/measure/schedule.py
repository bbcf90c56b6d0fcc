"""How often everything is measured, within a budget that all ranks keep together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.trials import Sample, Trial

__all__ = ["Progress", "repeats_within", "run_trials"]

Progress = Callable[[float, str], None]
"""Is told what share of the work is done, and what comes now."""

_MOST_REPEATS = 20


def run_trials(
    trials: Sequence[Trial], group: dist.ProcessGroup, budget: float, guess: float, progress: Progress
) -> dict[int, list[Sample]]:
    """Run every trial as often as a budget allows, in turns, and return the samples of each.

    First each runs once, small buckets first. That warms up; only of what takes so long that it is not
    repeated the first run counts. What would not fit, by the same hook's run on the size before, is left
    out. Then rounds, forwards and backwards.

    Args:
        trials: In the order of their sizes.
        group: Whose ranks run them.
        budget: Seconds.
        guess: Seconds for a byte of a bucket, where there was no run yet.
        progress: Is told.

    Returns:
        By place in ``trials``, of this rank; as many on every rank.
    """
    clock = _Clock(group, budget)
    samples: dict[int, list[Sample]] = {}
    costs: dict[int, float] = {}
    per_byte: dict[tuple[str, bool], float] = {}
    for place, trial in enumerate(trials):
        progress(0.5 * place / len(trials), _label(trial))
        known = per_byte.get((trial.name, trial.beside)) or per_byte.get((trial.name, False), guess)
        if known * trial.size > clock.left:
            continue
        samples[place] = [trial.run()]
        costs[place] = clock.lap()
        per_byte[trial.name, trial.beside] = costs[place] / trial.size
    repeats = repeats_within(costs, clock.left)
    for turn in range(max(repeats.values(), default=0)):
        places = [place for place in samples if repeats[place] > turn]
        for number, place in enumerate(places if turn % 2 else reversed(places)):
            done = (turn + number / len(places)) / max(repeats.values())
            progress(0.5 + 0.5 * done, _label(trials[place]))
            samples[place].append(trials[place].run())
        clock.lap()
        if clock.left <= 0:
            break
    return {place: found[1:] or found for place, found in samples.items()}


def repeats_within(costs: dict[int, float], seconds: float) -> dict[int, int]:
    """Return how often each can be repeated in so many seconds: all alike, long ones less often.

    Args:
        costs: Seconds for one run of each.
        seconds: For all.
    """
    repeats = {}
    for number, place in enumerate(sorted(costs, key=costs.__getitem__)):
        share = seconds / (len(costs) - number)
        repeats[place] = max(0, min(_MOST_REPEATS, int(share / costs[place])))
        seconds -= repeats[place] * costs[place]
    return repeats


class _Clock:
    """What is left of a budget, alike on every rank.

    Args:
        group: Whose slowest rank counts.
        budget: Seconds.
    """

    def __init__(self, group: dist.ProcessGroup, budget: float) -> None:
        self._group, self._last = group, time.perf_counter()
        self.left = budget

    def lap(self) -> float:
        """Return the seconds since the last lap, and take them from what is left. Collective."""
        now = time.perf_counter()
        (seconds,) = largest_of_ranks(self._group, [now - self._last])
        self._last = now
        self.left -= seconds
        return seconds


def _label(trial: Trial) -> str:
    beside = ", beside computation" if trial.beside else ""
    return f"{trial.name}, {trial.size / 2**20:g} MiB{beside}"
