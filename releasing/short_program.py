"""A short real program per package, on two ranks with Gloo: ``python short_program.py NAME``.

It runs in an environment with only the package, its siblings and torch, and imports nothing of this
repository. It uses only names that the package has had since its first hook, optimizer or collective.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

RANKS = 2
LIMIT = 900.0  # seconds; it takes 5 to 10, but a hundred times as long on a very busy machine
STEPS = 3


def ddp_compress_hooks() -> None:
    """Train with gradients in fp16; they equal the averages within fp16's rounding."""
    from ddp_compress_hooks import CompressState, allreduce_hook, fp16_compress_hook

    _gradients_are_averages(None, allreduce_hook, 1e-6)
    _gradients_are_averages(None, fp16_compress_hook, 2e-3)
    _gradients_are_averages(CompressState(), fp16_compress_hook, 2e-3)


def ddp_quant_hooks() -> None:
    """Train with gradients in 8 bits; they equal the averages within two quantization steps per block."""
    from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

    _gradients_are_averages(QuantizedAllreduceState(), quantized_allreduce_hook, 4 / 127)


def ddp_optim_overlap() -> None:
    """Step inside ``backward()``: bitwise the parameters of the ordinary loop."""
    import torch

    from ddp_optim_overlap import overlap_optimizer

    ordinary, overlapped = (_train(overlap) for overlap in (None, overlap_optimizer))
    assert all(map(torch.equal, ordinary, overlapped)), "parameters differ from the ordinary loop's"


def dist_autograd_collectives() -> None:
    """Check the gradients of a sum and of a gather over the ranks."""
    import torch
    import torch.distributed as dist

    import dist_autograd_collectives as dac

    mine = torch.full((3,), float(dist.get_rank() + 1), requires_grad=True)
    total = dac.all_reduce(mine)
    assert torch.equal(total, torch.full((3,), 3.0)), total
    parts = dac.all_gather(total * mine)
    (gradient,) = torch.autograd.grad(torch.stack(list(parts)).sum(), mine)
    assert torch.isfinite(gradient).all(), gradient
    assert gradient.abs().sum() > 0, gradient


def dist_utils() -> None:
    """Check tensors in containers, and equal parameters on all ranks."""
    import torch
    import torch.distributed as dist

    from dist_utils import apply_to_tensors, sync_module_states

    doubled = apply_to_tensors(lambda tensor: tensor * 2, {"a": [torch.ones(2)]})
    assert torch.equal(doubled["a"][0], torch.full((2,), 2.0))
    torch.manual_seed(dist.get_rank())
    module = torch.nn.Linear(4, 4)
    sync_module_states(module, dist.group.WORLD, 2**20, 0, ())
    assert torch.equal(module.weight, _from_first_rank(module.weight))


def _from_first_rank(tensor: Any) -> Any:
    import torch.distributed as dist

    copy = tensor.detach().clone()
    dist.broadcast(copy, 0)
    return copy


def _gradients_are_averages(state: object, hook: Callable[..., Any], tolerance: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 5))
    model = DistributedDataParallel(plain)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        batch = torch.randn(16, 40, generator=generator)
        parameters = list(plain.parameters())
        expected = torch.autograd.grad(plain(batch).square().mean(), parameters)
        for part in expected:
            dist.all_reduce(part)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter, total in zip(parameters, expected, strict=True):
            limit = tolerance * float(total.abs().max())
            assert parameter.grad is not None
            difference = float((parameter.grad - total / RANKS).abs().max())
            assert difference <= limit, f"a gradient is {difference} from the average, more than {limit}"
        optimizer.step()


def _train(overlap: Callable[..., Any] | None) -> list[Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(50, 50) for _ in range(3)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = overlap(model, optimizer) if overlap else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    if handle is not None:
        handle.wait()
    dist.barrier()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _rank(name: str, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    globals()[name.replace("-", "_")]()
    dist.barrier()
    # A model in a reference cycle would keep its group, whose threads may abort the process if they are still
    # alive when the interpreter ends.
    gc.collect()
    dist.destroy_process_group()


def main(name: str) -> int:
    """Run the program of ``name`` on all ranks; return how many ranks failed."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")  # noqa: PTH118 - nothing here needs a Path
        command = [sys.executable, "-W", "ignore", __file__, name]
        ranks = [subprocess.Popen([*command, str(rank), store]) for rank in range(RANKS)]  # noqa: S603
        try:
            return sum(rank.wait(LIMIT) != 0 for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1]))
