"""How often everything is measured, within a budget that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.trials import Sample, Trial

__all__ = ["Progress", "repeats_within", "run_trials"]

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done and a text about what comes next."""

_REPEATS = 20


def run_trials(
    trials: Sequence[Trial], group: dist.ProcessGroup, budget: float, guess: float, progress: Progress
) -> dict[int, list[Sample]]:
    """Run every trial as often as a budget allows, in turns, and return the samples of each.

    First each runs once, small buckets first. That is the warm-up; the first run counts only for trials that
    take too long to be repeated. A trial that would not fit, judging by the same hook's run on the previous
    size, is left out, except the hooks alone on the smallest size: without them there is no result. Then all
    run in rounds, forwards and backwards.

    Args:
        trials: In the order of their sizes.
        group: The process group whose ranks run them.
        budget: Seconds.
        guess: Seconds for a byte of a bucket, where there was no run yet.
        progress: Called before each run.

    Returns:
        This rank's samples by position in ``trials``; the same number on every rank.
    """
    clock = _Clock(group, budget)
    samples: dict[int, list[Sample]] = {}
    costs: dict[int, float] = {}
    per_byte: dict[tuple[str, bool], float] = {}

    def run(place: int) -> None:
        progress(1 - max(0.0, clock.left) / budget, _label(trials[place]))
        samples.setdefault(place, []).append(trials[place].run())
        costs[place] = clock.lap()

    for place, trial in enumerate(trials):
        known = per_byte.get((trial.name, trial.beside)) or per_byte.get((trial.name, False), guess)
        needed = trial.size == trials[0].size and not trial.beside
        if needed or known * trial.size <= clock.left:
            run(place)
            per_byte[trial.name, trial.beside] = costs[place] / trial.size
    turn = 0
    while due := _due(costs, samples, clock.left):
        turn += 1
        for place in due if turn % 2 else reversed(due):
            run(place)
    return {place: found[1:] or found for place, found in samples.items()}


def _due(costs: Mapping[int, float], samples: Mapping[int, Sequence[Sample]], left: float) -> list[int]:
    """Return what the next round repeats."""
    wanted = {place: 1 + _REPEATS - len(found) for place, found in samples.items()}
    repeats = repeats_within(costs, wanted, left)
    return [place for place in samples if repeats[place] > 0]


def repeats_within(costs: Mapping[int, float], wanted: Mapping[int, int], seconds: float) -> dict[int, int]:
    """Return how often each can be repeated in ``seconds``: as wanted, long ones less often.

    Args:
        costs: Seconds for one run of each.
        wanted: The most repeats of each.
        seconds: The time for all.
    """
    repeats = {}
    for number, place in enumerate(sorted(costs, key=costs.__getitem__)):
        share = max(0.0, seconds) / (len(costs) - number)
        repeats[place] = min(wanted[place], int(share / costs[place]))
        seconds -= repeats[place] * costs[place]
    return repeats


class _Clock:
    """What is left of a budget, identical on all ranks.

    Args:
        group: The process group whose slowest rank counts.
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
