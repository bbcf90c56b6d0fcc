r"""Train a small network on handwritten digits through every communication hook, and compare them.

    torchrun --standalone --nproc-per-node 2 docs/examples/train_digits.py
    torchrun --standalone --nproc-per-node 2 docs/examples/train_digits.py \
        --hook fp16_compress_hook --epochs 3
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        docs/examples/train_digits.py

The data is scikit-learn's bundled set of 1797 images: nothing is downloaded. Needs, beside
ddp-quant-hooks: scikit-learn, tqdm.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ddp_compress_hooks import (
    CommHook,
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import tcp_bytes_sent

# What to pass to register_comm_hook: a function that makes the state, and the hook.
HOOKS: dict[str, tuple[Any, CommHook] | None] = {
    "none": None,
    "allreduce_hook": (lambda: None, allreduce_hook),
    "fp16_compress_hook": (lambda: None, fp16_compress_hook),
    "fp16_compress_hook+fp32": (
        lambda: CompressState(accumulate="fp32"),
        fp16_compress_hook,
    ),
    "bf16_compress_hook": (lambda: None, bf16_compress_hook),
    "bf16_compress_hook+fp32": (
        lambda: CompressState(accumulate="fp32"),
        bf16_compress_hook,
    ),
    "fp16_compress_wrapper(allreduce_hook)": (
        lambda: None,
        fp16_compress_wrapper(allreduce_hook),
    ),
    "bf16_compress_wrapper(allreduce_hook)": (
        lambda: None,
        bf16_compress_wrapper(allreduce_hook),
    ),
    "compress_hook+saturate": (
        lambda: CompressState(wire_dtype=torch.float16, saturate=True),
        compress_hook,
    ),
    "quantized_allreduce_hook": (
        lambda: QuantizedAllreduceState(
            min_bytes=0
        ),  # by default such small buckets stay in fp32
        quantized_allreduce_hook,
    ),
    "quantized_allreduce_hook+feedback": (
        lambda: QuantizedAllreduceState(min_bytes=0, error_feedback="both"),
        quantized_allreduce_hook,
    ),
    "quantized_allreduce_hook, 4 bits": (
        lambda: QuantizedAllreduceState(min_bytes=0, bits=4),
        quantized_allreduce_hook,
    ),
    "quantization_pertensor_hook": (lambda: None, quantization_pertensor_hook),
    "quantization_perchannel_hook": (lambda: None, quantization_perchannel_hook),
}


@dataclass
class Digits:
    """Images (N, 1, 8, 8) in [0, 1] and labels (N,), on the training device."""

    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def load(cls, device: torch.device) -> tuple[Digits, Digits]:
        """Return 1500 images to train on and 297 to test on, the same on every rank."""
        raw = load_digits()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
        images = (torch.from_numpy(raw.images).float() / 16).unsqueeze(1)[order].to(device)
        labels = torch.from_numpy(raw.target)[order].to(device)
        return cls(images[:1500], labels[:1500]), cls(images[1500:], labels[1500:])


@dataclass
class Run:
    """The results of one training run."""

    hook: str
    step_seconds: float
    bytes_per_step: float | None
    accuracy: float
    gradient_error: float
    ranks_equal: bool


def make_model(device: torch.device) -> nn.Module:
    """Return a small convolutional network (151 306 parameters), the same on every rank."""
    torch.manual_seed(0)
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
    ).to(device)


def train(name: str, device: torch.device, epochs: int, batch: int) -> Run:
    """Train with one hook; every rank returns the same numbers, but for times and bytes."""
    gc.collect()  # the last run's model and its connections: their bytes must not count here
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits, test = Digits.load(device)
    model = DistributedDataParallel(make_model(device), bucket_cap_mb=0.25)
    state = None
    if (choice := HOOKS[name]) is not None:
        make_state, hook = choice
        state = make_state()
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shuffle = torch.Generator().manual_seed(1)
    steps = len(digits.labels) // (batch * world_size)

    seconds: list[float] = []
    dist.barrier()
    sent = count_bytes()
    with tqdm(total=epochs * steps, desc=name, disable=rank != 0, leave=False) as bar:
        for _ in range(epochs):
            order = torch.randperm(len(digits.labels), generator=shuffle).to(device)
            for step in range(steps):
                start = (step * world_size + rank) * batch
                mine = order[start : start + batch]
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    model(digits.images[mine]), digits.labels[mine]
                )
                loss.backward()
                optimizer.step()
                loss.item()  # a GPU has finished then
                seconds.append(time.perf_counter() - began)
                bar.update()
    dist.barrier()
    sent_now = count_bytes()

    with torch.no_grad():
        correct = (model.module(test.images).argmax(1) == test.labels).float().mean().item()
    run = Run(
        hook=name,
        step_seconds=statistics.median(seconds),
        bytes_per_step=None
        if sent is None or sent_now is None
        else (sent_now - sent) / (epochs * steps),
        accuracy=correct,
        gradient_error=gradient_error(model, digits, batch),
        ranks_equal=parameters_equal(model),
    )
    if state is not None:
        state.close()  # its connections end here, not while the next run counts bytes
    return run


def count_bytes() -> int | None:
    """Return the bytes sent so far, if they travel over TCP and the system counts them."""
    try:
        return tcp_bytes_sent() if dist.get_backend() == "gloo" else None
    except NotImplementedError:
        return None


def gradient_error(model: DistributedDataParallel, digits: Digits, batch: int) -> float:
    """Return |averaged - exact| / |exact| of one step's gradient; the exact mean is computed in fp64."""

    def gradient() -> torch.Tensor:
        model.zero_grad()
        start = dist.get_rank() * batch
        mine = slice(start, start + batch)
        nn.functional.cross_entropy(
            model(digits.images[mine]), digits.labels[mine]
        ).backward()
        return torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ).double()

    with model.no_sync():
        exact = gradient()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    return float((gradient() - exact).norm() / exact.norm())


