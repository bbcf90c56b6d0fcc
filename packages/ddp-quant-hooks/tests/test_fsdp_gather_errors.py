"""Gathers in few bits that cannot be: refused on every rank; and peers that die, stop or fail."""

import contextlib
import gc
import logging
import os
import time
import weakref
from unittest import mock

import pytest
import torch
from fsdp_models import (
    BF16,
    Halves,
    Net,
    backward,
    batch,
    local,
    needs_custom_gathers,
    nodes_and_shards,
    shard_layers,
    sharded,
    train,
    watched_layers,
    whole,
    with_weights,
)
from gathered_weights import WAYS, assert_right_weights, gather_in_few_bits, run_passes
from host_names import take_host_name
from quant_buckets import assert_same
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import kernels
from ddp_quant_hooks.fsdp import differences, quantize_all_gather
from dist_utils import AgreementError, start_messages
from dist_utils.testing import patience, run_ranks, same_on_all_ranks
from dist_utils.torch_compat import MissingTorchFeatureError

DIFFERENCES = WAYS["differences"]
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
        (ValueError, "bits=8 does not work with differences", {"bits": 8, **DIFFERENCES}),
        (
            ValueError,
            "keep_for_backward does not work with differences",
            {"keep_for_backward": True, **DIFFERENCES},
        ),
        (
            ValueError,
            "intra_node='quantized' does not work with differences",
            {"intra_node": "quantized", **DIFFERENCES},
        ),
        (TypeError, "differences must be True or False, got 1", {"differences": 1}),
    ):
        _refused(error, f"^quantize_all_gather: {match}", net, **options)
    quantize_all_gather(net, bits=4, **DIFFERENCES).remove()


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


def _other_ranks(rank):
    """Ranks with other options or dtypes; other modules are in test_fsdp_errors.py."""
    mesh = init_device_mesh("cpu", (2,))
    _refused(AgreementError, "min_bytes is 0 on rank 0, 7 on rank 1", sharded(mesh), min_bytes=7 * rank)
    told = "differences is False on rank 0, True on rank 1"
    _refused(AgreementError, told, sharded(mesh), differences=rank == 1, bits=None, block_size=32)
    four = r"rank 1 cannot go on: .*bits=4" if rank == 0 else "^quantize_all_gather: bits=4"
    _refused(AgreementError if rank == 0 else ValueError, four, sharded(mesh), bits=4 if rank else 8)
    policy = BF16 if rank else fsdp.MixedPrecisionPolicy()
    _refused(AgreementError, r"float32.* on rank 0, .*bfloat16.* on rank 1", sharded(mesh, mp_policy=policy))


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
    gather_in_few_bits(net)
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
    for check in (_options, _modules, _other_ranks, _nothing_is_silently_exact):
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
    gather_in_few_bits(net)


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


EACH = ({}, DIFFERENCES)
"""The options of gathers that keep nothing between them, and of those that do."""
CALLERS = pytest.mark.parametrize("options", EACH, ids=["8 bits", "differences"])


def _three_layers(ranks, options):
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (ranks,)))
    handle = gather_in_few_bits(net, **options)
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
    found = run_ranks(_dies, 4, options, may_die={2}, group_timeout=patience(3.0), timeout=100)
    assert found[2] is None
    assert all(count < 6 for rank, count in enumerate(found) if rank != 2), "none ends a whole pass"


def _has_no_room_for_a_kernel(net):
    error = MemoryError("no room for a kernel")
    with (
        mock.patch.object(kernels, "encode_shards", side_effect=error),
        pytest.raises(MemoryError, match="no room for a kernel"),
    ):
        backward(net, 1)


def _stops(rank, how, seconds, options):
    net, _ = _three_layers(2, options)
    exact = whole(net)
    began = time.monotonic()
    if rank == 1 and how == "stops":
        time.sleep(1.5 * seconds)
        return 0.0
    if rank == 1:
        _has_no_room_for_a_kernel(net)
        return 0.0
    _fails_and_sees_no_wrong_weights(net, exact)
    return time.monotonic() - began


@needs_custom_gathers
@CALLERS
@pytest.mark.parametrize("how", ["stops", pytest.param("fails", marks=pytest.mark.exhaustive)])
def test_a_peer_that_stops_or_fails_is_an_error_within_the_groups_timeout(how, options):
    seconds = patience(3.0)  # once: it depends on how busy the machine is now
    waited, _ = run_ranks(_stops, 2, how, seconds, options, group_timeout=seconds, timeout=100)
    assert waited < 2 * seconds


def _start_over(net, handle):
    net.zero_grad()
    net.reset_iter_state()
    net.zero_grad()
    handle.start_over()


def _all_fail(_, options):
    """After an error in a gather of all ranks they go on, with the weights that they should have."""
    net, handle = _three_layers(2, options)
    _has_no_room_for_a_kernel(net)
    _start_over(net, handle)
    run_passes(net, 1)
    assert_right_weights(net)


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


