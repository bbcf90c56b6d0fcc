"""The faults, their moments and trainings: drawn from a seed, so that a job can be repeated."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trainings import TRAININGS

from soak import memory_limit, trouble, wall_clock

STEPS, LAST, EVERY = 60, 40, 4
"""A training's number of steps, its last step for a fault, and the steps between checkpoints."""
STEADY = 3
"""From this step on all connections exist; before, ranks may wait for each other in the store."""
TIMEOUT = 5.0


@dataclass(frozen=True)
class Fault:
    """A fault, and its required effect.

    Args:
        name: The fault's name in results.
        action: What happens: in the rank, called with the job's folder and the rank; or from outside, called
            with a :class:`soak.jobs.Watch`.
        ends: Whether the training must end with it; ``None``: it may.
        place: The place in the user's code where it happens; empty: outside.
        dies: Whether a signal ends the rank; ``None``: it may.
        gone: Whether the system closes the rank's connections, so that its peers can know at once.
        lasts: The shortest and the longest time, as parts of the timeout.
        on_hosts: Whether ranks run on emulated hosts.
        why_not: Returns why this machine cannot inject it, or an empty string.
    """

    name: str
    action: Callable[..., object]
    ends: bool | None
    place: str = ""
    dies: bool | None = False
    gone: bool = False
    lasts: tuple[float, float] = (0.0, 0.0)
    on_hosts: bool = False
    why_not: Callable[[], str] = str


_SHORT, _LONG = (0.1, 0.5), (1.1, 1.3)
_CLOCK: dict[str, Any] = {"ends": False, "place": "backward", "why_not": wall_clock.why_not}
_GONE: dict[str, Any] = {"ends": True, "gone": True}
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill -9", trouble.kill, dies=True, **_GONE),
        Fault("stopped for longer than the timeout", trouble.stop, ends=True, lasts=_LONG),
        Fault("stopped for less than the timeout", trouble.stop, ends=False, lasts=_SHORT),
        Fault("link cut", trouble.cut_link, ends=True, on_hosts=True),
        Fault("link at 1 % of its rate", trouble.slow_link, ends=False, lasts=_SHORT, on_hosts=True),
        Fault("packets lost", trouble.lose_packets, ends=False, lasts=_SHORT, on_hosts=True),
        Fault(
            "no more memory: an allocation fails",
            trouble.no_more_memory,
            ends=None,
            place="backward",
            dies=None,
            gone=True,
        ),
        Fault(
            "no more memory: killed by the system",
            memory_limit.exceed,
            place="forward",
            dies=True,
            why_not=memory_limit.why_not,
            **_GONE,
        ),
        Fault("disk full in a checkpoint", trouble.fill_disk, place="begin", **_GONE),
        Fault("clock an hour forwards", partial(wall_clock.jump, 3600), **_CLOCK),
        Fault("clock an hour back", partial(wall_clock.jump, -3600), **_CLOCK),
        *(
            Fault(f"raises in {place}", trouble.raise_here, place=place, **_GONE)
            for place in ("forward", "backward", "hook", "optimizer", "checkpoint")
        ),
    )
}


@dataclass(frozen=True)
class Job:
    """One training and one fault; no fault for the reference that others are compared with."""

    number: int
    training: str
    world_size: int
    fault: str = ""
    victim: int = 0
    step: int = 0
    moment: float = 0.0
    """The part of the step that has passed, for faults from outside."""
    length: float = 0.0
    """Duration of the fault in seconds, if it lasts."""
    store: Literal["apart", "rank 0"] = "apart"
    timeout: float = TIMEOUT
    steps: int = STEPS

    @property
    def kind(self) -> Fault:
        """The injected fault."""
        return FAULTS[self.fault]


def draw(seed: int, number: int, faults: list[str], begins: str = "") -> Job:
    """Return the job with a number; the same arguments give the same job.

    Args:
        seed: The seed of the whole run.
        number: The number of the job. Faults take turns, so that all are equally frequent.
        faults: The faults that this machine can inject.
        begins: How the names of trainings begin that are disturbed.
    """
    chance = random.Random(f"{seed}/{number}")
    fault = FAULTS[faults[number % len(faults)]]
    trainings = [
        name
        for name, kind in TRAININGS.items()
        if name.startswith(begins) and (kind.has_hook or fault.place != "hook")
    ]
    training = chance.choice(trainings)
    size = chance.choice(TRAININGS[training].world_sizes)
    steps = range(STEADY) if chance.random() < 0.25 else range(STEADY, LAST)
    if fault.place == "checkpoint":
        steps = range(EVERY - 1, LAST, EVERY)
    return Job(
        number=number,
        training=training,
        world_size=size,
        fault=fault.name,
        victim=chance.randrange(size),
        step=chance.choice(steps),
        moment=chance.random(),
        length=round(TIMEOUT * chance.uniform(*fault.lasts), 2),
        store="rank 0" if chance.random() < 0.25 and not fault.on_hosts else "apart",
    )
