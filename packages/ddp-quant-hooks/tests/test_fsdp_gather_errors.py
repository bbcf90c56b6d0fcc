"""Gathers in few bits that cannot be: refused on every rank; and peers that die, stop or fail."""

import gc
import logging
import os
import time
import weakref
from unittest import mock

import pytest
import torch
from averaging_callers import spoiled_kernel
from fsdp_models import (
    BF16,
    Halves,
    Net,
    backward,
    batch,
    needs_custom_gathers,
    needs_reset,
    nodes_and_shards,
    shard_layers,
    sharded,
    watched_layers,
    whole,
    with_weights,
)
from host_names import take_host_name
from quant_buckets import assert_same
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import kernels
from ddp_quant_hooks.fsdp import quantize_all_gather
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks, same_on_all_ranks
from dist_utils.torch_compat import MissingTorchFeatureError

HAS_CUSTOM_GATHERS = hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather")


def _refused(error, match, model, **options):
    with pytest.raises(error, match=match):
        quantize_all_gather(model, **options)


def _options(_):
    net = sharded(init_device_mesh("cpu", (2,)))
    for error, match, options in (
        (ValueError, "bits=4 is not for weights: it cost loss in every fine-tuning run", {"bits": 4}),
        (ValueError, "bits must be 8, or 4 with differences=True, got 16", {"bits": 16}),
        (ValueError, "block_size must be one of", {"block_size": 100}),
        (TypeError, "block_size must be an int", {"block_size": 128.0}),
        (TypeError, "rotate must be True or False, got None", {"rotate": None}),
        (TypeError, "exact_1d must be True or False, got 1", {"exact_1d": 1}),
        (TypeError, "min_bytes must be an integer, got True", {"min_bytes": True}),
        (ValueError, "min_bytes must be at least 0, got -1", {"min_bytes": -1}),
        (ValueError, "intra_node='full' would send the same weights in more bytes", {"intra_node": "full"}),
        (ValueError, "intra_node must be 'auto', 'quantized' or 'flat', got 'fast'", {"intra_node": "fast"}),
        (TypeError, "keep_for_backward must be True or False, got 'no'", {"keep_for_backward": "no"}),
    ):
        _refused(error, f"^quantize_all_gather: {match}", net, **options)
    _refused(TypeError, "model must be a module, got list", [net])
    _refused(ValueError, "applied neither to the model", Net())


class OwnGather(torch.Tensor):
    """A parameter that says itself what is gathered."""

    def fsdp_pre_all_gather(self, *_):
        return (self,), None

    def fsdp_post_all_gather(self, outputs, *_, out=None):
        return None if out is not None else (outputs[0], outputs)


class Other:
    """An all-gather of the user's own."""

    allocate = staticmethod(torch.empty)

    def __call__(self, **_):
        raise AssertionError


def _modules(_):
    mesh = init_device_mesh("cpu", (2,))
    net = sharded(mesh)
    net.layers[1].set_custom_all_gather(Other())
    _refused(ValueError, r"'layers\.1' has an all-gather of its own, a Other", net)
    net = sharded(mesh)
    handle = quantize_all_gather(net)
    _refused(ValueError, "is gathered in few bits: remove\\(\\) the other handle", net)
    handle.remove()
    quantize_all_gather(net).remove()
    layer = torch.nn.Linear(8, 8)
    fsdp.fully_shard(layer, mesh=mesh)
    layer.weight._local_tensor = layer.weight._local_tensor.as_subclass(OwnGather)
    _refused(ValueError, r"class OwnGather, which decides itself", layer)
    packed = torch.nn.Linear(8, 8)
    packed.quant_state = None  # as layers of bitsandbytes have it
    fsdp.fully_shard(packed, mesh=mesh)
    _refused(ValueError, r"packed into other values \(quant_state\), which rounding would spoil", packed)