def _raises_alone(rank):
    """One rank raises in forward, all leave out the batch, and then gather before their forward pass."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
    handle = gather_in_few_bits(net, **WAYS["kept"])
    net[2].fails = "forward" if rank == 0 else None
    with pytest.raises(ZeroDivisionError) if rank == 0 else contextlib.nullcontext():
        net(batch(0).requires_grad_())
    net[2].fails = None
    net.zero_grad()
    net.reset_iter_state()
    before = handle.statistics
    for layer in net:
        layer.unshard(async_op=True)
    run_passes(net, 1)
    assert (handle.statistics - before).reused_gathers == 0, "nothing is kept outside of a forward pass"
    for layer in net:
        assert_same(layer.seen["forward"][-1], layer.seen["backward"][-1])


def _dropped(rank, options):
    """A model that is dropped while its messages come in leaves the connections as they were."""
    for turn in range(3):
        net = _three_layers(2, options)[0]
        assert same_on_all_ranks(net[0].seen["forward"][-1])
        if rank == turn:
            time.sleep(0.3)
        net[0].unshard(async_op=True)
        dropped = weakref.ref(net)
        del net
        gc.collect()
        assert dropped() is None


def _errors_of_two_ranks(rank):
    for options in EACH:
        _asynchronous(rank, options)
        _dropped(rank, options)
        if hasattr(fsdp.FSDPModule, "reset_iter_state"):
            _all_fail(rank, options)
    if hasattr(fsdp.FSDPModule, "reset_iter_state"):
        _raises_alone(rank)


@needs_custom_gathers
def test_after_errors_weights_are_nan_or_right_and_the_next_model_is_not_disturbed():
    run_ranks(_errors_of_two_ranks, 2, group_timeout=patience(10.0), timeout=150)


def _two_models(options):
    """Return models with equal names and sizes, of which all ranks have gathered all layers."""
    mesh = init_device_mesh("cpu", (2,))
    nets = [shard_layers(watched_layers(), mesh) for _ in range(2)]
    for net in nets:
        gather_in_few_bits(net, **options)
        for layer in net:
            layer.unshard()
            layer.reshard()
    return nets


OTHERS = {
    "layer": lambda nets, rank: nets[0][rank],
    "model": lambda nets, rank: nets[rank][2],
}
"""What each rank gathers of its own."""


def _gather_others(rank):
    """Return in how many ways a rank takes no message for another, all under way at once."""
    models = [_two_models(options) for options in EACH]
    started = [choose(nets, rank).unshard(async_op=True) for nets in models for choose in OTHERS.values()]
    for unsharding in started:
        with pytest.raises(RuntimeError):
            unsharding.wait()
    return len(started)


@needs_custom_gathers
def test_ranks_that_gather_other_modules_take_none_for_another():
    assert run_ranks(_gather_others, 2, group_timeout=patience(4.0), timeout=100) == [4, 4]


def _without_tags(rank):
    """Notes tell of other modules where a backend has no tags."""

    def start_untagged(*arguments, tag, **options):
        return start_messages(*arguments, tag=0, **options)

    nets, told = _two_models(DIFFERENCES), f"rank {1 - rank} gathers another module or model"
    for choose in OTHERS.values():
        untagged = mock.patch.object(differences, "start_messages", start_untagged)
        with untagged, pytest.raises(RuntimeError, match=told):
            choose(nets, rank).unshard()


def _see_exact_weights(net, *, passes=("forward", "backward")):
    for layer, weights in with_weights(net, whole(net)):
        for when in passes:
            assert_same(layer.seen[when][-1], weights)


def _starts_over_alone(rank, hosts):
    """A rank that forgets its copies alone is an error on all at once, before any hands on what it has."""
    take_host_name(hosts[rank])
    net, handle = _three_layers(len(hosts), DIFFERENCES)
    train(net, 2)
    if rank == 1:
        handle.start_over()
    theirs, own = (0, 3) if rank == 0 else (3, 0)
    match = {
        "00": rf"'0': {theirs} gathers have changed the copies of rank {1 - rank}, but {own} those of this",
        "0011": r"copies of rank \d, but" if rank in (1, 3) else f"copies of rank {rank + 1} on this host",
    }[hosts]
    with pytest.raises(RuntimeError, match=match):
        net(batch(0))
    handle.start_over()
    if hasattr(net, "reset_iter_state"):
        net.reset_iter_state()
        run_passes(net, 1)
        _see_exact_weights(net)


@needs_custom_gathers
def test_a_rank_that_starts_over_alone_is_told_to_all_ranks_of_hosts_and_all_can_start_over():
    run_ranks(_starts_over_alone, 4, "0011", timeout=60)


def _while_it_gathers(rank):
    """A failed asynchronous gather gives no weights when FSDP waits again; start_over() ends running ones."""
    net, handle = _three_layers(2, DIFFERENCES)
    if rank == 1:
        handle.start_over()
    with pytest.raises(RuntimeError, match="gathers have changed the copies of rank"):
        net[0].unshard(async_op=True).wait()
    net[0].unshard(async_op=True).wait()
    assert all(local(one).isnan().all() for one in net[0].parameters())
    handle.start_over()
    net[0].reshard()
    train(net, 1)
    for layer in net:
        layer.unshard(async_op=True)
    handle.start_over()
    net(batch(0))
    for parameter in net.parameters():
        parameter.detach().to_local().mul_(1.0001)
    net(batch(1))
    _see_exact_weights(net, passes=["forward"])


def _differences_of_two_ranks(rank):
    _without_tags(rank)
    _starts_over_alone(rank, "00")
    _while_it_gathers(rank)


@needs_custom_gathers
def test_copies_that_differ_and_other_modules_are_told_also_where_a_backend_has_no_tags():
    run_ranks(_differences_of_two_ranks, 2, timeout=100)


@needs_custom_gathers
def test_a_problem_is_told_in_all_groups_of_a_rank():
    run_ranks(_several_groups, 4, timeout=100)
