"""Wrong uses of FSDP2 in few bits: errors on every rank before anything is sent."""

import contextlib
import itertools
import warnings

import pytest
import torch
from fsdp_models import (
    Halves,
    Net,
    backward,
    gradients,
    needs_hooks,
    nodes_and_shards,
    sharded,
    state_between,
)
from gathered_weights import gather_in_few_bits
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils import AgreementError
from dist_utils.testing import run_ranks, same_on_all_ranks


def _refused(error, match, call, *arguments):
    with pytest.raises(error, match=match):
        call(*arguments)


def _models_and_groups(_):
    mesh, whole = nodes_and_shards(), QuantizedAllreduceState()
    one_shard = init_device_mesh("cpu", (4, 1), mesh_dim_names=("node", "shard"))
    plain, native, state = sharded(mesh["shard"]), sharded(mesh), state_between(mesh)
    too_late = r"'\(model\)' averages between nodes by itself.*mesh=mesh\['shard'\]"
    for error, match, model, of in (
        (TypeError, "state must be a state of this package.*got DeviceMesh", plain, mesh["node"]),
        (ValueError, too_late, native, state),
        (ValueError, r"ranks \[\d\] of the state's .* other shards", plain, whole),
    ):
        _refused(error, match, quantize_all_reduce, model, of)
    scatter_needs = "is sharded over ranks .* but the state's process group has"
    for model in (plain, sharded(one_shard["shard"])):
        _refused(ValueError, scatter_needs, quantize_reduce_scatter, model, whole)
    quantize_all_reduce(plain, state)
    plain.set_requires_all_reduce(False)
    instead = r"'layers\.2'.*accumulate with set_requires_gradient_sync\(False\)"
    _refused(ValueError, instead, backward, plain, 0)
    assert state.statistics == QuantizedAllreduceState().statistics, "nothing was averaged"


def _parts_of_tensor_parallelism(_):
    """Ranks that hold different parts of a tensor must not average it."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "shard", "tensor"))
    other_parts = r"module '\(model\)' is .*\(0, 0\) of \(1, 2\).* on .*\(0, 1\) of \(1, 2\)"
    for group in (mesh["tensor"], None):
        state = QuantizedAllreduceState(group)
        _refused(AgreementError, other_parts, quantize_all_reduce, Halves(mesh, mesh["shard"]), state)


def _other_ranks_of_the_mesh(rank):
    """Who shares no exchange with this rank, but FSDP's own, must do as it does."""
    mesh = nodes_and_shards()
    node, shard = mesh.get_coordinate()
    for function, model, of, group in (
        (quantize_all_reduce, sharded(mesh["shard"]), shard, mesh["node"]),
        (quantize_reduce_scatter, sharded(mesh), node, mesh["shard"]),
    ):
        residuals = QuantizedAllreduceState(group, bits=(8, 4)[of])
        _refused(AgreementError, "keeps residuals is False on .* True on", function, model, residuals)
        unfit = QuantizedAllreduceState(group, exact_1d=rank == 0)
        error = AgreementError if rank else ValueError
        _refused(error, "exact_1d does not work", function, model, unfit)


def _four_ranks(rank):
    _models_and_groups(rank)
    _parts_of_tensor_parallelism(rank)
    _other_ranks_of_the_mesh(rank)


@needs_hooks
def test_wrong_models_states_and_groups_are_refused():
    run_ranks(_four_ranks, 4, timeout=100)


def _names(_):
    """Names are those in the model, without wrappers; modules sharded together have the first one's."""
    mesh = nodes_and_shards(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    for units in (net[1], [net[2], net[3]], net):
        fsdp.fully_shard(units, mesh=mesh["shard"])
    wrapped = torch.nn.Sequential(torch.compile(net, backend="eager"))
    handle = quantize_all_reduce(wrapped, state_between(mesh))
    assert handle.keys == ["0", "0.1", "0.2"]
    handle.remove()
    assert quantize_all_reduce(net, state_between(mesh)).keys == ["(model)", "1", "2"]


def _functions():
    """Return by name what puts a model in few bits, with the mesh over which the model is sharded."""
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))

    def scatter(net):
        return quantize_reduce_scatter(net, QuantizedAllreduceState(flat))

    found = {
        "quantize_all_reduce": (lambda net: quantize_all_reduce(net, state_between(mesh)), mesh["shard"]),
        "quantize_reduce_scatter": (scatter, flat),
        "quantize_all_gather": (gather_in_few_bits, flat),
    }
    if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
        del found["quantize_all_gather"]
    return found


def _different_ranks(rank):
    """One rank has a different model, or no FSDP model: all ranks raise."""
    for call, mesh in _functions().values():
        _refused(TypeError, "model must be a module, got list", call, [Net()])
        # With the same number of values in another shape.
        layer = torch.nn.Linear(*((20, 30) if rank else (30, 20)), bias=False)
        _refused(AgreementError, r"module '\(model\)' is", call, fsdp.fully_shard(layer, mesh=mesh))
        missing = "applied neither to the model"
        if rank == 0:
            _refused(ValueError, missing, call, Net())
        else:
            _refused(AgreementError, f"rank 0 cannot go on: .*{missing}", call, sharded(mesh))


