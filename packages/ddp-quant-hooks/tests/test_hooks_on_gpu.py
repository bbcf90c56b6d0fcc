"""The hooks on GPU tensors: several ranks on one GPU over Gloo, and NCCL where it can be had."""

import os

import pytest
import torch
import torch.distributed as dist
from quant_buckets import STATES, make_state, run_hook, same_bits, simulate
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import grad_bucket, run_ranks

pytestmark = pytest.mark.gpu


def _start(rank, world_size, backend):
    """Join a group whose ranks share the GPUs that there are."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == "nccl":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # of NCCL 2.30 and newer
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def _nccl_takes(world_size):
    several_on_one = torch.cuda.nccl.version() >= (2, 30)
    return torch.cuda.device_count() >= world_size or several_on_one


def _ranks(fn, world_size, backend, *args):
    if backend == "nccl" and not _nccl_takes(world_size):
        pytest.skip(f"NCCL before 2.30 needs a GPU for each of {world_size} ranks")
    return run_ranks(fn, world_size, world_size, backend, *args, backend=None, timeout=180)


def _values(rank, length=300_001, dtype=torch.float32):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _bits(rank, world_size, backend):
    _start(rank, world_size, backend)
    bucket, wrong = grad_bucket([torch.ones(3, device="cuda")]), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [_values(other, dtype=dtype) for other in range(world_size)]
        for name in STATES:
            state = make_state(name)
            averaged = run_hook(state, bucket, inputs[rank].cuda())
            if not same_bits(averaged.cpu(), simulate(state, inputs)):
                wrong.append((name, dtype))
            state.close()
        for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
            averaged = run_hook(None, bucket, inputs[rank].cuda(), hook).cpu()
            exact = sum(values.float() for values in inputs) / world_size
            if not (averaged.float() - exact).norm() < 0.02 * exact.norm():
                wrong.append((hook.__name__, dtype))
    return wrong


@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl"), (3, "nccl")]
)
def test_averages_have_the_bits_of_the_cpu(world_size, backend):
    assert _ranks(_bits, world_size, backend) == [[]] * world_size


def _alone(rank, world_size, backend):
    _start(rank, world_size, backend)
    bucket, values = grad_bucket([torch.ones(3, device="cuda")]), _values(0).cuda()
    before = values.clone()
    return torch.equal(run_hook(make_state("int8"), bucket, values), before)


def test_one_rank_is_the_identity():
    assert _ranks(_alone, 1, "nccl") == [True]


class _Net(torch.nn.Module):
    """Large enough for several buckets, with a branch that not every step takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(6)))
        self.branch = torch.nn.Linear(200, 200)

    def forward(self, values, *, branch=False):
        return self.layers(self.branch(values) if branch else values).square().mean()


MODES = {
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "accumulation": {},
    "scaler": {},
    "feedback": {},
}


