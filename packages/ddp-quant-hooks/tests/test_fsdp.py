"""FSDP2 in few bits: the results of native FSDP and HSDP, to the precision of the bits."""

import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    EXACT,
    Halves,
    Net,
    backward,
    batch,
    gradients,
    needs_hooks,
    nodes_and_shards,
    parameters,
    sharded,
    state_between,
    train,
)
from quant_buckets import assert_same, differences
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils.testing import patience, run_ranks, same_on_all_ranks

pytestmark = needs_hooks
HALF_STEPS = {8: 1 / 254, 4: 1 / 14}
"""As a fraction of a block's largest magnitude: values become integers up to 127 or 7."""

BF16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
SHARDING = {
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    "a layer twice": {"twice": True},
    "two layers in the root": {"cut": (0, 1)},
}


def _hooked(mesh, state=None, **options):
    """Return a model that is sharded over a node, with its hooks."""
    net = sharded(mesh["shard"], **options)
    quantize_all_reduce(net, state or state_between(mesh))
    return net


def _same_as_native_hsdp(_):
    """Return the cases that differ."""
    mesh, different = nodes_and_shards(), []
    for name, options in SHARDING.items():
        state, accumulate = state_between(mesh, min_bytes=EXACT), name in {"resharded", "bf16"}
        ours = train(_hooked(mesh, state, **options), 3, accumulate=accumulate)
        native = train(sharded(mesh, **options), 3, accumulate=accumulate)
        assert state.statistics.plain_buckets > 0
        if found := differences(native, ours):
            different.append((name, found))
    return different


def test_full_precision_is_native_hsdp_bit_by_bit():
    assert run_ranks(_same_as_native_hsdp, 4, timeout=200) == [[]] * 4


def _after_removal(_):
    mesh = nodes_and_shards()
    state = state_between(mesh, min_bytes=EXACT)
    net = sharded(mesh["shard"])
    handle = quantize_all_reduce(net, state)
    handle.remove()
    handle.remove()
    backward(net, 0)
    own = sharded(mesh["shard"])
    backward(own, 0)
    assert_same(gradients(own), gradients(net))
    assert state.statistics.plain_buckets == 0
    again = quantize_all_reduce(net, state)
    net.zero_grad()
    backward(net, 0)
    return state.statistics.plain_buckets == len(again.keys) == 4


def _memory_is_given_back(_):
    """Only a parameter keeps its gradient alive, once the threads that averaged it have released it."""
    net = _hooked(nodes_and_shards())
    backward(net, 0)
    memory = [StorageWeakRef(parameter.grad.to_local().untyped_storage()) for parameter in net.parameters()]
    net.zero_grad()
    deadline = time.monotonic() + patience(2.0)
    while not (given_back := all(storage.expired() for storage in memory)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return given_back


def _rounded_in_another_order(_):
    """A divide factor, and FSDP's divisions before and after a sum in fp16, come at another place."""
    mesh = nodes_and_shards()
    half = {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float16)}
    # With a factor one rounding of each sum and quotient. In fp16 both round a sum once, to 11 bits; near
    # zero also both halves, to multiples of 2**-24.
    cases = ({}, 3.0, 4 * 2.0**-23, 1e-7), (half, None, 2.0**-10, 3 * 2.0**-25)
    for options, factor, rtol, atol in cases:
        nets = [sharded(mesh, **options), _hooked(mesh, state_between(mesh, min_bytes=EXACT), **options)]
        for net in nets:
            for module in net.modules() if factor else ():
                if isinstance(module, fsdp.FSDPModule):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # Gloo has no other operation for it
            backward(net, 0)
        native, ours = map(gradients, nets)
        torch.testing.assert_close(ours, native, rtol=rtol, atol=atol)


def _pair(mesh, *, grouped=False, compiled=False, frozen=False, ignored=False):
    """Return a model on the mesh for HSDP, and one that is sharded over a node and has hooks."""
    nets = []
    for one in (mesh, mesh["shard"]):
        net = Net()
        if frozen:
            net.layers[0].bias.requires_grad_(False)
            net.layers[1].requires_grad_(False)
        if compiled:
            for layer in net.layers:
                layer.compile(backend="aot_eager")
        if ignored:
            net.scale.requires_grad_(False)
        for unit in [[net.layers[0], net.layers[1]], net.layers[2]] if grouped else net.layers:
            fsdp.fully_shard(unit, mesh=one)
        nets.append(net if ignored else fsdp.fully_shard(net, mesh=one))
    quantize_all_reduce(nets[1], state_between(mesh, min_bytes=EXACT))
    return nets


def _stepped_in_backward(net):
    """A hook that takes a gradient as soon as it is accumulated gets the mean."""
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in net.parameters()
    }

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        backward(net, number)
    return parameters(net)


def _trained(net):
    required = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return train(net, 3, optimizer=torch.optim.SGD(required, lr=0.1))


def _companions(_):
    mesh = nodes_and_shards()
    for options, run in [
        ({"grouped": True}, _trained),
        ({"compiled": True}, _trained),
        ({"frozen": True}, _trained),
        ({"ignored": True}, _trained),
        ({}, _stepped_in_backward),
    ]:
        assert_same(*map(run, _pair(mesh, **options)), (options, run))


