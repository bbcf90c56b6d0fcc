"""The error of gradients averaged in 8 and 4 bits: ddp-quant-hooks against PyTorch's hooks and others.

    python benchmarks/bench_quant_accuracy.py              # some minutes, one thread, no network
    python benchmarks/bench_quant_accuracy.py --world-sizes 2 8 --seeds 1

The relative error |averaged - exact| / |exact| of the mean over W ranks, against the exact mean in fp64; the
median over the seeds. The ranks are simulated in one process, with the kernels that the hooks use. Gradients:

* Gaussian, independent on each rank;
* heavy tails: Student's t with 3 degrees of freedom, independent on each rank; heavier tails: with 2;
* outliers: Gaussian, but one value in 128 is 100 times as large, at the same places on each rank;
* mixed scales: Gaussian, each value times exp(2 n) with n Gaussian, the same on each rank;
* language model: a small transformer on the standard library's sources, one batch for each rank.

Rows with error feedback show a different measure: the mean of 20 averages of the same gradients, with the
residuals carried along. Without feedback, that mean has the error of a single average, because the same
rounding repeats, so the figures are comparable. Constant gradients are feedback's best case, and a single
step with feedback is worse than one without, as the rows "20th step alone" show, because it also repays what
earlier steps lost. At W = 2 the hook has a single exchange and no averaged shard to quantize again, so
gather= and feedback "shard" change nothing there.

Writes results/quant_accuracy.json and .png.
"""

from __future__ import annotations

import statistics
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from drawing import BLUE, GRAY, save, subplots
from harness import Benchmark, Found
from tasks import LanguageModel, library_files, next_character_loss, read
from torch import nn

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout

FEEDBACK_STEPS = 20

GAUSSIAN, HEAVY_TAILS, HEAVIER_TAILS = "Gaussian", "heavy tails", "heavier tails"
OUTLIERS, MIXED_SCALES, LANGUAGE_MODEL = "outliers", "mixed scales", "language model"
KINDS = [GAUSSIAN, HEAVY_TAILS, HEAVIER_TAILS, OUTLIERS, MIXED_SCALES, LANGUAGE_MODEL]

BATCH, TRAINING_STEPS = 16, 60

Feedback = Literal["none", "shard", "both"]
Scheme: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps the gradients of all ranks, one per row, to the average on each rank."""


def language_model_gradients(ranks: int, seed: int) -> torch.Tensor:
    """Return every rank's gradient of a model after some training, flattened as by DDP."""
    torch.manual_seed(seed)
    text, model = read(library_files()), LanguageModel(width=144, context=64)  # 547 904 parameters
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def loss() -> torch.Tensor:
        starts = torch.randint(len(text) - model.context, (BATCH,))
        return next_character_loss(model, text, starts, model.context)

    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()
    gradients = torch.empty(ranks, sum(parameter.numel() for parameter in parameters))
    for row in gradients:
        found = torch.autograd.grad(loss(), parameters)
        # DDP's first bucket has the last parameters, because their gradients are ready first.
        torch.cat([gradient.flatten() for gradient in reversed(found)], out=row)
    return gradients


