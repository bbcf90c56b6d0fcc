"""Training with gradients averaged in 16, 8 and 4 bits: does it reach the losses of training in fp32?

    python benchmarks/bench_quant_convergence.py           # everything; takes minutes, and needs scikit-learn
    python benchmarks/bench_quant_convergence.py --tasks digits --steps 50 --seeds 1 --output build/short
    python benchmarks/bench_quant_convergence.py --feedback  # 8 bits with and without error feedback, alone

Four real ranks on Gloo, DistributedDataParallel, several buckets a step. Two tasks:

* language: a small transformer predicts the next character of the standard library's sources; AdamW;
* digits: a small convolutional network on scikit-learn's handwritten digits; SGD with momentum.

The learning rate falls linearly to zero in both, so that the last step's loss has little noise. A seed
fixes the initial parameters and all batches: runs of one seed differ only in the hook. The final loss is on
held-out data, in fp32 on one rank.

The verdict compares two figures: the mean over the seeds of (loss - fp32's loss with the same seed), and
the standard deviation of fp32's own losses over the seeds, which is the effect of the seed alone. Three
seeds say little about a deviation, so the range of the differences is also given, and whether all seeds
agree on the sign. Any change of rounding, however small, sends training along another path: a nonzero
difference by itself is not harmful.

Memory is what tensors take at the end of training beyond those of fp32, for each value, on the rank that has
most: residuals, and the buffers of messages.

Writes results/quant_convergence.json and .png beside this file; with --feedback results/feedback.json. The
times show only the order of magnitude, because all ranks share one machine.
"""
# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from drawing import BLUE, GRAY, VERMILION, name_ends, save, subplots
from machine import describe_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CommHook, allreduce_hook, bf16_compress_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    kernels,
    quantization_perchannel_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import GradBucket

RESULTS = Path(__file__).parent / "results"
RANKS = 4
BUCKET_MB = 0.5
THIN = 10
"""Steps in each point of a stored curve."""
TIMEOUT = 3600.0

REFERENCE = "fp32"


def _no_state() -> None:
    return None


def _quantized(**options: Any) -> Callable[[], QuantizedAllreduceState]:
    # The models are so small that some of their buckets would be sent unquantized.
    return lambda: QuantizedAllreduceState(min_bytes=0, **options)


# For register_comm_hook: a function that makes a state (one per model), and the hook.
CONFIGURATIONS: dict[str, tuple[Callable[[], Any], CommHook]] = {
    REFERENCE: (_no_state, allreduce_hook),
    "bf16": (_no_state, bf16_compress_hook),
    "int8": (_quantized(error_feedback="none"), quantized_allreduce_hook),
    'int8, feedback "shard"': (_quantized(error_feedback="shard"), quantized_allreduce_hook),
    'int8, feedback "both"': (_quantized(error_feedback="both"), quantized_allreduce_hook),
    'int4, feedback "both"': (_quantized(bits=4, error_feedback="both"), quantized_allreduce_hook),
    'int4, feedback "none"': (_quantized(bits=4, error_feedback="none"), quantized_allreduce_hook),
    "per channel": (_no_state, quantization_perchannel_hook),
}
FEEDBACK = (REFERENCE, "int8", 'int8, feedback "both"')


class Task(Protocol):
    """Data, a model for it, and how to train it."""

    batch: int
    """Examples per rank and step."""

    def model(self) -> nn.Module:
        """Return a new model, made with torch's global generator."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer at its first learning rate."""
        ...

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the indices of training examples."""
        ...

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the loss of these training examples."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the ``"loss"``, and possibly more figures, on the held-out examples."""
        ...