def _unfit_states(_):
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))
    net, wide = sharded(mesh["shard"]), sharded(flat)
    flat_tensor = "FSDP hands over.* one flat tensor: exact_1d does not work"
    _refused(ValueError, flat_tensor, quantize_all_reduce, net, state_between(mesh, exact_1d=True))
    of_ddp = state_between(mesh, bits=4)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    ddp.register_comm_hook(of_ddp, quantized_allreduce_hook)
    backward(ddp, 0)
    both = sharded(mesh["shard"])
    quantize_all_reduce(both, of_ddp)
    _refused(ValueError, "buckets or for plain tensors, not for both", backward, both, 0)
    wide.unshard()  # it still has all its parameters, in another form
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = quantize_reduce_scatter(wide, QuantizedAllreduceState(flat))
    second = QuantizedAllreduceState(flat)
    _refused(ValueError, "has the reduce-scatter of another state", quantize_reduce_scatter, wide, second)
    first.remove()
    quantize_reduce_scatter(wide, second)


def _handles(_):
    """A state is for one model at a time, and a handle removes what it has added, and nothing else."""
    mesh = nodes_and_shards(1)
    net, other, state, calls = sharded(mesh["shard"]), sharded(mesh["shard"]), state_between(mesh), []
    handle = quantize_all_reduce(net, state)
    _refused(ValueError, "state is used for a model", quantize_all_reduce, other, state)
    _refused(ValueError, r"'\(model\)' has an all-reduce hook", quantize_all_reduce, net, state_between(mesh))
    net.layers[0].set_all_reduce_hook(calls.append)
    handle.remove()
    backward(net, 0)
    assert len(calls) == 1, "the user's own hook stays"
    _refused(ValueError, r"'layers\.0' has an all-reduce hook", quantize_all_reduce, net, state_between(mesh))
    quantize_all_reduce(other, state)
    handle.remove()  # the state is no longer of this one
    _refused(ValueError, "state is used for a model", quantize_all_reduce, sharded(mesh["shard"]), state)


def _sharded_too_late(_):
    """Modules sharded afterwards would not be averaged, or gathered."""
    told = r"gradients of \['scale', 'layers\.0\.weight', .*: fully_shard was"
    for (name, (call, mesh)), used_before in itertools.product(_functions().items(), (False, True)):
        net = Net()
        fsdp.fully_shard(net.layers[2], mesh=mesh)
        warns = pytest.warns(UserWarning, match=told)
        with warns if name == "quantize_all_reduce" else contextlib.nullcontext():
            call(net)
        if used_before:
            net.layers[2].unshard()
            net.layers[2].reshard()
        fsdp.fully_shard(net, mesh=mesh)
        _refused(RuntimeError, rf"applied to \['\(model\)'\] after {name}", backward, net, 0)


def _sharded_while_training(_):
    """A module that comes when FSDP has run is a root of its own, which FSDP takes."""
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))
    averaged, scattered = sharded(mesh["shard"]), sharded(flat)
    state = state_between(mesh)
    handle = quantize_all_reduce(averaged, state)
    quantize_reduce_scatter(scattered, QuantizedAllreduceState(flat))
    for net, of, name in (
        (averaged, mesh["shard"], "quantize_all_reduce"),
        (scattered, flat, "quantize_reduce_scatter"),
    ):
        backward(net, 0)
        net.layers[1] = fsdp.fully_shard(torch.nn.Linear(37, 37), mesh=of)
        _refused(RuntimeError, rf"applied to \['layers\.1'\] after {name}", backward, net, 0)
    state.close()
    handle.remove()
    averaged = sharded(mesh["shard"])
    averaged.layers[1] = fsdp.fully_shard(torch.nn.Linear(37, 37), mesh=mesh["shard"])
    quantize_all_reduce(averaged, state)
    backward(averaged, 0)
    assert same_on_all_ranks(gradients(averaged))


def _replicate(_):
    mesh = nodes_and_shards(1)
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    try:
        replicas = replicate(Net(), mesh=mesh["node"])
    except TypeError:  # torch 2.9 has another name for it, and wants a mesh as for HSDP
        replicas = replicate(Net(), device_mesh=mesh)
    state = state_between(mesh)
    _refused(ValueError, "instead of replicate.*a mesh of one rank", quantize_all_reduce, replicas, state)
    _refused(ValueError, r"is sharded over ranks \[\d?\]", quantize_reduce_scatter, replicas, state)


def _two_ranks(rank):
    for check in (
        _names,
        _different_ranks,
        _unfit_states,
        _handles,
        _sharded_too_late,
        _sharded_while_training,
    ):
        check(rank)


@needs_hooks
def test_unfit_states_and_different_models_are_refused_and_handles_remove_only_their_own():
    run_ranks(_two_ranks, 2, timeout=100)


@needs_hooks
def test_replicate_is_refused():
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    run_ranks(_replicate, 2, timeout=60)


def _called_by_fsdp1(_):
    net = fsdp.FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    net.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)
    loss = net(torch.ones(1, 8)).sum()
    _refused(TypeError, "quantized_allreduce_hook averages buckets.*use fully_shard", loss.backward)


def test_the_hook_says_what_to_use_instead_where_fsdp1_calls_it():
    run_ranks(_called_by_fsdp1, 2, timeout=100)
