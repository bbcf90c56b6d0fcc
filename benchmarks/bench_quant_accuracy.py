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

Writes results/quant_accuracy.json and .png beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from drawing import BLUE, GRAY, save, subplots
from machine import describe_machine
from torch import nn

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout

RESULTS = Path(__file__).parent / "results"
FEEDBACK_STEPS = 20

GAUSSIAN, HEAVY_TAILS, HEAVIER_TAILS = "Gaussian", "heavy tails", "heavier tails"
OUTLIERS, MIXED_SCALES, LANGUAGE_MODEL = "outliers", "mixed scales", "language model"
KINDS = [GAUSSIAN, HEAVY_TAILS, HEAVIER_TAILS, OUTLIERS, MIXED_SCALES, LANGUAGE_MODEL]

WIDTH, HEADS, LAYERS, CONTEXT, CHARACTERS = 144, 4, 2, 64, 128
BATCH, TRAINING_STEPS = 16, 60

Feedback = Literal["none", "shard", "both"]


@dataclass(frozen=True)
class Scheme:
    """A way to average.

    Args:
        mean: Maps the gradients of all ranks, one per row, to the average on each rank.
        bytes_sent: Maps W to the bytes sent per value and rank, as a share of an fp32 ring's 8(W-1)/W.
        group: Whose scheme it is, for the colors.
    """

    mean: Callable[[torch.Tensor], torch.Tensor]
    bytes_sent: Callable[[int], float]
    group: Literal["ours", "pytorch", "others"]


class LanguageModel(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of windows of CONTEXT + 1 characters."""
        hidden = self.characters(text[:, :-1]) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores = self.output(self.norm(hidden))
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def library_text() -> torch.Tensor:
    """Return the characters of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=CHARACTERS - 1).long()