def _trains(rank, world_size, backend, mode):
    """Train on the GPU, and beside it on the CPU with the mean that the CPU's kernels would have made."""
    _start(rank, world_size, backend)
    on_host = dist.new_group(backend="gloo")
    net = _Net().cuda()
    if mode != "find unused":
        del net.branch
    model = DistributedDataParallel(net, bucket_cap_mb=0.3, **MODES[mode])
    twin = [parameter.detach().cpu().clone() for parameter in net.parameters()]
    state = make_state("feedback both" if mode == "feedback" else "int8")
    means = {}

    def hook(state: QuantizedAllreduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # Gradients of all ranks before they are averaged: the values that the hook is given.
        own = bucket.buffer().cpu()
        everyone = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(everyone, own, group=on_host)
        mean = simulate(state, everyone)
        names = [id(parameter) for parameter in bucket.parameters()]
        parts = mean.split([parameter.numel() for parameter in bucket.parameters()])
        means.update(zip(names, parts, strict=True))
        return quantized_allreduce_hook(state, bucket)

    model.register_comm_hook(state, hook)
    scaler = torch.amp.GradScaler("cuda", enabled=mode == "scaler", init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        data = torch.randn(32, 200, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        if mode == "accumulation":
            with model.no_sync():
                model(data).backward()
        means.clear()
        scaler.scale(model(data, branch=mode == "find unused" and step % 2 == 0)).backward()
        scale = scaler.get_scale()
        averaged = {id(parameter): parameter.grad for parameter in net.parameters()}
        scaler.step(optimizer)
        scaler.update()
        for place, parameter in enumerate(net.parameters()):
            gradient = averaged[id(parameter)]
            if gradient is None or id(parameter) not in means:
                continue
            expected = means[id(parameter)].view_as(twin[place])
            if mode not in {"feedback", "scaler"}:  # which is unscaled in place
                assert same_bits(gradient.cpu(), expected), (step, place)
            twin[place] -= 0.1 * (expected / scale if mode == "scaler" else gradient.cpu())
        optimizer.zero_grad()
    # Six steps of one multiplication and one subtraction each, in fp32.
    worst = max(
        ((parameter.detach().cpu() - ours).abs() / (ours.abs() + 1e-3)).max().item()
        for parameter, ours in zip(net.parameters(), twin, strict=True)
    )
    statistics = state.statistics
    state.close()
    return worst, statistics.quantised_buckets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_training_follows_the_cpus_exchange(backend, mode):
    for worst, buckets in _ranks(_trains, 2, backend, mode):
        assert worst < 6 * 2 * 2.0**-23
        assert buckets >= 6 * 2


def _does_not_wait(rank, world_size, backend):
    _start(rank, world_size, backend)
    bucket = grad_bucket([torch.ones(3, device="cuda")])
    state = make_state("feedback both")
    values = _values(rank).cuda()
    for _ in range(3):  # connections, kernels and scratch memory are there afterwards
        run_hook(state, bucket, values.clone())
    torch.cuda.synchronize()
    again = values.clone()
    bucket.set_buffer(again)
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(10**8)
    future = quantized_allreduce_hook(state, bucket)
    waiting = not torch.cuda.current_stream().query()
    torch.cuda.set_sync_debug_mode("default")
    future.wait()
    return waiting


def test_with_nccl_the_hook_waits_for_nothing():
    assert _ranks(_does_not_wait, 2, "nccl") == [True, True]


def _captured(rank, world_size, backend):
    """A hook's kernels and messages, captured and replayed, as DDP does under a CUDA graph."""
    _start(rank, world_size, backend)
    bucket, state = grad_bucket([torch.ones(3, device="cuda")]), make_state("int8")
    static = _values(rank).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run_hook(state, bucket, static.clone())
    torch.cuda.synchronize()
    bucket.set_buffer(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        quantized_allreduce_hook(state, bucket).wait()
    static.copy_(_values(rank))
    graph.replay()
    torch.cuda.synchronize()
    inputs = [_values(other) for other in range(world_size)]
    return same_bits(static.cpu(), simulate(state, inputs))


def test_the_hook_can_be_captured_in_a_graph():
    assert _ranks(_captured, 2, "nccl") == [True, True]


def _failed_steps(rank, world_size, backend):
    """A step that is not finite leaves no trace in residuals, without the host being asked."""
    _start(rank, world_size, backend)
    bucket, state = grad_bucket([torch.ones(3, device="cuda")]), make_state("feedback both")
    twin = make_state("feedback both")
    results = []
    for one in (state, twin):
        for step in range(4):
            values = _values(10 * step + rank).cuda()
            if one is state and step == 2:  # a step more, which the twin does not make
                poisoned = values.clone()
                poisoned[5] = torch.nan
                assert run_hook(one, bucket, poisoned).isnan().any()
            result = run_hook(one, bucket, values)
        results.append(result.cpu())
    return same_bits(*results)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_step_that_is_not_finite_leaves_no_residual(backend):
    assert _ranks(_failed_steps, 2, backend) == [True, True]
