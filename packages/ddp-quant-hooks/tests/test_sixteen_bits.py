"""16 bits on the wire, sums in fp32: each value is rounded once, and the sum has one order."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from averaging_callers import Buckets
from fsdp_models import Net, backward, batch, local, needs_hooks, sharded
from host_names import take_host_name
from quant_buckets import assert_same
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    kernels,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from ddp_quant_hooks.fsdp import quantize_reduce_scatter
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import grad_bucket, run_ranks, same_on_all_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def _wire(dtype):
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _total(parts):
    """Return the sum of tensors in fp32, one after another."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def _mean(inputs, hosts="", *, inside="full"):
    """Return the mean of all ranks' values, of which each is rounded once; before averages are sent.

    Hosts sum theirs in fp32, and round the sum (``"full"``); or round values, too (``"quantized"``).
    """
    wire, hosts = _wire(inputs[0].dtype), hosts or [*range(len(inputs))]
    shares = []
    for host in sorted(set(hosts)):
        own = [values for values, name in zip(inputs, hosts, strict=True) if name == host]
        if len(own) == 1 or inside == "quantized":
            own = [values.to(wire) for values in own]
        shares.append((_total(own) / len(own)).to(wire))
    return _total(shares) / len(shares)


def _inputs(length, dtype):
    """Return the values of all ranks, with numbers of very different size."""
    found = []
    for peer in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(100 * length + peer)
        size = torch.randint(-12, 8, (length,), generator=generator).float().exp2()
        found.append((torch.randn(length, generator=generator) * size).to(dtype))
    return found


def _tensors(rank, hosts):
    named = take_host_name(hosts[rank])
    many = len(set(hosts)) < len(hosts)
    if many and not named:
        return False
    for inside in ("full", "quantized", "flat") if many else ("auto",):
        state = QuantizedAllreduceState(bits=16, min_bytes=0, intra_node=inside)
        where = hosts if inside in ("full", "quantized") else ""
        for length, dtype in itertools.product((5, 4_000, 700_001), DTYPES):
            inputs = _inputs(length, dtype)
            mean = _mean(inputs, where, inside=inside)
            shards = torch.cat([inputs[rank].roll(peer) for peer in range(len(hosts))])
            found = torch.empty(length, dtype=dtype)
            for op, expected in ((AVG, mean.to(dtype)), (SUM, mean.to(dtype) * len(hosts))):
                reduce_scatter_tensor(found, shards, op, state)
                assert_same([found], [expected.roll(rank)], (inside, length, dtype, op))
            values = inputs[rank].clone()
            all_reduce(values, AVG, state)
            once = len(hosts) == 2 or (many and inside == "full")  # one shot: both decode both messages
            everyone = mean if once else mean.to(_wire(dtype))
            assert_same([values], [everyone.to(dtype)], (inside, length, dtype))
        _special(rank, state, len(hosts))
        assert state.statistics.plain_buckets == 0
    return True


def _special(rank, state, world_size):
    """Each NaN and each infinity stays alone, as in a complex number; the largest numbers stay finite."""
    for dtype in DTYPES:
        largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
        values = torch.tensor([1.0, torch.inf, largest, -largest, smallest, 0.0, 2.0, torch.nan], dtype=dtype)
        if rank:
            values[[1, 7]] = 1.0
        all_reduce(values, AVG, state)
        assert same_on_all_ranks(values)
        assert values[[0, 5, 6]].tolist() == [1.0, 0.0, 2.0]
        assert values[1] == torch.inf
        assert values[7].isnan()
        assert values[2] == -values[3]
        assert values[2].isfinite()
        assert values[2].double() >= 0.99 * largest
        assert 0 <= values[4] <= 1.01 * smallest
    numbers = torch.tensor([complex(torch.inf, 1.0), complex(2.0, -torch.inf), 2.0 + 1.0j])
    for op, factor in ((AVG, 1), (SUM, world_size)):
        found = numbers.clone()
        all_reduce(found, op, state)
        assert torch.equal(torch.view_as_real(found), torch.view_as_real(numbers) * factor)
    plain = QuantizedAllreduceState(bits=16)
    bucket = grad_bucket([torch.zeros(2 * len(numbers))])  # not complex: DDP on Gloo takes none in torch 2.6
    bucket.set_buffer(numbers.clone())
    assert quantized_allreduce_hook(plain, bucket).wait().tolist() == numbers.tolist()
    assert plain.statistics.plain_buckets == 1
    sent = state.statistics.bytes_sent
    shard = torch.empty(1 << 15)
    reduce_scatter_tensor(shard, torch.ones(world_size << 15), AVG, state)
    assert state.statistics.bytes_sent - sent <= 4 * (world_size - 1) << 15
    assert torch.equal(shard, torch.ones_like(shard))


