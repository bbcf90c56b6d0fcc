"""Wrong uses of averages in few bits under FSDP2: errors on every rank, before communication."""

import os
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, backward, needs_hooks, nodes_and_shards, sharded, state_between
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    quantized_allreduce_hook,
    sharded_averages,
)
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks, stop_process


def _refused(error, match, call, *arguments):
    with pytest.raises(error, match=match):
        call(*arguments)


def _replicated(mesh):
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    try:
        return replicate(Net(), mesh=mesh["node"])
    except TypeError:  # torch 2.9 has another name for it, and wants a mesh as for HSDP
        return replicate(Net(), device_mesh=mesh)


def _refusals(_):
    mesh = nodes_and_shards()
    one_shard = init_device_mesh("cpu", (4, 1), mesh_dim_names=("node", "shard"))
    plain = sharded(mesh["shard"])
    _refused(TypeError, "state must be a Quant.*got DeviceMesh", quantize_all_reduce, plain, mesh["node"])
    state = state_between(mesh)
    _refused(TypeError, "model must be a module, got list", quantize_all_reduce, [plain], state)
    _refused(ValueError, "applied neither to the model", quantize_all_reduce, Net(), state)
    native = sharded(mesh)
    too_late = r"'\(model\)' averages between nodes by itself.*mesh=mesh\['shard'\]"
    _refused(ValueError, too_late, quantize_all_reduce, native, state)
    whole = QuantizedAllreduceState()
    _refused(ValueError, "ranks \\[\\d\\] of the state's .* other shards", quantize_all_reduce, plain, whole)
    plain.layers[1].set_all_reduce_hook(print)
    _refused(ValueError, r"'layers\.1' has an all-reduce hook", quantize_all_reduce, plain, state)
    plain.layers[1].set_all_reduce_hook(None)
    handle = quantize_all_reduce(plain, state)
    other = sharded(mesh["shard"])
    _refused(ValueError, "state is used for a model", quantize_all_reduce, other, state)
    _refused(ValueError, "has an all-reduce hook", quantize_all_reduce, plain, state_between(mesh))
    handle.remove()
    quantize_all_reduce(other, state)
    # Gradients are averaged only from the second micro-batch on.
    other.set_requires_all_reduce(False)
    backward(other, 0)
    other.set_requires_all_reduce(True)
    other.layers[0].bias.requires_grad_(False)
    try:
        _refused(ValueError, "were reduced in a micro-batch and", backward, other, 1)
    finally:
        other.layers[0].bias.requires_grad_(True)
    # FSDP would call it with zeros.
    other = sharded(mesh["shard"])
    quantize_all_reduce(other, state_between(mesh))
    other.layers[2].bias.register_post_accumulate_grad_hook(print)
    other.set_requires_all_reduce(False)
    _refused(ValueError, "'layers.2' has a post-accumulate hook, which would get zeros", backward, other, 0)
    scatter_needs = "is sharded over ranks .* but the state's process group has"
    _refused(ValueError, scatter_needs, quantize_reduce_scatter, plain, whole)
    _refused(ValueError, scatter_needs, quantize_reduce_scatter, sharded(one_shard["shard"]), whole)


@needs_hooks
def test_wrong_models_states_and_groups_are_refused():
    run_ranks(_refusals, 4, timeout=100)


def _replicate_is_refused(_):
    replicas = _replicated(nodes_and_shards(1))
    state = state_between(nodes_and_shards(1))
    _refused(ValueError, "instead of replicate.*a mesh of one rank", quantize_all_reduce, replicas, state)
    _refused(ValueError, r"is sharded over ranks \[\d?\]", quantize_reduce_scatter, replicas, state)


@needs_hooks
def test_replicate_is_refused():
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    run_ranks(_replicate_is_refused, 2, timeout=60)


def _different_ranks(rank):
    """One rank has a different model, or no FSDP model: all ranks raise."""
    mesh = nodes_and_shards(1)
    net = sharded(mesh["shard"], cut=(rank,))
    _refused(
        AgreementError,
        r"module 'layers\.0' is not there on rank 0",
        quantize_all_reduce,
        net,
        state_between(mesh),
    )
    net = sharded(mesh["shard"]) if rank else Net()
    error = AgreementError if rank else ValueError
    _refused(error, "applied neither to the model", quantize_all_reduce, net, state_between(mesh))
    sizes = (20, 30) if rank else (30, 20)  # the same number of values in another shape
    net = fsdp.fully_shard(torch.nn.Linear(*sizes, bias=False), mesh=mesh["shard"])
    _refused(AgreementError, r"module '\(model\)' is", quantize_all_reduce, net, state_between(mesh))


def _unfit_states(_):
    """Options that FSDP does not support, a second state, and a model that is gone."""
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))
    flat_tensor = "exact_1d does not work: FSDP hands over.* one flat tensor"
    net, wide = sharded(mesh["shard"]), sharded(flat)
    _refused(ValueError, flat_tensor, quantize_all_reduce, net, state_between(mesh, exact_1d=True))
    exact_1d = QuantizedAllreduceState(exact_1d=True)
    _refused(ValueError, flat_tensor, quantize_reduce_scatter, wide, exact_1d)
    grid = HierarchicalAllreduceState(mesh=mesh)
    _refused(TypeError, "supports no hierarchical state", quantize_reduce_scatter, wide, grid)
    wide.unshard()  # it still has all its parameters, in another form
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = quantize_reduce_scatter(wide, QuantizedAllreduceState(flat))
    second = QuantizedAllreduceState(flat)
    _refused(ValueError, "has the reduce-scatter of another state", quantize_reduce_scatter, wide, second)
    first.remove()
    quantize_reduce_scatter(wide, second)
    with_step, of_ddp = state_between(mesh, bits=4), state_between(mesh, bits=4)
    with with_step.step():
        _refused(ValueError, r"inside step\(\)", quantize_all_reduce, net, with_step)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    ddp.register_comm_hook(of_ddp, quantized_allreduce_hook)
    backward(ddp, 0)
    _refused(ValueError, "residuals of a DistributedDataParallel", quantize_all_reduce, net, of_ddp)
    # A handle removes what it has added, and nothing else.
    calls = []
    handle = quantize_all_reduce(net, state := state_between(mesh))
    net.layers[0].set_all_reduce_hook(calls.append)
    handle.remove()
    backward(net, 0)
    assert len(calls) == 1
    for _ in range(2):
        other = sharded(mesh["shard"])
        quantize_all_reduce(other, state)
        del other  # its parts refer to each other


