"""The error that stays in the sum of many averages: rounding to nearest, with and without error feedback.

    python benchmarks/bench_summed_averages.py    # half a minute, one thread, no network

Every step each rank has the same gradient, times one plus normal noise ("noise"), or unchanged ("none"). The
relative error |sum of averages - sum of exact averages| / |sum of exact averages| after 30 and 300 steps: of
all values, and of the half with the smaller gradients. The ranks are simulated in one process, with the
kernels that the hooks use. Gradients, the same on all ranks:

* normal;
* five decades: normal, each value times a power of ten between 1e-5 and 1, evenly distributed.

Writes results/summed_averages.json.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator

import torch
from bench_quant_accuracy import INT4, INT8, Feedback, Simulation
from harness import Benchmark, Found

VALUES, STEPS = 65536, (30, 300)
LAYOUTS = {"8 bits": INT8, "4 bits": INT4}
FEEDBACKS: tuple[Feedback, ...] = ("none", "both")


def errors(
    gradient: torch.Tensor, ranks: int, simulation: Simulation, *, noise: bool, seed: int
) -> dict[int, dict[str, float]]:
    """Return the relative errors of the sum after each of ``STEPS``."""
    generator = torch.Generator().manual_seed(seed)
    smaller = gradient.abs() < gradient.abs().median()
    exact, averaged = torch.zeros(2, VALUES, dtype=torch.float64)
    found = {}
    for step in range(1, max(STEPS) + 1):
        factors = 1 + noise * torch.randn(ranks, VALUES, generator=generator)
        mine = gradient * factors
        exact += mine.mean(0, dtype=torch.float64)
        averaged += simulation.average(mine)
        if step in STEPS:
            lost = averaged - exact
            found[step] = {
                "all": float(f"{lost.norm() / exact.norm():.2g}"),
                "smaller half": float(f"{lost[smaller].norm() / exact[smaller].norm():.2g}"),
            }
    return found


def sums(_: Namespace) -> Iterator[Found]:
    """Measure and print every case."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(VALUES, generator=generator)
    decades = 10 ** (-5 * torch.rand(VALUES, generator=generator))
    kinds = {"normal": normal, "five decades": normal * decades}
    for ranks, noise, kind in itertools.product((2, 4), (True, False), kinds):
        for (bits, layout), feedback in itertools.product(LAYOUTS.items(), FEEDBACKS):
            simulation = Simulation(ranks, VALUES, layout, layout, feedback)
            found = errors(kinds[kind], ranks, simulation, noise=noise, seed=1)
            keys = (f"{ranks} ranks", "noise" if noise else "none", kind, f"{bits}, feedback {feedback}")
            print(", ".join(keys), found, flush=True)
            yield ("relative_error", *keys), found


if __name__ == "__main__":
    torch.set_num_threads(1)
    Benchmark(__file__, __doc__).run({"sums": sums}, facts={"values": VALUES})