def _tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "shard", "tensor"))
    nets = [Halves(mesh, mesh["node", "shard"]), Halves(mesh, mesh["shard"])]
    quantize_all_reduce(nets[1], QuantizedAllreduceState(mesh["node"], min_bytes=EXACT))
    generator = torch.Generator().manual_seed(rank // 2)  # a batch for each node
    x = torch.randn(4, 37, generator=generator)
    for net in nets:
        net(x).square().mean().backward()
    assert_same(*map(gradients, nets))


def _small_checks(rank):
    for check in (_rounded_in_another_order, _companions, _tensor_parallel):
        check(rank)
    return _after_removal(rank), _memory_is_given_back(rank)


def test_other_options_and_companions_have_the_results_of_native_hsdp():
    assert run_ranks(_small_checks, 4, timeout=200) == [(True, True)] * 4


def _mean_of(largest, group=None):
    """Return the mean over ranks of their largest magnitudes."""
    dist.all_reduce(largest, group=group)
    return largest / dist.get_world_size(group)


def _largest_error(net, native):
    pairs = zip(gradients(net), gradients(native), strict=True)
    return max((ours - exact).abs().max() for ours, exact in pairs if ours.numel())


def _largest(net):
    return max(gradient.abs().max() for gradient in gradients(net))


def _few_bits(_):
    """A rank's value is off by half a step of its block, so a mean by the mean of them.

    A gradient shares blocks with those of its module, so a block's largest magnitude is the module's at most.
    """
    mesh, ratios = nodes_and_shards(), {}
    between = mesh["node"].get_group()
    for name, options in SHARDING.items():
        # Sums and means in bf16 are rounded to 8 bits, ours and native ones.
        rounding = 2**-7 if name == "bf16" else 1e-6
        native, node = sharded(mesh, **options), sharded(mesh["shard"], **options)
        backward(native, 0)
        backward(node, 0)
        bound = _mean_of(_largest(node), between)
        for bits, half_step in HALF_STEPS.items():
            state = state_between(mesh, bits=bits)
            net = _hooked(mesh, state, **options)
            backward(net, 0)
            assert same_on_all_ranks(gradients(net), between)
            assert 0 < _largest_error(net, native) <= (half_step + rounding) * bound, (name, bits)
            assert state.statistics.plain_buckets == 0
            ratios[bits] = state.statistics.bytes_ratio
    return ratios


def _scatter_in_few_bits():
    """Each rank's values are off by half a step of their blocks, the mean by the mean of them."""
    mesh, ratios = init_device_mesh("cpu", (4,)), {}
    native = sharded(mesh)
    backward(native, 0)
    # A rank's own gradients, before anything is reduced: those of an unsharded model.
    own = Net()
    backward(own, 0)
    bound = _mean_of(_largest(own))
    for bits, half_step in HALF_STEPS.items():
        state, net = QuantizedAllreduceState(bits=bits, min_bytes=0), sharded(mesh)
        quantize_reduce_scatter(net, state)
        backward(net, 0)
        # The factor covers roundings in fp32.
        assert 0 < _largest_error(net, native) <= half_step * bound * (1 + 1e-5), bits
        ratios[bits] = state.statistics.bytes_ratio
    return ratios


def _scatter_in_full_precision():
    """Sums of two ranks, and over the shards of a mesh for HSDP: the bits of FSDP itself."""
    hsdp, bf16 = nodes_and_shards(), fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for mesh, options in (
        (hsdp, {}),
        (hsdp["shard"], {"reshard_after_forward": False}),
        (hsdp, {"mp_policy": bf16}),
    ):
        state = QuantizedAllreduceState(mesh["shard"] if mesh.ndim == 2 else mesh, min_bytes=EXACT)
        net, native = sharded(mesh, **options), sharded(mesh, **options)
        handle = quantize_reduce_scatter(net, state)
        assert_same(train(net, 2), train(native, 2))
        handle.remove()
        assert_same(train(net, 1), train(native, 1))
        assert state.statistics.plain_buckets == 8


def _scatter_with_a_factor():
    mesh = nodes_and_shards()["shard"]
    net = sharded(mesh)
    quantize_reduce_scatter(net, QuantizedAllreduceState(mesh, min_bytes=0))
    for module in net.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match=r"'layers\.2': FSDP asks for neither sum nor mean"):
        backward(net, 0)


def _averages_and_scatters(rank):
    _scatter_with_a_factor()
    _scatter_in_full_precision()
    return _few_bits(rank), _scatter_in_few_bits()


def test_8_and_4_bits_stay_within_half_a_step():
    for both in run_ranks(_averages_and_scatters, 4, timeout=200):
        for ratios in both:
            assert 0.25 < ratios[8] < 0.3
            assert 0.14 < ratios[4] < 0.2


def _replicas(_):
    """One rank in each node: data parallelism as in DistributedDataParallel, through FSDP2."""
    mesh = nodes_and_shards(1)
    ddp = torch.nn.parallel.DistributedDataParallel(Net().to(mesh.device_type))
    exact = _hooked(mesh, state_between(mesh, min_bytes=EXACT))
    first, second = _hooked(mesh), _hooked(mesh, state_between(mesh, bits=4))
    for net in (ddp, exact):
        backward(net, 0)
    sum(net(batch(0)).square().mean() for net in (first, second)).backward()
    assert_same([parameter.grad for parameter in ddp.parameters()], gradients(exact))
    assert same_on_all_ranks([gradients(first), gradients(second)], mesh["node"])
    return [_largest_error(net, exact) for net in (first, second)]


def test_a_mesh_of_one_rank_is_data_parallelism_and_two_models_share_a_backward():
    for eight, four in run_ranks(_replicas, 2, timeout=100):
        assert 0 < eight < four
