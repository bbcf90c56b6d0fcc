"""A job with quantized gradients and an overlapped optimizer, saved by one rank and resumed."""

import contextlib
import io

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook


def _run(device, *, overlaps, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(61, 61) for _ in range(4)]).to(device)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    state = QuantizedAllreduceState(min_bytes=0, error_feedback="both").bind(ddp)
    handle = None
    if overlaps:
        handle = overlap_optimizer(ddp, optimizer, comm_hook=quantized_allreduce_hook, comm_state=state)
    else:
        ddp.register_comm_hook(state, quantized_allreduce_hook)
    return ddp, optimizer, state, handle


def _backward(ddp, number, device):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ddp(torch.randn(8, 61, generator=generator).to(device)).square().mean().backward()


def _step(ddp, optimizer, number, device):
    optimizer.zero_grad()
    _backward(ddp, number, device)
    optimizer.step()


def _resumes(rank):
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    found = []
    for overlaps in (False, True):
        for options in ({}, {"static_graph": True}):
            ddp, optimizer, state, _ = _run(device, overlaps=overlaps, **options)
            for number in range(3):
                _step(ddp, optimizer, number, device)
            everyone = state.gather_state_dict()
            file = io.BytesIO()
            torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            checkpoint = torch.load(file, weights_only=True)
            again, other, resumed, handle = _run(device, overlaps=overlaps, **options)
            for number in range(1 + bool(options)):  # the recipe: DDP makes its final buckets
                with contextlib.nullcontext() if handle is None else handle.pause():
                    _backward(again, number, device)
                other.zero_grad()
            again.module.load_state_dict(checkpoint["model"])
            other.load_state_dict(checkpoint["optimizer"])
            resumed.scatter_state_dict(everyone)
            for number in range(3, 6):
                _step(ddp, optimizer, number, device)
                _step(again, other, number, device)
            found.append(
                all(
                    torch.equal(left, right)
                    for left, right in zip(ddp.parameters(), again.parameters(), strict=True)
                )
            )
    return found


def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(launch):
    assert launch(_resumes, timeout=120) == [[True] * 4] * launch.world_size
