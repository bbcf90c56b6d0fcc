"""Training with gradients averaged in 16, 8 and 4 bits: does it reach the losses of training in fp32?

    python benchmarks/bench_quant_convergence.py           # everything; takes minutes, and needs scikit-learn
    python benchmarks/bench_quant_convergence.py digits --steps 50 --seeds 1 --output build/short.json
    python benchmarks/bench_quant_convergence.py language --steps 2000 --output FILE  # an hour

Four real ranks on Gloo, DistributedDataParallel, several buckets a step. Two tasks:

* language: a small transformer predicts the next character of the standard library's sources; AdamW;
* digits: a small convolutional network on scikit-learn's handwritten digits; SGD with momentum.

The learning rate falls linearly to zero in both, so that the last step's loss has little noise. The final
loss is on held-out data, in fp32 on one rank. Any change of rounding, however small, sends training along
another path: a nonzero difference by itself is not harmful (``training.against_reference``).

Memory is what tensors take at the end of training beyond those of fp32, for each value, on the rank that has
most: residuals, and the buffers of messages.

Writes results/quant_convergence.json and .png. The run of 2,000 steps is
results/quant_convergence_2000_steps.json. The times show only the order of magnitude, because all ranks share
one machine.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawing import BLUE, GRAY, VERMILION, name_ends, save, subplots
from harness import Benchmark, Found
from tasks import TASKS, Task
from torch.nn.parallel import DistributedDataParallel
from training import (
    REFERENCE,
    against_reference,
    deviation,
    held_out,
    mean_curve,
    means,
    over_seeds,
    print_losses,
    take_step,
    train,
)

from ddp_compress_hooks import allreduce_hook, bf16_compress_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    kernels,
    quantization_perchannel_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks, same_on_all_ranks

RANKS = 4
BUCKET_MB = 0.5
THIN = 10
"""Steps in each point of a stored curve."""


def _no_state() -> None:
    return None


def _quantized(**options: Any) -> Callable[[], QuantizedAllreduceState]:
    # The models are so small that some of their buckets would be sent unquantized.
    return lambda: QuantizedAllreduceState(min_bytes=0, **options)


# For register_comm_hook: a function that makes a state (one per model), and the hook.
CONFIGURATIONS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    REFERENCE: (_no_state, allreduce_hook),
    "bf16": (_no_state, bf16_compress_hook),
    "int8": (_quantized(error_feedback="none"), quantized_allreduce_hook),
    'int8, feedback "shard"': (_quantized(error_feedback="shard"), quantized_allreduce_hook),
    'int8, feedback "both"': (_quantized(error_feedback="both"), quantized_allreduce_hook),
    'int4, feedback "both"': (_quantized(bits=4, error_feedback="both"), quantized_allreduce_hook),
    'int4, feedback "none"': (_quantized(bits=4, error_feedback="none"), quantized_allreduce_hook),
    "per channel": (_no_state, quantization_perchannel_hook),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        curve: Means of THIN steps of the training loss, averaged over the ranks.
        held_out: The task's figures for the final model; only rank 0 evaluates.
        parameters: The number of values averaged per step.
        step_ms: Mean wall time of a step.
        memory: Bytes of all tensors at the end, on the rank that has most.
    """

    curve: list[float]
    held_out: dict[str, float]
    parameters: int
    step_ms: float
    memory: int


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python knows on a rank, of the most on any rank."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    most = torch.tensor(sum(storages.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def train_once(task: Task, configuration: str, seed: int, steps: int) -> Run:
    """Train one model."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model(), bucket_cap_mb=BUCKET_MB)
    make_state, hook = CONFIGURATIONS[configuration]
    state = make_state()
    model.register_comm_hook(state, hook)
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    def step(chosen: torch.Tensor) -> torch.Tensor:
        loss = take_step(task, model, optimizer, chosen)
        schedule.step()
        return loss

    dist.barrier()
    began = time.perf_counter()
    losses = train(task, step, seed, steps)
    seconds = time.perf_counter() - began
    memory = tensor_bytes()
    if not same_on_all_ranks(list(model.parameters())):
        raise RuntimeError(f"{configuration}: the ranks ended with different parameters")
    if state is not None:
        state.close()  # ends its thread and connections, even if something still holds it
    return Run(
        curve=means(losses, THIN),
        held_out=held_out(task, model.module),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        step_ms=1e3 * seconds / steps,
        memory=memory,
    )


def train_all(rank: int, name: str, seeds: int, steps: int) -> dict[tuple[str, int], Run]:
    """Train on one rank with every configuration and seed."""
    task = TASKS[name]()
    runs = {}
    for seed, configuration in itertools.product(range(seeds), CONFIGURATIONS):
        runs[configuration, seed] = run = train_once(task, configuration, seed, steps)
        # The model is in a reference cycle, and keeps its buckets and its hook's state.
        gc.collect()
        if rank == 0:
            loss = f"{run.held_out['loss']:8.4f}{run.step_ms:8.1f} ms/step"
            print(f"{name}, seed {seed}: {configuration:<26}{loss}", flush=True)
    return runs


def summarize(runs: dict[tuple[str, int], Run], seeds: int, steps: int) -> dict[str, Any]:
    """Return the entries of the result file for a task."""
    reference = [runs[REFERENCE, seed] for seed in range(seeds)]
    finals = [run.held_out["loss"] for run in reference]
    spread = deviation(finals)
    curves = [run.curve for run in reference]
    found: dict[str, Any] = {
        "parameters": reference[0].parameters,
        "fp32_standard_deviation_over_seeds": spread,
        "curve_steps": list(range(THIN, steps + 1, THIN)),
        "fp32_curve_standard_deviation_over_seeds": (
            [statistics.stdev(point) for point in zip(*curves, strict=True)] if seeds > 1 else None
        ),
        "configurations": {},
    }
    for configuration in dict.fromkeys(configuration for configuration, _ in runs):
        mine = [runs[configuration, seed] for seed in range(seeds)]
        entry: dict[str, Any] = {
            "held_out_loss": over_seeds([run.held_out["loss"] for run in mine]),
            "last_training_loss": over_seeds([run.curve[-1] for run in mine]),
            "step_ms": round(statistics.median(run.step_ms for run in mine), 1),
            "curve": mean_curve([run.curve for run in mine]),
        }
        if "accuracy" in mine[0].held_out:
            entry["accuracy"] = over_seeds([run.held_out["accuracy"] for run in mine])
        if configuration != REFERENCE:
            entry |= against_reference([run.held_out["loss"] for run in mine], finals, spread)
            extra = max(run.memory - plain.memory for run, plain in zip(mine, reference, strict=True))
            entry["extra_bytes_a_value"] = round(extra / reference[0].parameters, 2)
            entry["curve_distance_to_fp32"] = mean_curve(
                [
                    [abs(loss - plain) for loss, plain in zip(run.curve, curve, strict=True)]
                    for run, curve in zip(mine, curves, strict=True)
                ]
            )
        found["configurations"][configuration] = entry
    return found


def compare(name: str, options: Namespace) -> Iterator[Found]:
    """Train a task with every configuration."""
    wanted = (name, options.seeds, options.steps)
    runs = run_ranks(train_all, RANKS, *wanted, timeout=3600 + 20 * options.steps)[0]
    found = summarize(runs, options.seeds, options.steps)
    title = f"{name}: {found['parameters']} parameters, {options.steps} steps, {options.seeds} seed(s)"
    spread = found["fp32_standard_deviation_over_seeds"]
    print_losses(title, spread, found["configurations"], "held_out_loss")
    yield ("tasks", name), found


SHOWN = {"bf16": GRAY, "int8": BLUE, 'int4, feedback "both"': VERMILION}
TITLES = {"language": "language model", "digits": "handwritten digits"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the distance of some loss curves from fp32's, and the distance between fp32's own seeds."""
    tasks = results["tasks"]
    figure, axes = subplots([2.2] * len(tasks), "Distance of training losses from those of fp32")
    for axis, (name, task) in zip(axes, tasks.items(), strict=True):
        steps = task["curve_steps"]
        axis.set(yscale="log", ylabel="|loss - loss of fp32|")
        axis.set_title(TITLES[name], loc="left", fontsize="small")
        ends = {}
        for configuration, color in SHOWN.items():
            distance = task["configurations"][configuration]["curve_distance_to_fp32"]
            axis.plot(steps, distance, color=color, linewidth=1)
            ends[configuration.replace(", ", ",\n")] = (steps[-1], distance[-1], color)
        if (deviations := task["fp32_curve_standard_deviation_over_seeds"]) is not None:
            axis.plot(steps, deviations, color="black", linestyle="--", linewidth=1)
            ends["deviation of\nfp32's seeds"] = (steps[-1], deviations[-1], "black")
        name_ends(axis, ends, gap=0.18)
    axes[-1].set(xlabel="step")
    save(figure, path)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    benchmark.parser.add_argument("--steps", type=int, default=500, help=f"at least {THIN}")
    benchmark.parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)  # as in the ranks
    benchmark.run(
        {name: partial(compare, name) for name in TASKS},
        facts={
            "kernels": kernels.describe().splitlines()[0],
            "ranks": RANKS,
            "bucket_cap_mb": BUCKET_MB,
            "curves": f"means of {THIN} steps up to each of curve_steps, and of all seeds",
        },
        draw=draw,
    )