def _shapes_and_ranks(rank):
    """What only one rank does wrong is an error on both."""
    mesh = init_device_mesh("cpu", (2,))
    _refused(AgreementError, "min_bytes is 0 on rank 0, 7 on rank 1", sharded(mesh), min_bytes=7 * rank)
    four = r"rank 1 cannot go on: .*bits=4" if rank == 0 else "^quantize_all_gather: bits=4"
    _refused(AgreementError if rank == 0 else ValueError, four, sharded(mesh), bits=4 if rank else 8)
    layer = torch.nn.Linear(*((20, 30) if rank else (30, 20)), bias=False)
    _refused(AgreementError, r"module '\(model\)' is", fsdp.fully_shard(layer, mesh=mesh))
    policy = BF16 if rank else fsdp.MixedPrecisionPolicy()
    _refused(AgreementError, r"float32.* on rank 0, .*bfloat16.* on rank 1", sharded(mesh, mp_policy=policy))
    missing = "applied neither to the model"
    if rank:
        _refused(ValueError, missing, Net())
    else:
        _refused(AgreementError, f"rank 1 cannot go on: .*{missing}", sharded(mesh))


def _sharded_too_late(_):
    mesh, net = init_device_mesh("cpu", (2,)), Net()
    fsdp.fully_shard(net.layers[2], mesh=mesh)
    quantize_all_gather(net, min_bytes=0)
    fsdp.fully_shard(net, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"applied to \['\(model\)'\] after quantize_all_gather"):
        backward(net, 0)
    net = Net()
    fsdp.fully_shard(net.layers[2], mesh=mesh)
    quantize_all_gather(net, min_bytes=0)
    net.layers[2].unshard()
    net.layers[2].reshard()
    fsdp.fully_shard(net, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"applied to \['\(model\)'\] after quantize_all_gather"):
        backward(net, 0)