def parameters_equal(model: nn.Module) -> bool:
    """Tell whether every rank ended with the same bits."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    equal = torch.tensor(int(torch.equal(mine, first)), device=mine.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal.item())


def show(runs: list[Run]) -> None:
    """Print what every hook costs and saves."""
    reference = runs[0]
    print(
        f"\n{'hook':<38}{'KiB sent/step':>14}{'of none':>9}{'step ms':>9}"
        f"{'accuracy':>10}{'grad. error':>13}{'ranks equal':>13}"
    )
    for run in runs:
        sent = share = "not TCP"
        if run.bytes_per_step is not None:
            sent = f"{run.bytes_per_step / 1024:.1f}"
            share = (
                f"{run.bytes_per_step / reference.bytes_per_step:.3f}"
                if reference.bytes_per_step
                else "-"
            )
        print(
            f"{run.hook:<38}{sent:>14}{share:>9}{1e3 * run.step_seconds:>9.2f}"
            f"{run.accuracy:>10.3f}{run.gradient_error:>13.1e}{'yes' if run.ranks_equal else 'NO':>13}"
        )


def main() -> None:
    """Parse the command line, run every chosen hook, report from rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hook",
        choices=HOOKS,
        action="append",
        help="only these, and none as the reference",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=50, help="images per rank and step")
    options = parser.parse_args()
    if options.epochs < 1 or options.batch < 1:
        parser.error("--epochs and --batch must be at least 1")
    if options.batch * int(os.environ.get("WORLD_SIZE", "1")) > 1500:
        parser.error(
            "--batch times the number of ranks must not exceed the 1500 training images"
        )

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        chosen = (
            list(HOOKS)
            if options.hook is None
            else list(dict.fromkeys(["none", *options.hook]))
        )
        runs = [train(name, device, options.epochs, options.batch) for name in chosen]
        if dist.get_rank() == 0:
            show(runs)
        # Meanwhile Gloo's threads drop tensors of finished work, for which they need the interpreter: a
        # process that ends at that moment aborts (seen with torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
