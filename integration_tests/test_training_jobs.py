"""Real training jobs with several packages, on the backend that the host offers."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook, compress_hook, fp16_compress_hook
from ddp_quant_hooks import (
    AutoState,
    QuantizedAllreduceState,
    auto_hook,
    quantization_perchannel_hook,
    quantized_allreduce_hook,
)
from dist_utils import OrderedWorker
from dist_utils.testing import same_on_all_ranks


def _device(rank):
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def _regression(device, state, hook, steps=60):
    """Fit a line of 64 weights; return the first and last loss and whether all ranks agree."""
    torch.manual_seed(0)
    target = torch.randn(64, 16, device=device)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16)).to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.03)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5, same_on_all_ranks(list(model.parameters()))


def _states():
    for accumulate in ("wire", "fp32"):
        yield CompressState(accumulate=accumulate), fp16_compress_hook
        yield CompressState(accumulate=accumulate), bf16_compress_hook
        yield CompressState(accumulate=accumulate, saturate=True, wire_dtype=torch.float16), compress_hook
    for options in ({}, {"bits": 4}, {"gather": "fp16", "error_feedback": "shard", "exact_1d": True}):
        yield QuantizedAllreduceState(min_bytes=0, **options), quantized_allreduce_hook
    yield None, quantization_perchannel_hook
    yield AutoState(), auto_hook


def _train(rank):
    return [_regression(_device(rank), state, hook) for state, hook in _states()]


def test_training_converges_and_ranks_stay_equal(launch):
    for runs in launch(_train, timeout=180):
        for first, last, equal in runs:
            assert last < 0.7 * first
            assert equal


def _two_models(rank):
    """Two models that step in turns, each with its own worker, and a third worker of the user."""
    device = _device(rank)
    nets = [torch.nn.Linear(200, 200).to(device) for _ in range(2)]
    models = [DistributedDataParallel(net, bucket_cap_mb=0.05) for net in nets]
    models[0].register_comm_hook(CompressState(accumulate="fp32"), bf16_compress_hook)
    models[1].register_comm_hook(QuantizedAllreduceState(min_bytes=0), quantized_allreduce_hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    worker = OrderedWorker()
    total = torch.zeros(1, device=device)

    def count(group):
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=group)
        return total.add_(one)

    counts = []
    for step in range(40):
        x = torch.randn(
            8, 200, device=device, generator=torch.Generator(device).manual_seed(100 * rank + step)
        )
        counts.append(worker.submit(count, device=device))
        models[1](models[0](x)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    counts[-1].wait()
    return [same_on_all_ranks(list(model.parameters())) for model in models], total.item()


def test_two_models_and_a_worker_share_the_ranks(launch):
    for equal, total in launch(_two_models, timeout=120):
        assert equal == [True, True]
        assert total == 40 * launch.world_size


def _overflow(rank, accumulate):
    """An infinity on the last rank alone: every rank must skip the step and halve the scale."""
    device = _device(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    model.register_comm_hook(CompressState(accumulate=accumulate), fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = torch.ones(4, 8, device=device)
    if rank == dist.get_world_size() - 1:
        x[0, 0] = float("inf")
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return unchanged, scaler.get_scale()


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
def test_grad_scaler_sees_an_infinity_of_one_rank_everywhere(launch, accumulate):
    assert launch(_overflow, accumulate) == [(True, 512.0)] * launch.world_size