def _nothing_is_silently_exact(rank):
    """A warning if no module is quantized, and a line in the log for each that is not."""
    mesh, lines = init_device_mesh("cpu", (2,)), []
    with pytest.warns(UserWarning, match=r"all modules in full precision: .*'layers\.0': 'it has \d+ bytes"):
        quantize_all_gather(sharded(mesh), min_bytes=1 << 30)
    logger, handler = logging.getLogger("ddp_quant_hooks"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    net = sharded(mesh)
    quantize_all_gather(net, min_bytes=0)
    for step in range(2):
        backward(net, step)
    logger.removeHandler(handler)
    assert lines == (
        []
        if rank
        else [
            "quantize_all_gather: 2 ranks on 1 host(s) gather parameters in 8 bits, each from all others",
            "module '(model)' is gathered in full precision: all of its parameters have one dimension",
        ]
    )


def _two_ranks(rank):
    for check in (_options, _modules, _shapes_and_ranks, _sharded_too_late, _nothing_is_silently_exact):
        check(rank)


@needs_custom_gathers
def test_what_cannot_be_is_refused_on_every_rank():
    run_ranks(_two_ranks, 2, timeout=120)


def _groups(rank):
    """A problem of one rank is told to all of its groups, and to no others."""
    mesh = nodes_and_shards()
    net = Net()
    fsdp.fully_shard(net.layers[0], mesh=mesh["shard"])
    fsdp.fully_shard(net.layers[1], mesh=mesh["node"])
    fsdp.fully_shard(net, mesh=mesh["shard"])
    if rank == 0:
        _refused(ValueError, "bits=4", net, bits=4)
    elif rank == 3:
        handle = None
        with pytest.raises(AgreementError):
            handle = quantize_all_gather(net)
        assert handle is None
    else:
        _refused(AgreementError, "rank 0 cannot go on: .*bits=4", net)


def _agreed_before(rank):
    """What only a later group finds is an error on all ranks, in groups that had agreed, too."""
    mesh, net = nodes_and_shards(), Net()
    fsdp.fully_shard(net.layers[0], mesh=mesh["shard"])
    policy = BF16 if rank == 2 else fsdp.MixedPrecisionPolicy()
    fsdp.fully_shard(net.layers[1], mesh=mesh["node"], mp_policy=policy)
    _refused(AgreementError, r"float32.* on rank 0, .*bfloat16.* on rank 2", net)


def _compare_options(rank, net, other_half):
    """Options that differ between halves of the ranks, and a problem of one rank, are errors on all ranks."""
    _refused(AgreementError, r"min_bytes is 0 on rank \d, 7 on rank \d", net, min_bytes=7 * other_half)
    if rank == 0:
        _refused(ValueError, "bits=4", net, bits=4)
    else:
        _refused(AgreementError, r"rank \d cannot go on: .*bits=4", net)
    quantize_all_gather(net, min_bytes=0)


def _replicas(rank):
    """Replicas have the same options, and hear of a problem of another one."""
    _compare_options(rank, sharded(nodes_and_shards()), rank // 2)


def _tensor_parallelism(rank):
    """Ranks that hold other parts of the same tensors have the same options, and hear of a problem, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    _compare_options(rank, Halves(mesh, mesh["shard"]), rank % 2)


def _several_groups(rank):
    for check in (_groups, _agreed_before, _replicas, _tensor_parallelism):
        check(rank)


def _no_old_torch(_):
    with pytest.raises(MissingTorchFeatureError, match="set_custom_all_gather, which is needed for quantize"):
        quantize_all_gather(fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,))))


@pytest.mark.skipif(HAS_CUSTOM_GATHERS, reason="this torch has FSDPModule.set_custom_all_gather")
def test_an_older_torch_is_told():
    run_ranks(_no_old_torch, 1, timeout=60)


CALLERS = pytest.mark.parametrize("options", [{}, {"differences": True}], ids=["8 bits", "differences"])


def _three_layers(ranks, options):
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (ranks,)))
    handle = quantize_all_gather(net, min_bytes=0, **options)
    backward(net, 0)
    return net, handle


def _several_passes(net):
    for step in range(3):
        backward(net, step)


def _fails_and_sees_no_wrong_weights(net, exact):
    """Run passes until one fails: until then all weights that are seen are near the exact ones."""
    for layer in net:
        layer.seen["forward"].clear()
    with pytest.raises(RuntimeError):
        _several_passes(net)
    for layer, weights in with_weights(net, exact):
        for seen in layer.seen["forward"]:
            torch.testing.assert_close(seen, weights, rtol=0.02, atol=0.002)


def _dies(rank, options):
    take_host_name("0011"[rank])
    net, handle = _three_layers(4, options)
    exact, before = whole(net), handle.statistics
    if rank == 2:
        net[1].register_forward_pre_hook(lambda *_: os._exit(3))
        net(torch.zeros(1, 37))
    _fails_and_sees_no_wrong_weights(net, exact)
    return (handle.statistics - before).quantized_gathers


@needs_custom_gathers
@CALLERS
def test_a_peer_that_dies_is_an_error_on_the_others(options):
    found = run_ranks(_dies, 4, options, may_die={2}, group_timeout=patience(6.0), timeout=100)
    assert found[2] is None
    assert all(count < 6 for rank, count in enumerate(found) if rank != 2), "none ends a whole pass"


def _stops(rank, how, seconds, options):
    net, _ = _three_layers(2, options)
    exact = whole(net)
    began = time.monotonic()
    if rank == 1 and how == "stops":
        time.sleep(1.5 * seconds)
        return 0.0
    if rank == 1:

        def fail():
            raise MemoryError("no room for a kernel")

        with spoiled_kernel(fail), pytest.raises(MemoryError, match="no room for a kernel"):
            backward(net, 1)
        return 0.0
    _fails_and_sees_no_wrong_weights(net, exact)
    return time.monotonic() - began


@needs_custom_gathers
@CALLERS
@pytest.mark.parametrize("how", ["stops", pytest.param("fails", marks=pytest.mark.exhaustive)])
def test_a_peer_that_stops_or_fails_is_an_error_within_the_groups_timeout(how, options):
    seconds = patience(4.0)  # once: it depends on how busy the machine is now
    waited, _ = run_ranks(_stops, 2, how, seconds, options, group_timeout=seconds, timeout=100)
    assert waited < 2 * seconds


def _all_fail(_, options):
    """After an error in a gather of all ranks they go on, with the weights that they should have."""
    net, handle = _three_layers(2, options)

    def fail():
        raise MemoryError("no room for a kernel")

    with spoiled_kernel(fail), pytest.raises(MemoryError):
        backward(net, 1)
    net.zero_grad()
    net.reset_iter_state()
    net.zero_grad()
    handle.start_over()
    exact = whole(net)
    net(batch(1).requires_grad_()).square().mean().backward()
    for layer, weights in with_weights(net, exact):
        assert_same(layer.seen["forward"][-1], layer.seen["backward"][-1])
        assert same_on_all_ranks(layer.seen["forward"][-1])
        torch.testing.assert_close(layer.seen["forward"][-1], weights, rtol=0.02, atol=0.002)


@needs_custom_gathers
@needs_reset
@CALLERS
def test_ranks_go_on_after_an_error_of_all_of_them(options):
    run_ranks(_all_fail, 2, options, timeout=60)


def _asynchronous(rank, options):
    """After an error in what an asynchronous gather waits for, weights are NaN until the module is reset."""
    net, handle = _three_layers(2, options)
    unsharding = net[0].unshard(async_op=True)
    with mock.patch.object(kernels, "decode_shards", side_effect=MemoryError), pytest.raises(MemoryError):
        unsharding.wait()
    with torch.no_grad():
        assert net[0](batch(1)).isnan().all()
    assert all(weights.isnan().all() for weights in net[0].seen["forward"][-1])
    if hasattr(net, "reset_iter_state"):
        net.reset_iter_state()
        handle.start_over()
        backward(net, 1)
        assert same_on_all_ranks(net[0].seen["forward"][-1])
        assert not any(weights.isnan().any() for weights in net[0].seen["forward"][-1])


@needs_custom_gathers
@CALLERS
def test_after_an_error_of_an_asynchronous_gather_weights_are_nan(options):
    run_ranks(_asynchronous, 2, options, timeout=60)


def _raises_alone(rank):
    """One rank raises in forward, all leave out the batch, and then gather before their forward pass."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
    handle = quantize_all_gather(net, min_bytes=0, keep_for_backward=True)
    if rank == 0:
        failing = mock.patch.object(net[2], "_note", side_effect=ZeroDivisionError)
        with failing, pytest.raises(ZeroDivisionError):
            net(batch(0).requires_grad_())
    else:
        net(batch(0).requires_grad_())
    net.zero_grad()
    net.reset_iter_state()
    before = handle.statistics
    for layer in net:
        layer.unshard(async_op=True)
    net(batch(1).requires_grad_()).square().mean().backward()
    assert (handle.statistics - before).reused_gathers == 0, "nothing is kept outside of a forward pass"
    for layer in net:
        assert_same(layer.seen["forward"][-1], layer.seen["backward"][-1])


@needs_custom_gathers
@needs_reset
def test_a_rank_that_raised_alone_in_forward_gathers_as_the_others_do():
    run_ranks(_raises_alone, 2, timeout=60, group_timeout=patience(10.0))


def _other_order(rank, options):
    """Gather two modules of one size, on each rank another one first; return how long it waits."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
    quantize_all_gather(net, min_bytes=0, **options)
    for layer in net:
        layer.unshard()
        layer.reshard()
    with pytest.raises(RuntimeError):
        net[rank].unshard()


def _other_model(rank, options):
    """Gather a module of another model on each rank; they have equal names and sizes."""
    mesh = init_device_mesh("cpu", (2,))
    nets = [shard_layers(watched_layers(), mesh) for _ in range(2)]
    for net in nets:
        quantize_all_gather(net, min_bytes=0, **options)
        net[0].unshard()
        net[0].reshard()
    with pytest.raises(RuntimeError):
        nets[rank][0].unshard()


@needs_custom_gathers
@CALLERS
@pytest.mark.parametrize("other", [_other_order, _other_model])
def test_ranks_that_gather_other_modules_take_none_for_another(other, options):
    run_ranks(other, 2, options, group_timeout=patience(4.0), timeout=100)


def _dropped(rank, options):
    """A model that is dropped while its messages come in leaves the connections as they were."""
    for turn in range(3):
        net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
        quantize_all_gather(net, min_bytes=0, **options)
        backward(net, turn)
        assert same_on_all_ranks(net[0].seen["forward"][-1])
        if rank == turn:
            time.sleep(0.3)
        net[0].unshard(async_op=True)
        dropped = weakref.ref(net)
        del net
        gc.collect()
        assert dropped() is None


@needs_custom_gathers
@CALLERS
def test_a_model_that_is_dropped_while_it_gathers_is_no_trouble_to_the_next(options):
    run_ranks(_dropped, 2, options, group_timeout=patience(6.0), timeout=100)


@needs_custom_gathers
def test_a_problem_is_told_in_all_groups_of_a_rank():
    run_ranks(_several_groups, 4, timeout=100)