class LanguageModel(nn.Module):
    """Maps characters to scores of the next ones."""

    WIDTH, HEADS, LAYERS, CONTEXT, CHARACTERS = 96, 4, 2, 32, 128

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(self.CHARACTERS, self.WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(self.CONTEXT, self.WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(self.LAYERS)
        )
        self.norm = nn.LayerNorm(self.WIDTH)
        self.output = nn.Linear(self.WIDTH, self.CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores (N, CONTEXT, CHARACTERS) for the character after each one of ``text``."""
        hidden = self.characters(text) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(self.CONTEXT)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.output(self.norm(hidden))
        return scores


class Language:
    """The next character of the standard library's modules. Every tenth file is held out."""

    batch = 4
    HELD_OUT_WINDOWS = 1024

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._held_out = self._read(files[::10])
        self._text = self._read([file for index, file in enumerate(files) if index % 10])

    @staticmethod
    def _read(files: list[Path]) -> torch.Tensor:
        text = bytearray(b"".join(file.read_bytes() for file in files))
        return torch.frombuffer(text, dtype=torch.uint8).clamp(max=LanguageModel.CHARACTERS - 1)

    def model(self) -> nn.Module:
        """Return a transformer of 251 648 parameters."""
        return LanguageModel()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        # Fused: a loop over the parameters would take a fifth of the step.
        return torch.optim.AdamW(parameters, lr=3e-3, fused=True)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the starts of windows."""
        return torch.randint(len(self._text) - LanguageModel.CONTEXT, (count,), generator=generator)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all characters of the windows."""
        return self._loss(model, self._text, chosen)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on windows spread over the held-out files."""
        last = len(self._held_out) - LanguageModel.CONTEXT - 1
        starts = torch.arange(self.HELD_OUT_WINDOWS) * last // (self.HELD_OUT_WINDOWS - 1)
        parts = [self._loss(model, self._held_out, some).item() for some in torch.split(starts, 64)]
        return {"loss": statistics.fmean(parts)}

    @staticmethod
    def _loss(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        windows = text[starts[:, None] + torch.arange(LanguageModel.CONTEXT + 1)].long()
        scores = model(windows[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


class Digits:
    """Handwritten digits of 8 x 8 pixels: 1500 to train on, 297 held out."""

    batch = 8
    TRAINING = 1500

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - the other task does not need it

        raw = load_digits()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
        self._images = (torch.from_numpy(raw.images).float() / 16).unsqueeze(1)[order]
        self._labels = torch.from_numpy(raw.target)[order]

    def model(self) -> nn.Module:
        """Return a convolutional network of 151 306 parameters."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return indices of training images."""
        return torch.randint(self.TRAINING, (count,), generator=generator)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the images."""
        return nn.functional.cross_entropy(model(self._images[chosen]), self._labels[chosen])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on all held-out images."""
        scores, labels = model(self._images[self.TRAINING :]), self._labels[self.TRAINING :]
        return {
            "loss": nn.functional.cross_entropy(scores, labels).item(),
            "accuracy": (scores.argmax(1) == labels).float().mean().item(),
        }


TASKS: dict[str, Callable[[], Task]] = {"language": Language, "digits": Digits}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        losses: The training loss of every step, averaged over the ranks.
        held_out: The task's figures for the final model; only rank 0 evaluates.
        ranks_equal: Whether all ranks ended with the same bits.
        parameters: The number of values averaged per step.
        buckets: The number of buckets, after DDP has rebuilt them.
        step_ms: Mean wall time of a step.
        memory: Bytes of all tensors at the end, on the rank that has most.
    """

    losses: list[float]
    held_out: dict[str, float]
    ranks_equal: bool
    parameters: int
    buckets: int
    step_ms: float
    memory: int


def counted(hook: CommHook, indices: list[int]) -> CommHook:
    """Return the hook, extended to record the index of every bucket."""

    def noted(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        indices.append(bucket.index())
        return hook(state, bucket)

    return noted


def parameters_equal(model: nn.Module) -> bool:
    """Return whether every rank's parameters are bitwise equal to rank 0's."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    # As integers, because a NaN does not equal itself.
    equal = torch.tensor(int(torch.equal(mine.view(torch.int32), first.view(torch.int32))))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal.item())


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python knows on this rank; of the most on any rank."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    most = torch.tensor(sum(storages.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def train(task: Task, configuration: str, seed: int, steps: int) -> Run:
    """Train one model on this rank's part of every batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model(), bucket_cap_mb=BUCKET_MB)
    make_state, hook = CONFIGURATIONS[configuration]
    indices: list[int] = []
    state = make_state()
    model.register_comm_hook(state, counted(hook, indices))
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    batches = torch.Generator().manual_seed(seed)
    losses = torch.empty(steps)

    dist.barrier()
    began = time.perf_counter()
    for step in range(steps):
        # Every rank draws for all ranks, so the examples of a step do not depend on who computes them.
        mine = task.draw(world_size * task.batch, batches).view(world_size, task.batch)[rank]
        optimizer.zero_grad()
        loss = task.loss(model, mine)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    seconds = time.perf_counter() - began
    memory = tensor_bytes()

    dist.all_reduce(losses)
    equal = parameters_equal(model)
    held_out = {}
    if rank == 0:
        with torch.no_grad():
            held_out = task.evaluate(model.module)
    if isinstance(state, QuantizedAllreduceState):
        state.close()  # ends its thread and connections, even if something still holds it
    return Run(
        losses=(losses / world_size).tolist(),
        held_out=held_out,
        ranks_equal=equal,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buckets=indices[-1] + 1,  # the buckets of a step come in the order of their indices
        step_ms=1e3 * seconds / steps,
        memory=memory,
    )


def train_all(
    rank: int, name: str, seeds: int, steps: int, configurations: Sequence[str]
) -> dict[tuple[str, int], Run]:
    """Train on one rank with these configurations and every seed."""
    task = TASKS[name]()
    runs = {}
    for seed, configuration in itertools.product(range(seeds), configurations):
        runs[configuration, seed] = run = train(task, configuration, seed, steps)
        # The model is in a reference cycle, and keeps its buckets and its hook's state.
        gc.collect()
        if rank == 0:
            loss = run.held_out["loss"]
            head = f"{name}, seed {seed}: {configuration}"
            print(f"{head:<42}{loss:8.4f}{run.step_ms:8.1f} ms/step", flush=True)
    return runs


def smooth(losses: list[float]) -> list[float]:
    """Return the means of every THIN steps."""
    return [statistics.fmean(losses[end - THIN : end]) for end in range(THIN, len(losses) + 1, THIN)]


def summarize(runs: dict[tuple[str, int], Run], seeds: int, steps: int) -> dict[str, Any]:
    """Return the entries of the result file for a task."""
    reference = [runs[REFERENCE, seed] for seed in range(seeds)]
    finals = [run.held_out["loss"] for run in reference]
    spread = statistics.stdev(finals) if seeds > 1 else None
    curves = [smooth(run.losses) for run in reference]
    found: dict[str, Any] = {
        "parameters": reference[0].parameters,
        "buckets": reference[0].buckets,
        "fp32_standard_deviation_over_seeds": spread,
        "curve_steps": list(range(THIN, steps + 1, THIN)),
        "fp32_curve_standard_deviation_over_seeds": (
            [_rounded(statistics.stdev(point)) for point in zip(*curves, strict=True)] if seeds > 1 else None
        ),
        "configurations": {},
    }
    for configuration in dict.fromkeys(configuration for configuration, _ in runs):
        mine = [runs[configuration, seed] for seed in range(seeds)]
        losses = [run.held_out["loss"] for run in mine]
        differences = [loss - plain for loss, plain in zip(losses, finals, strict=True)]
        smoothed = [smooth(run.losses) for run in mine]
        distances = [
            [abs(loss - plain) for loss, plain in zip(curve, reference_curve, strict=True)]
            for curve, reference_curve in zip(smoothed, curves, strict=True)
        ]
        entry: dict[str, Any] = {
            "held_out_loss": _summary(losses),
            "last_training_loss": _summary([curve[-1] for curve in smoothed]),
            "ranks_equal": all(run.ranks_equal for run in mine),
            "step_ms": round(statistics.median(run.step_ms for run in mine), 1),
            "curve": _means(smoothed),
        }
        if "accuracy" in mine[0].held_out:
            entry["accuracy"] = _summary([run.held_out["accuracy"] for run in mine])
        if configuration != REFERENCE:
            entry["difference_to_fp32"] = _summary(differences)
            entry["verdict"] = verdict(differences, spread)
            extra = max(run.memory - plain.memory for run, plain in zip(mine, reference, strict=True))
            entry["extra_bytes_a_value"] = round(extra / reference[0].parameters, 2)
            entry["curve_distance_to_fp32"] = _means(distances)
        found["configurations"][configuration] = entry
    return found


def verdict(differences: list[float], spread: float | None) -> str:
    """Describe how the differences, one per seed, compare with fp32's standard deviation."""
    mean = statistics.fmean(differences)
    if not math.isfinite(mean):
        return "not finite"
    if spread is None:
        return "one seed: no spread to compare with"
    signs = "all seeds" if all(d > 0 for d in differences) or all(d < 0 for d in differences) else "mixed"
    direction = "higher" if mean > 0 else "lower"
    size = "within" if abs(mean) < spread else "beyond"
    return f"{size} fp32's spread, {direction} ({signs})"


def _means(curves: list[list[float]]) -> list[float]:
    return [_rounded(statistics.fmean(point)) for point in zip(*curves, strict=True)]


def _summary(values: list[float]) -> dict[str, Any]:
    return {
        "mean": _rounded(statistics.fmean(values)),
        "range": [_rounded(min(values)), _rounded(max(values))],
        "by_seed": [_rounded(value) for value in values],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def report(results: dict[str, Any]) -> None:
    """Print one table per task."""
    for name, task in results["tasks"].items():
        spread = task["fp32_standard_deviation_over_seeds"]
        deviation = "one seed" if spread is None else f"standard deviation of fp32's over seeds {spread:.2e}"
        print(
            f"\n{name}: {task['parameters']} parameters in {task['buckets']} buckets, "
            f"{results['steps']} steps, {results['seeds']} seed(s); held-out loss: {deviation}"
        )
        print(
            f"  {'':<24}{'loss, mean [range]':<28}{'minus fp32, mean [range]':<34}"
            f"{'training':>9}{'accuracy':>10}{'ranks equal':>13}{'ms/step':>9}{'bytes/value':>13}  verdict"
        )
        for configuration, entry in task["configurations"].items():
            difference = entry.get("difference_to_fp32")
            accuracy = entry.get("accuracy")
            print(
                f"  {configuration:<24}{_text(entry['held_out_loss'], '.4f'):<28}"
                f"{_text(difference, '+.1e') if difference else '':<34}"
                f"{entry['last_training_loss']['mean']:>9.4f}"
                f"{format(accuracy['mean'], '.4f') if accuracy else '-':>10}"
                f"{'yes' if entry['ranks_equal'] else 'NO':>13}{entry['step_ms']:>9.1f}"
                f"{entry.get('extra_bytes_a_value', 0):>13.1f}"
                f"  {entry.get('verdict', '')}"
            )


def _text(summary: dict[str, Any], form: str) -> str:
    low, high = summary["range"]
    return f"{summary['mean']:{form}} [{low:{form}}, {high:{form}}]"


SHOWN = {"bf16": GRAY, "int8": BLUE, 'int4, feedback "both"': VERMILION}
TITLES = {"language": "language model", "digits": "handwritten digits"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the distance of some loss curves from fp32's, and the distance between fp32's own seeds."""
    tasks = results["tasks"]
    figure, axes = subplots([2.2] * len(tasks), "Distance of training losses from those of fp32")
    for axis, (name, task) in zip(axes, tasks.items(), strict=True):
        steps = task["curve_steps"]
        axis.set(yscale="log")
        axis.set_title(TITLES[name], loc="left", fontsize="small")
        ends = {}
        for configuration, color in SHOWN.items():
            distance = task["configurations"][configuration]["curve_distance_to_fp32"]
            axis.plot(steps, distance, color=color, linewidth=1)
            ends[configuration.replace(", ", ",\n")] = (steps[-1], distance[-1], color)
        if (deviation := task["fp32_curve_standard_deviation_over_seeds"]) is not None:
            axis.plot(steps, deviation, color="black", linestyle="--", linewidth=1)
            ends["deviation of\nfp32's seeds"] = (steps[-1], deviation[-1], "black")
        name_ends(axis, ends, gap=0.15)
    axes[-1].set(xlabel="step")
    save(figure, path)


def main() -> None:
    """Train, print and store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--feedback", action="store_true", help="8 bits with and without feedback, alone")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
    options = parser.parse_args()
    path = options.output / ("feedback.json" if options.feedback else "quant_convergence.json")
    configurations = FEEDBACK if options.feedback else tuple(CONFIGURATIONS)
    if options.plot:
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        return
    if options.steps < THIN or options.seeds < 1:
        parser.error(f"there must be at least {THIN} steps, and one seed")
    torch.set_num_threads(1)  # as in the ranks
    # Torch warns in the ranks whenever a private group ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print(kernels.describe())
    results: dict[str, Any] = {
        **describe_machine(),
        "kernels": kernels.describe().splitlines()[0],
        "ranks": RANKS,
        "bucket_cap_mb": BUCKET_MB,
        "steps": options.steps,
        "seeds": options.seeds,
        "curves": f"means of {THIN} steps up to each of curve_steps, and of all seeds",
        "tasks": {},
    }
    for name in dict.fromkeys(options.tasks):
        wanted = (name, options.seeds, options.steps, configurations)
        runs = run_ranks(train_all, RANKS, *wanted, timeout=TIMEOUT)[0]
        results["tasks"][name] = summarize(runs, options.seeds, options.steps)
    report(results)
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if not options.feedback:
        draw(results, path.with_suffix(".png"))
    print(f"\nwritten: {path}")
    unequal = [
        f"{name}: {configuration}"
        for name, task in results["tasks"].items()
        for configuration, entry in task["configurations"].items()
        if not entry["ranks_equal"]
    ]
    if unequal:
        raise SystemExit(f"the ranks ended with different parameters: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