@pytest.mark.parametrize("hosts", ["01", "0123", "0011", pytest.param("012", marks=pytest.mark.exhaustive)])
def test_each_value_is_rounded_once_and_summed_in_the_order_of_ranks(hosts):
    found = run_ranks(_tensors, len(hosts), hosts, timeout=200)
    if not any(found):
        pytest.skip("this user cannot give a process a host name of its own")


POLICIES = {
    "fp32": (torch.float32, {}),
    "bf16, reduced in fp32": (
        torch.bfloat16,
        {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "bf16": (  # without ``reduce_dtype`` torch 2.15 reduces in the parameters' own dtype
        torch.bfloat16,
        {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    ),
}


def _own_gradients(dtype, rank):
    """Return the gradients that a rank computes of its batch, before they are reduced."""
    net = Net().to(dtype)
    generator = torch.Generator().manual_seed(rank)
    net(torch.randn(4, 37, generator=generator).to(dtype)).square().mean().backward()
    return [parameter.grad for parameter in net.parameters()]


def _sharded(rank, hosts):
    named = take_host_name(hosts[rank])
    if len(set(hosts)) < len(hosts) and not named:
        return False
    mesh = init_device_mesh("cpu", (len(hosts),))
    for name, (dtype, options) in POLICIES.items():
        net = sharded(mesh, **options)
        state = QuantizedAllreduceState(bits=16, min_bytes=0)
        quantize_reduce_scatter(net, state)
        net(batch(0)).square().mean().backward()
        every = [_own_gradients(dtype, peer) for peer in range(len(hosts))]
        where = hosts if len(set(hosts)) < len(hosts) else ""
        reduced = torch.float32 if "fp32" in name else dtype
        for parameter, own in zip(net.parameters(), zip(*every, strict=True), strict=True):
            mean = _mean([one.to(reduced) for one in own], where)
            expected = mean.to(reduced).float()
            assert_same([parameter.grad.full_tensor().float()], [expected], name)
        assert (state.statistics.quantized_buckets, state.statistics.plain_buckets) == (4, 0)
    return True


@needs_hooks
@pytest.mark.parametrize("hosts", ["01", "0011", pytest.param("0123", marks=pytest.mark.exhaustive)])
def test_gradients_of_fsdp_have_the_bits_of_the_formula(hosts):
    found = run_ranks(_sharded, len(hosts), hosts, timeout=200)
    if not any(found):
        pytest.skip("this user cannot give a process a host name of its own")


def _hook_and_options(_):
    caller = Buckets(bits=16)
    own = caller.values(3)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert_same([caller.mean(3)], [_mean(every)], "DDP's buckets")
    with pytest.raises(ValueError, match=r"levels=\(2, 2\) do not work"):
        quantize_reduce_scatter(
            fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,))),
            QuantizedAllreduceState(bits=16, levels=(2, 2)),
        )
    net = sharded(init_device_mesh("cpu", (2,)))
    state = QuantizedAllreduceState(bits=16 if dist.get_rank() else 8, min_bytes=0)
    quantize_reduce_scatter(net, state)
    with pytest.raises(RuntimeError, match="bits is 8 on rank 0, 16 on rank 1"):
        backward(net, 0)


@needs_hooks
def test_the_hook_has_the_same_bits_and_other_ranks_options_are_told():
    run_ranks(_hook_and_options, 2, timeout=100)


@pytest.mark.parametrize(
    "options",
    [
        {"gather": "fp16"},
        {"block_size": 128},
        {"rotate": True},
        {"error_feedback": "both"},
        {"error_feedback": "shard"},
    ],
)
def test_what_16_bits_do_not_have_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}=.* does not work with bits=16"):
        QuantizedAllreduceState(bits=16, **options)
    QuantizedAllreduceState(bits=16, rotate=False, error_feedback="none")


@pytest.mark.filterwarnings("ignore:a QuantizedAllreduceState pickles its options only")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_copied_and_pickled_states_have_the_same_options(bits):
    state = QuantizedAllreduceState(bits=bits, min_bytes=5, sample_every=3, levels=(2, 3))
    for made in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert made.options == state.options


def test_kernels_refuse_what_has_no_meaning():
    values, layout = torch.ones(64), Layout("bfloat16", 32)
    message = torch.empty(layout.message_bytes(64), dtype=torch.uint8)
    residual = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16 has no residuals"):
        kernels.encode(values, message, layout, residual=residual)
    kernels.encode(values, message, layout)
    assert not kernels.not_finite([message], [64], layout)
    with pytest.raises(ValueError, match="bfloat16 cannot become int8"):
        kernels.reduce([message], layout, 64, torch.empty(80, dtype=torch.uint8), Layout("int8", 32))
    kernels.encode(torch.full((64,), torch.inf), message, layout)
    assert kernels.not_finite([message], [64], layout)
    kernels.encode(torch.tensor([]), message[:0], layout)
    assert local(message).numel() == 128
    with pytest.raises(ValueError, match="rotate needs a format of integers, got 'float16'"):
        Layout("float16", 32, rotate=True)
