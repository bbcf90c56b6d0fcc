"""The hooks on GPU tensors: several ranks on one GPU over Gloo, and NCCL where it can run."""

import os

import pytest
import torch
import torch.distributed as dist
from kernel_cases import differences
from quant_buckets import STATES, make_state, run_hook, simulate
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook, fp16_compress_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import grad_bucket, run_ranks

pytestmark = pytest.mark.gpu


def _start(rank, world_size, backend):
    """Join a group whose ranks share the available GPUs."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def _ranks(fn, world_size, backend, *args):
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if backend == "nccl" and torch.cuda.device_count() < world_size and not shared:
        pytest.skip(
            f"{world_size} ranks on {torch.cuda.device_count()} GPU(s): "
            "NCCL 2.30 can, with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    return run_ranks(fn, world_size, world_size, backend, *args, backend=None, timeout=180)


def _values(rank, length=300_001, dtype=torch.float32):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _bits(rank, world_size, backend):
    _start(rank, world_size, backend)
    bucket = grad_bucket([torch.ones(3, device="cuda")])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [_values(other, dtype=dtype) for other in range(world_size)]
        for name in STATES:
            state = make_state(name)
            averaged = run_hook(state, bucket, inputs[rank].cuda())
            assert differences({name: averaged}, {name: simulate(state, inputs)}) == {}, dtype
            state.close()
        for hook in (quantization_pertensor_hook, quantization_perchannel_hook):
            averaged = run_hook(None, bucket, inputs[rank].cuda(), hook).cpu()
            exact = sum(values.float() for values in inputs) / world_size
            assert (averaged.float() - exact).norm() / exact.norm() < 0.02, (hook.__name__, dtype)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl"), (3, "nccl")]
)
def test_averages_have_the_bits_of_the_cpu(world_size, backend):
    _ranks(_bits, world_size, backend)


def _alone(rank, world_size, backend):
    _start(rank, world_size, backend)
    bucket, values = grad_bucket([torch.ones(3, device="cuda")]), _values(0).cuda()
    before = values.clone()
    assert torch.equal(run_hook(make_state("int8"), bucket, values), before)
    feedback = make_state("feedback both")
    bucket.set_buffer(values)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="from step to step"):
        quantized_allreduce_hook(feedback, bucket)


def test_one_rank_is_the_identity_and_error_feedback_is_refused_in_a_graph():
    _ranks(_alone, 1, "nccl")


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
}


def _trains(rank, world_size, backend, mode):
    """Train on the GPU, and in parallel on the CPU with the mean that the CPU's kernels compute."""
    _start(rank, world_size, backend)
    on_host = dist.new_group(backend="gloo")
    net = _Net().cuda()
    if mode != "find unused":
        del net.branch
    model = DistributedDataParallel(net, bucket_cap_mb=0.3, **MODES[mode])
    twin = [parameter.detach().cpu().clone() for parameter in net.parameters()]
    state = make_state("int8")
    means = {}

    def hook(state: QuantizedAllreduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # Gradients of all ranks before they are averaged: the input of the hook.
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
            if mode != "scaler":  # it unscales in place
                assert differences({place: gradient}, {place: expected}) == {}, step
            twin[place] -= 0.1 * expected / (scale if mode == "scaler" else 1)
        optimizer.zero_grad()
    # Six steps of one multiplication and one subtraction each, in fp32.
    worst = max(
        ((parameter.detach().cpu() - ours).abs() / (ours.abs() + 1e-3)).max().item()
        for parameter, ours in zip(net.parameters(), twin, strict=True)
    )
    statistics = state.statistics
    state.close()
    return worst, statistics.quantized_buckets


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
    for _ in range(3):  # then connections, kernels and scratch memory exist
        run_hook(state, bucket, values.clone())
    torch.cuda.synchronize()
    again = values.clone()
    bucket.set_buffer(again)
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(10**8)
    future = quantized_allreduce_hook(state, bucket)
    assert not torch.cuda.current_stream().query(), "the stream has not slept out when the hook returns"
    torch.cuda.set_sync_debug_mode("default")
    future.wait()


def test_with_nccl_the_hook_waits_for_nothing():
    _ranks(_does_not_wait, 2, "nccl")


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
    assert differences({"mean": static}, {"mean": simulate(state, inputs)}) == {}


def test_the_hook_can_be_captured_in_a_graph():
    _ranks(_captured, 2, "nccl")


def _feedback(rank, world_size, backend):
    """Several steps with error feedback, compared with a state on the CPU.

    The GPU makes one more step, which is not finite: it must leave no trace, without a wait on the host.
    """
    _start(rank, world_size, backend)
    on_host = dist.new_group(backend="gloo")
    bucket, state = grad_bucket([torch.ones(3, device="cuda")]), make_state("feedback both")
    twin = make_state("feedback both", on_host)
    for step in range(4):
        values = _values(10 * step + rank)
        if step == 2:
            poisoned = values.cuda()
            poisoned[5] = torch.nan
            assert run_hook(state, bucket, poisoned).isnan().any()
        averaged = run_hook(state, bucket, values.cuda())
        expected = run_hook(twin, bucket, values)
        assert differences({"mean": averaged}, {"mean": expected}) == {}, step
    twin.close()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_error_feedback_has_the_bits_of_the_cpu_and_forgets_failed_steps(world_size, backend):
    _ranks(_feedback, world_size, backend)


def _plain(rank, world_size, backend):
    """Buckets that are sent without compression: small, fp64, sparse, and parameters of one dimension."""
    _start(rank, world_size, backend)
    state = QuantizedAllreduceState(exact_1d=True, error_feedback="shard")
    bucket = grad_bucket([torch.ones(3, device="cuda")])
    found = {}
    for name, values in {
        "small": torch.full((100,), rank + 1.0, device="cuda"),
        "fp64": torch.full((10**6,), rank + 1.0, device="cuda", dtype=torch.float64),
    }.items():
        torch.cuda._sleep(10**7)  # the gradient is not computed yet when the hook is called
        values.mul_(2)
        found[name] = run_hook(state, bucket, values).unique().tolist()
    for name, hook in {"fp16": fp16_compress_hook, "allreduce": allreduce_hook}.items():
        values = torch.full((10**6,), rank + 1.0, device="cuda")
        found[name] = run_hook(None, bucket, values, hook).unique().tolist()
    net = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.LayerNorm(3)).cuda()
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, quantized_allreduce_hook)
    model(torch.tensor([rank], device="cuda")).sum().backward()
    found["sparse"] = sorted(net[0].weight.grad.coalesce().indices().flatten().tolist())
    return found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_buckets_without_compression_are_complete_when_ddp_reads_them(backend):
    mean = {"small": [3.0], "fp64": [3.0], "fp16": [1.5], "allreduce": [1.5], "sparse": [0, 1]}
    assert _ranks(_plain, 2, backend) == [mean, mean]