def language_model_gradients(ranks: int, seed: int) -> torch.Tensor:
    """Return every rank's gradient of a model after some training, flattened as by DDP."""
    torch.manual_seed(seed)
    text, model = library_text(), LanguageModel()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def loss() -> torch.Tensor:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        result: torch.Tensor = model(text[starts + torch.arange(CONTEXT + 1)])
        return result

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
            old, new = self._old_and_new(pair)
            kernels.encode(gradient, message, layout, residual=old, new_residual=new)
            messages.append(message)
        result = torch.empty(values)
        if len(messages) == 2:  # one exchange gives every rank all messages
            kernels.decode(messages, layout, result)
        else:
            message = torch.empty(gather.message_bytes(values), dtype=torch.uint8)
            old, new = self._old_and_new(self._averaged)
            kernels.reduce(messages, layout, values, message, gather, residual=old, new_residual=new)
            kernels.decode([message], gather, result)
        self._step += 1
        return result

    def _old_and_new(self, pair: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if pair is None:
            return None, None
        return pair[self._step % 2], pair[1 - self._step % 2]


def ours(
    layout: Layout, gather: Layout | None = None, feedback: Feedback = "none", *, last_alone: bool = False
) -> Scheme:
    """Return the hook with these settings; with feedback, the mean of its steps or its last step alone."""
    second = gather or layout

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        simulation = Simulation(len(gradients), gradients.shape[1], layout, second, feedback)
        if feedback == "none":
            return simulation.average(gradients)
        total = torch.zeros(gradients.shape[1], dtype=torch.float64)
        for _ in range(FEEDBACK_STEPS):
            averaged = simulation.average(gradients)
            total += averaged
        return averaged if last_alone else total / FEEDBACK_STEPS

    def bytes_sent(ranks: int) -> float:
        if ranks == 2:
            return _all_gather(_per_value(layout), ranks)
        return _two_shot(_per_value(layout), _per_value(second))

    return Scheme(mean, bytes_sent, "ours")


def _per_value(layout: Layout) -> float:
    return layout.message_bytes(layout.block_size) / layout.block_size


def _all_gather(per_value: float, ranks: int) -> float:
    # (W-1) messages, over 8(W-1)/W bytes
    return per_value * ranks / 8


def _two_shot(first: float, second: float) -> float:
    # (W-1)/W of a message, twice, over 8(W-1)/W bytes
    return (first + second) / 8


def affine(channel: int | None) -> Scheme:
    """Return PyTorch's scheme: bytes between the minimum and the maximum of a channel, or of the bucket.

    PyTorch's own functions loop over the channels, which takes too long here.
    """

    def once(gradient: torch.Tensor) -> torch.Tensor:
        width = channel or len(gradient)
        rows = nn.functional.pad(gradient, (0, -len(gradient) % width)).view(-1, width)
        low = rows.amin(1, keepdim=True).clamp(max=0)
        high = rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
        zero = -(low / scale).round()
        numbers = ((rows / scale).round() + zero).clamp(0, 255)
        return (scale * (numbers - zero)).flatten()[: len(gradient)]

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            total += once(gradient)
        return total / len(gradients)

    # An fp32 scale and zero point per channel; for a whole bucket they are negligible.
    return Scheme(mean, lambda ranks: _all_gather(1 + (8 / channel if channel else 0), ranks), "pytorch")


def sixteen_bits(dtype: torch.dtype) -> Scheme:
    """Return an all-reduce whose values and sums have a 16-bit dtype."""

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(gradients[0], dtype=dtype)
        for gradient in gradients:
            total += (gradient / len(gradients)).to(dtype)
        return total

    return Scheme(mean, lambda _: 0.5, "pytorch")


def fp8(block: int) -> Scheme:
    """Return the average in two exchanges of e4m3 numbers, as some hooks for GPUs do."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def once(values: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
        scale = rows.abs().amax(1, keepdim=True) / largest
        scale = torch.where(scale > 0, scale, 1.0)
        numbers = (rows / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return (numbers.float() * scale).flatten()[: len(values)]

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            total += once(gradient)
        return once(total / len(gradients))

    return Scheme(mean, lambda _: _two_shot(1 + 4 / block, 1 + 4 / block), "others")


def power_sgd(rank: int, values: int) -> Scheme:
    """Return one step of PowerSGD from a random start, for one matrix, without error feedback.

    PyTorch's hook has one matrix per parameter, and carries its start and its error from step to step.
    """
    height = round(values**0.5)
    width = -(-values // height)

    def mean(gradients: torch.Tensor) -> torch.Tensor:
        # Averaging is linear, so the mean of the ranks' products is the product of their mean.
        matrix = nn.functional.pad(gradients.mean(0), (0, height * width - values)).view(height, width)
        # A seed of its own: with the gradients' seed, the start would repeat their first values.
        start = torch.randn(width, rank, generator=torch.Generator().manual_seed(4711))
        left: torch.Tensor = torch.linalg.qr(matrix @ start)[0]
        right = matrix.T @ left
        return (left @ right.T).flatten()[:values]

    # Two fp32 rings of the factors
    return Scheme(mean, lambda _: (height + width) * rank / values, "pytorch")


def all_schemes(values: int) -> dict[str, Scheme]:
    """Return the rows of the table, for gradients with this many values."""
    int8, int4 = Layout("int8", 128, rotate=True), Layout("int4", 32, rotate=True)
    plain8, plain4 = Layout("int8", 128), Layout("int4", 32)
    carried, alone = f"mean of {FEEDBACK_STEPS} steps", f"{FEEDBACK_STEPS}th step alone"
    return {
        "ours: int8": ours(int8),
        "ours: int8, rotate=False": ours(plain8),
        'ours: int8, gather="fp16"': ours(int8, Layout("fp16", 128)),
        f'ours: int8, feedback "shard", {carried}': ours(int8, feedback="shard"),
        f'ours: int8, feedback "both", {carried}': ours(int8, feedback="both"),
        f'ours: int8, feedback "shard", {alone}': ours(int8, feedback="shard", last_alone=True),
        f'ours: int8, feedback "both", {alone}': ours(int8, feedback="both", last_alone=True),
        "ours: int4": ours(int4),
        "ours: int4, rotate=False": ours(plain4),
        f'ours: int4, feedback "both", {carried}': ours(int4, feedback="both"),
        f'ours: int4, feedback "both", {alone}': ours(int4, feedback="both", last_alone=True),
        "pytorch: per tensor": affine(None),
        "pytorch: per channel of 512": affine(512),
        "pytorch: fp16": sixteen_bits(torch.float16),
        "pytorch: bf16": sixteen_bits(torch.bfloat16),
        "pytorch: PowerSGD, rank 1, one step": power_sgd(1, values),
        "pytorch: PowerSGD, rank 4, one step": power_sgd(4, values),
        "fp8 e4m3, blocks of 256, two exchanges": fp8(256),
    }


def measure(world_sizes: list[int], seeds: int) -> dict[str, Any]:
    """Return the errors and the bytes of every scheme."""
    errors: dict[tuple[str, str, int], list[float]] = {}
    values, schemes = 0, {}
    for seed in range(seeds):
        for kind, gradients in gradients_of_all_kinds(max(world_sizes), seed):
            values = gradients.shape[1]
            schemes = all_schemes(values)
            for ranks in world_sizes:
                exact = gradients[:ranks].mean(0, dtype=torch.float64)
                for name, scheme in schemes.items():
                    lost = scheme.mean(gradients[:ranks]).double() - exact
                    errors.setdefault((name, kind, ranks), []).append(float(lost.norm() / exact.norm()))
            print(f"seed {seed}: {kind} done", flush=True)
    return {
        "values_per_rank": values,
        "schemes": {
            name: {
                "measure": _measure_of(name),
                "bytes_of_fp32_ring_by_formula": {
                    ranks: round(scheme.bytes_sent(ranks), 4) for ranks in world_sizes
                },
                "relative_error": {
                    kind: {ranks: _summary(errors[name, kind, ranks]) for ranks in world_sizes}
                    for kind in KINDS
                },
            }
            for name, scheme in schemes.items()
        },
    }


def _measure_of(name: str) -> str:
    if "feedback" not in name:
        return "one step"
    which = "the last of" if "alone" in name else "mean of"
    return f"{which} {FEEDBACK_STEPS} steps with the same gradients, residuals carried"


def _summary(errors: list[float]) -> dict[str, Any]:
    return {
        "median": float(f"{statistics.median(errors):.4g}"),
        "range": [float(f"{bound:.4g}") for bound in (min(errors), max(errors))],
    }


def _median(results: dict[str, Any], name: str, kind: str, ranks: int) -> float:
    return float(results["schemes"][name]["relative_error"][kind][ranks]["median"])


def report(results: dict[str, Any]) -> None:
    """Print one table per kind of gradients."""
    sizes = results["world_sizes"]
    heads = "".join(f"{f'W={ranks}':>10}" for ranks in sizes)
    for kind in KINDS:
        print(f"\n{kind}: relative error of the mean; bytes sent as a share of an fp32 ring's, by formula")
        print(f"  {'':<52}{heads}   {heads}")
        for name, entry in results["schemes"].items():
            errors = "".join(f"{_median(results, name, kind, ranks):10.1e}" for ranks in sizes)
            sent = "".join(f"{entry['bytes_of_fp32_ring_by_formula'][ranks]:10.3f}" for ranks in sizes)
            print(f"  {name:<52}{errors}   {sent}")


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
    sizes = [str(ranks) for ranks in results["world_sizes"]]
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
        axis.set_yticks(range(len(SHOWN)), [textwrap.fill(name, 26) for name in SHOWN])
        axis.set_ylim(len(SHOWN) - 0.5, -0.9)
    save(figure, path)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
    options = parser.parse_args()
    path = RESULTS / "quant_accuracy.json"
    if options.plot:
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        return
    if options.seeds < 1 or min(options.world_sizes) < 2:
        parser.error("there must be at least one seed, and two ranks")
    torch.set_num_threads(1)  # for the same sums, and so the same errors, on every machine
    print(kernels.describe())
    results: dict[str, Any] = {
        **describe_machine(),
        "kernels": kernels.describe().splitlines()[0],
        "seeds": options.seeds,
        "world_sizes": options.world_sizes,
        **measure(options.world_sizes, options.seeds),
    }
    report(results)
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(json.loads(path.read_text()), path.with_suffix(".png"))  # read back, because its keys are strings
    print(f"\nwritten: {path} and .png")


if __name__ == "__main__":
    main()