def gradients_of_all_kinds(ranks: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each kind with the gradients of ``ranks`` ranks, one per row, all as long as the model's."""
    model = language_model_gradients(ranks, seed)
    generator = torch.Generator().manual_seed(seed)
    yield GAUSSIAN, torch.randn(model.shape, generator=generator)
    for kind, degrees in ((HEAVY_TAILS, 3), (HEAVIER_TAILS, 2)):
        tails = torch.empty_like(model)
        for row in tails:
            squares = torch.randn(degrees, len(row), generator=generator).square().sum(0)
            row.copy_(torch.randn(len(row), generator=generator) / (squares / degrees).sqrt())
        yield kind, tails
    outliers = torch.randn(model.shape, generator=generator)
    outliers[:, 17::128] *= 100
    yield OUTLIERS, outliers
    scales = torch.exp(2 * torch.randn(model.shape[1], generator=generator))
    yield MIXED_SCALES, torch.randn(model.shape, generator=generator) * scales
    yield LANGUAGE_MODEL, model


class Simulation:
    """The ranks of one of our hooks, with their residuals.

    Shards begin at block boundaries, so one reduction of whole messages equals the ranks' reductions of their
    shards.
    """

    def __init__(self, ranks: int, values: int, layout: Layout, gather: Layout, feedback: Feedback) -> None:
        self._layout, self._gather, self._values = layout, gather, values
        # Pairs, because the kernels keep the old residuals and write the new ones elsewhere.
        both = feedback == "both"
        self._own = [torch.zeros(2, values, dtype=torch.bfloat16) if both else None for _ in range(ranks)]
        self._averaged = torch.zeros(2, values, dtype=torch.bfloat16) if feedback != "none" else None
        self._step = 0

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the average that every rank has after one step."""
        layout, gather, values = self._layout, self._gather, self._values
        messages = []
        for gradient, pair in zip(gradients, self._own, strict=True):
            message = torch.empty(layout.message_bytes(values), dtype=torch.uint8)
            kernels.encode(gradient, message, layout, **self._residuals(pair))
            messages.append(message)
        if len(messages) > 2:  # two ranks have all messages after one exchange
            message = torch.empty(gather.message_bytes(values), dtype=torch.uint8)
            kernels.reduce(messages, layout, values, message, gather, **self._residuals(self._averaged))
            messages, layout = [message], gather
        self._step += 1
        result = torch.empty(values)
        kernels.decode(messages, layout, result)
        return result

    def _residuals(self, pair: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if pair is None:
            return {}
        return {"residual": pair[self._step % 2], "new_residual": pair[1 - self._step % 2]}


def ours(
    layout: Layout, gather: Layout | None = None, feedback: Feedback = "none", *, last_alone: bool = False
) -> Scheme:
    """Return the hook with these settings; with feedback, the mean of its steps or its last step alone."""

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        simulation = Simulation(len(gradients), gradients.shape[1], layout, gather or layout, feedback)
        if feedback == "none":
            return simulation.average(gradients)
        total = torch.zeros(gradients.shape[1], dtype=torch.float64)
        for _ in range(FEEDBACK_STEPS):
            averaged = simulation.average(gradients)
            total += averaged
        return averaged if last_alone else total / FEEDBACK_STEPS

    return mean


def mean_of(once: Callable[[torch.Tensor], torch.Tensor], gradients: torch.Tensor) -> torch.Tensor:
    """Return the mean of what each rank's gradient becomes."""
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total += once(gradient)
    return total / len(gradients)


def in_rows(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return values in rows of one width, with zeros after the last."""
    return nn.functional.pad(values, (0, -len(values) % width)).view(-1, width)


def affine(channel: int | None) -> Scheme:
    """Return PyTorch's scheme: bytes between the minimum and the maximum of a channel, or of the bucket.

    PyTorch's own functions loop over the channels, which takes too long here.
    """

    def once(gradient: torch.Tensor) -> torch.Tensor:
        rows = in_rows(gradient, channel or len(gradient))
        low = rows.amin(1, keepdim=True).clamp(max=0)
        high = rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
        zero = -(low / scale).round()
        numbers = ((rows / scale).round() + zero).clamp(0, 255)
        return (scale * (numbers - zero)).flatten()[: len(gradient)]

    return partial(mean_of, once)


def sixteen_bits(dtype: torch.dtype) -> Scheme:
    """Return an all-reduce whose values and sums have a 16-bit dtype."""

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(gradients[0], dtype=dtype)
        for gradient in gradients:
            total += (gradient / len(gradients)).to(dtype)
        return total

    return mean


def fp8(block: int) -> Scheme:
    """Return the average in two exchanges of e4m3 numbers, as some hooks for GPUs do."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def once(values: torch.Tensor) -> torch.Tensor:
        rows = in_rows(values, block)
        scale = rows.abs().amax(1, keepdim=True) / largest
        scale = torch.where(scale > 0, scale, 1.0)
        numbers = (rows / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return (numbers.float() * scale).flatten()[: len(values)]

    return lambda gradients: once(mean_of(once, gradients))


def power_sgd(rank: int) -> Scheme:
    """Return one step of PowerSGD from a random start, for one matrix, without error feedback.

    PyTorch's hook has one matrix per parameter, and carries its start and its error from step to step.
    """

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        values = gradients.shape[1]
        # Averaging is linear, so the mean of the ranks' products is the product of their mean.
        matrix = in_rows(gradients.mean(0), -(-values // round(values**0.5)))
        # A seed of its own: with the gradients' seed, the start would repeat their first values.
        start = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(4711))
        left: torch.Tensor = torch.linalg.qr(matrix @ start)[0]
        return (left @ (matrix.T @ left).T).flatten()[:values]

    return mean


INT8, INT4 = Layout("int8", 128, rotate=True), Layout("int4", 32, rotate=True)
CARRIED, ALONE = f"mean of {FEEDBACK_STEPS} steps", f"{FEEDBACK_STEPS}th step alone"
SCHEMES: dict[str, Scheme] = {
    "ours: int8": ours(INT8),
    "ours: int8, rotate=False": ours(Layout("int8", 128)),
    'ours: int8, gather="fp16"': ours(INT8, Layout("fp16", 128)),
    f'ours: int8, feedback "shard", {CARRIED}': ours(INT8, feedback="shard"),
    f'ours: int8, feedback "both", {CARRIED}': ours(INT8, feedback="both"),
    f'ours: int8, feedback "shard", {ALONE}': ours(INT8, feedback="shard", last_alone=True),
    f'ours: int8, feedback "both", {ALONE}': ours(INT8, feedback="both", last_alone=True),
    "ours: int4": ours(INT4),
    "ours: int4, rotate=False": ours(Layout("int4", 32)),
    f'ours: int4, feedback "both", {CARRIED}': ours(INT4, feedback="both"),
    f'ours: int4, feedback "both", {ALONE}': ours(INT4, feedback="both", last_alone=True),
    "pytorch: per tensor": affine(None),
    "pytorch: per channel of 512": affine(512),
    "pytorch: fp16": sixteen_bits(torch.float16),
    "pytorch: bf16": sixteen_bits(torch.bfloat16),
    "pytorch: PowerSGD, rank 1, one step": power_sgd(1),
    "pytorch: PowerSGD, rank 4, one step": power_sgd(4),
    "fp8 e4m3, blocks of 256, two exchanges": fp8(256),
}


def measure(world_sizes: list[int], seeds: int) -> dict[str, Any]:
    """Return the errors of every scheme."""
    errors: dict[tuple[str, str, int], list[float]] = {}
    for seed in range(seeds):
        for kind, gradients in gradients_of_all_kinds(max(world_sizes), seed):
            for ranks in world_sizes:
                exact = gradients[:ranks].mean(0, dtype=torch.float64)
                for name, mean in SCHEMES.items():
                    lost = mean(gradients[:ranks]).double() - exact
                    errors.setdefault((name, kind, ranks), []).append(float(lost.norm() / exact.norm()))
            print(f"seed {seed}: {kind} done", flush=True)
    return {
        name: {
            "relative_error": {
                kind: {ranks: _summary(errors[name, kind, ranks]) for ranks in world_sizes} for kind in KINDS
            }
        }
        for name in SCHEMES
    }


def _summary(errors: list[float]) -> dict[str, Any]:
    return {
        "median": float(f"{statistics.median(errors):.4g}"),
        "range": [float(f"{bound:.4g}") for bound in (min(errors), max(errors))],
    }


def schemes(options: Namespace) -> Iterator[Found]:
    """Measure, and print a table per kind of gradients."""
    results = measure(options.world_sizes, options.seeds)
    for kind in KINDS:
        print(f"\n{kind}: relative error of the mean, W = {options.world_sizes}")
        for name, entry in results.items():
            medians = [error["median"] for error in entry["relative_error"][kind].values()]
            print(f"  {name:<52}" + "".join(f"{median:10.1e}" for median in medians))
    for name, entry in results.items():
        yield ("schemes", name), entry


SHOWN = {
    "ours: int8": BLUE,
    "ours: int8, rotate=False": BLUE,
    'ours: int8, gather="fp16"': BLUE,
    "ours: int4": BLUE,
    "ours: int4, rotate=False": BLUE,
    'ours: int4, feedback "both", mean of 20 steps': BLUE,
    "pytorch: fp16": GRAY,
    "pytorch: bf16": GRAY,
    "pytorch: per channel of 512": GRAY,
    "pytorch: per tensor": GRAY,
    "pytorch: PowerSGD, rank 4, one step": GRAY,
}
PANELS = ("Gaussian", "outliers", "language model")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the errors of some schemes and kinds of gradients, as lines over the number of ranks."""
    sizes = list(results["schemes"]["ours: int8"]["relative_error"][GAUSSIAN])
    title = f"Relative error of the mean of {sizes[-1]} ranks; lines: from {sizes[0]} ranks on"
    figure, axes = subplots([0.6 + 0.3 * len(SHOWN)] * len(PANELS), title)
    for axis, kind in zip(axes, PANELS, strict=True):
        for place, (name, color) in enumerate(SHOWN.items()):
            by_ranks = results["schemes"][name]["relative_error"][kind]
            errors = [by_ranks[ranks]["median"] for ranks in sizes]
            axis.plot(errors, [place] * len(errors), color=color, linewidth=1)
            axis.plot(errors[-1], place, "o", color=color, markersize=5)
            text = f"{100 * errors[-1]:.2g} %"
            axis.annotate(text, (errors[-1], place - 0.15), ha="center", va="bottom", fontsize="small")
        axis.set_xscale("log")
        axis.margins(x=0.2)
        axis.grid(axis="x", color="0.9")
        axis.set_title(f"gradients: {kind}", loc="left", fontsize="small")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(
            range(len(SHOWN)), [textwrap.fill(name.replace("pytorch", "PyTorch"), 26) for name in SHOWN]
        )
        axis.set_ylim(len(SHOWN) - 0.5, -0.9)
    save(figure, path)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    benchmark.parser.add_argument("--seeds", type=int, default=3)
    benchmark.parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8, 32])
    torch.set_num_threads(1)  # for the same sums, and so the same errors, on every machine
    description = kernels.describe()
    print(description)
    benchmark.run({"schemes": schemes}, facts={"kernels": description.splitlines()[0]}, draw=draw)
