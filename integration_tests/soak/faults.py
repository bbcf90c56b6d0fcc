"""The faults, their moments and trainings: drawn from a seed, so that a job can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from trainings import TRAININGS

__all__ = ["FAULTS", "Fault", "Job", "draw"]

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
        where: ``outside``: done to the rank at a moment; ``link``: done to its network; otherwise the place
            in the user's code where it happens.
        ends: Whether the training must end with it; ``None``: it may.
        gone: Whether the system closes the rank's connections, so that its peers can know at once.
    """

    name: str
    where: str
    ends: bool | None
    gone: bool = False


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill -9", "outside", ends=True, gone=True),
        Fault("stopped for longer than the timeout", "outside", ends=True),
        Fault("stopped for less than the timeout", "outside", ends=False),
        Fault("link cut", "link", ends=True),
        Fault("link at 1 % of its rate", "link", ends=False),
        Fault("packets lost", "link", ends=False),
        Fault("no more memory: an allocation fails", "backward", ends=None, gone=True),
        Fault("no more memory: killed by the system", "forward", ends=True, gone=True),
        Fault("disk full in a checkpoint", "begin", ends=True, gone=True),
        Fault("clock an hour forwards", "backward", ends=False),
        Fault("clock an hour back", "backward", ends=False),
        *(
            Fault(f"raises in {place}", place, ends=True, gone=True)
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

    @property
    def is_killed(self) -> bool:
        """Whether the victim's process ends by a signal."""
        return self.fault in {"kill -9", "no more memory: killed by the system"}

    @property
    def on_hosts(self) -> bool:
        """Whether the ranks run on emulated hosts."""
        return bool(self.fault) and self.kind.where == "link"


def draw(seed: int, number: int, faults: list[str], trainings: list[str]) -> Job:
    """Return the job with a number; the same arguments give the same job.

    Args:
        seed: The seed of the whole run.
        number: The number of the job. Faults take turns, so that all are equally frequent.
        faults: The faults that this machine can inject.
        trainings: The names of trainings.
    """
    chance = random.Random(f"{seed}/{number}")
    fault = FAULTS[faults[number % len(faults)]]
    with_hooks = [name for name in trainings if "hook" in TRAININGS[name].places]
    training = chance.choice(with_hooks if fault.where == "hook" else trainings)
    size = chance.choice(TRAININGS[training].world_sizes)
    steps = range(STEADY) if chance.random() < 0.25 else range(STEADY, LAST)
    if fault.where == "checkpoint":
        steps = range(EVERY - 1, LAST, EVERY)
    shortest, longest = (1.1, 1.3) if "longer" in fault.name else (0.1, 0.5)
    return Job(
        number=number,
        training=training,
        world_size=size,
        fault=fault.name,
        victim=chance.randrange(size),
        step=chance.choice(steps),
        moment=chance.random(),
        length=round(TIMEOUT * chance.uniform(shortest, longest), 2),
        store="rank 0" if chance.random() < 0.25 and fault.where != "link" else "apart",
    )
