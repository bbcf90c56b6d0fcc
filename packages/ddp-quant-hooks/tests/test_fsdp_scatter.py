"""FSDP2's reduce-scatter of gradients in few bits."""

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    EXACT,
    all_equal,
    backward,
    gradients,
    needs_hooks,
    nodes_and_shards,
    parameters,
    sharded,
    train,
)
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_reduce_scatter
from dist_utils.testing import run_ranks

pytestmark = needs_hooks


def _largest_sum(bound):
    dist.all_reduce(bound)
    return bound / dist.get_world_size()


def _few_bits(_):
    """Each rank's values are off by half a step of their blocks, the mean by the mean of them."""
    mesh = init_device_mesh("cpu", (4,))
    native = sharded(mesh)
    backward(native, 0)
    # A rank's own gradients, before anything is reduced: those of an unsharded model.
    own = sharded(init_device_mesh("cpu", (4, 1), mesh_dim_names=("alone", "one"))["one"])
    backward(own, 0)
    bound = _largest_sum(max(gradient.abs().max() for gradient in gradients(own)))
    shares = {}
    for bits, half_step in ((8, 1 / 254), (4, 1 / 14)):
        state = QuantizedAllreduceState(bits=bits, min_bytes=0)
        net = sharded(mesh)
        quantize_reduce_scatter(net, state)
        backward(net, 0)
        errors = [
            (ours - exact).abs().max()
            for ours, exact in zip(gradients(net), gradients(native), strict=True)
            if ours.numel()
        ]
        assert 0 < max(errors) <= half_step * bound * (1 + 1e-5)  # the factor covers roundings in fp32
        shares[bits] = state.statistics.bytes_sent / state.statistics.bytes_of_allreduce
    return shares


def _full_precision(_):
    """Sums of two ranks, and over the shards of a mesh for HSDP: the bits of FSDP itself."""
    results = []
    for mesh, options in (
        (nodes_and_shards(), {}),
        (nodes_and_shards()["shard"], {"reshard_after_forward": False}),
        (nodes_and_shards(), {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
    ):
        shards = mesh["shard"] if mesh.ndim == 2 else mesh
        state = QuantizedAllreduceState(shards, min_bytes=EXACT)
        net = sharded(mesh, **options)
        handle = quantize_reduce_scatter(net, state)
        ours = train(net, 2)
        plain = state.statistics.plain_buckets
        handle.remove()
        native = sharded(mesh, **options)
        same = all_equal(ours, train(native, 2))
        again = all_equal(train(net, 1), train(native, 1)) and all_equal(parameters(net), parameters(native))
        results.append((same, again, plain == state.statistics.plain_buckets == 8))
    return results


def _factor(_):
    mesh = nodes_and_shards()["shard"]
    state = QuantizedAllreduceState(mesh, min_bytes=0)
    net = sharded(mesh)
    quantize_reduce_scatter(net, state)
    for module in net.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match=r"'layers\.2': FSDP asks for neither sum nor mean"):
        backward(net, 0)


def _all_of_them(rank):
    _factor(rank)
    return _few_bits(rank), _full_precision(rank)


def test_gradients_are_those_of_fsdp_to_the_precision_of_the_bits():
    for shares, exact in run_ranks(_all_of_them, 4, timeout=150):
        assert shares[8] < 0.3
        assert shares[4] < 0.2
        assert exact == [(True, True, True)] * 3