def _sharded_too_late(_):
    """Modules sharded afterwards would not be averaged."""
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))
    averaged, scattered = Net(), Net()
    fsdp.fully_shard(averaged.layers[2], mesh=mesh["shard"])
    fsdp.fully_shard(scattered.layers[2], mesh=flat)
    with pytest.warns(UserWarning, match=r"gradients of \['scale', 'layers\.0\.weight', .*: fully_shard was"):
        quantize_all_reduce(averaged, state_between(mesh))
    quantize_reduce_scatter(scattered, QuantizedAllreduceState(flat))
    fsdp.fully_shard(averaged, mesh=mesh["shard"])
    fsdp.fully_shard(scattered, mesh=flat)
    for net, name in ((averaged, "quantize_all_reduce"), (scattered, "quantize_reduce_scatter")):
        _refused(RuntimeError, rf"applied to \['\(model\)'\] after {name}", backward, net, 0)


def _unfit(rank):
    _unfit_states(rank)
    _sharded_too_late(rank)


@needs_hooks
def test_unfit_states_are_refused_and_handles_remove_only_their_own():
    run_ranks(_unfit, 2, timeout=60)


class _Halves(torch.nn.Module):
    """A module that tensor parallelism cuts in two."""

    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fsdp.fully_shard(parallelize_module(self, mesh["tensor"], plan), mesh=mesh["shard"])


def _tensor_parallel(_):
    """Ranks that hold different parts of a tensor must not average it."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "shard", "tensor"))
    other_parts = r"module '\(model\)' is .*\(0, 0\) of \(1, 2\).* on .*\(0, 1\) of \(1, 2\)"
    for group in (mesh["tensor"], None):
        state = QuantizedAllreduceState(group)
        _refused(AgreementError, other_parts, quantize_all_reduce, _Halves(mesh), state)
    quantize_all_reduce(_Halves(mesh), QuantizedAllreduceState(mesh["node"]))


@needs_hooks
def test_a_group_with_other_parts_of_tensor_parallelism_is_refused():
    run_ranks(_tensor_parallel, 4, timeout=60)


def _one_rank_fails(rank):
    mesh = nodes_and_shards(1)
    net, state = sharded(mesh["shard"]), state_between(mesh)
    quantize_all_reduce(net, state)
    backward(net, 0)
    net.zero_grad()
    if rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError):
        backward(net, 1)
    return "raised"


def _stop(*_, **__):
    stop_process()


def _others_stop(rank, timeout):
    """All others stop where they would average: one has the same shard, one shares FSDP's collectives."""
    mine = []
    for rows in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        groups = [dist.new_group(row, timeout=timedelta(seconds=timeout)) for row in rows]
        mine += [group for group, row in zip(groups, rows, strict=True) if rank in row]
    mesh = DeviceMesh.from_group(
        mine, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("node", "shard")
    )
    net, state = sharded(mesh["shard"]), state_between(mesh)
    quantize_all_reduce(net, state)
    if rank:
        mock.patch.object(sharded_averages, "all_reduce", _stop).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[2\] did not"):
        backward(net, 0)
    return time.monotonic() - began


@needs_hooks
def test_ranks_that_do_not_come_are_waited_for_once():
    timeout = patience(3.0)
    seconds, *_ = run_ranks(_others_stop, 4, timeout, may_die={1, 2, 3}, timeout=60 + 4 * timeout)
    assert seconds < 2 * timeout


@needs_hooks
def test_ranks_with_other_models_raise():
    run_ranks(_different_ranks, 2, timeout=60)


@needs_hooks
def test_a_rank_that_dies_is_an_error_of_backward():
    results = run_ranks(_one_rank_fails, 2, timeout=100, group_timeout=20, may_die={1})
    assert results[0] == "raised"


def _calls_of_fsdp1(_):
    from ddp_compress_hooks import (  # noqa: PLC0415 - the hooks, by name
        allreduce_hook,
        bf16_compress_hook,
    )
    from ddp_quant_hooks import quantization_perchannel_hook  # noqa: PLC0415

    hooks = {
        allreduce_hook: None,
        bf16_compress_hook: None,
        quantization_perchannel_hook: None,
        quantized_allreduce_hook: QuantizedAllreduceState(),
    }
    strategies = [fsdp.ShardingStrategy.FULL_SHARD, fsdp.ShardingStrategy.NO_SHARD]
    for hook, state in hooks.items():
        for strategy in strategies:
            net = fsdp.FullyShardedDataParallel(
                torch.nn.Linear(8, 8), sharding_strategy=strategy, device_id=torch.device("cpu")
            )
            net.register_comm_hook(state, hook)
            loss = net(torch.ones(1, 8)).sum()
            _refused(TypeError, f"{hook.__qualname__} averages buckets.*use fully_shard", loss.backward)


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
def test_hooks_of_ddp_say_what_to_use_instead_where_fsdp1_calls_them():
    run_ranks(_calls_of_fsdp1, 2, timeout=100)
