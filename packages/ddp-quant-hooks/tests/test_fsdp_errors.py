"""Wrong uses of FSDP2 in few bits and failed passes: errors on every rank, and a fresh start after them."""

import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    EXACT,
    Halves,
    Net,
    all_equal,
    backward,
    gradients,
    kept_names,
    needs_hooks,
    needs_reset,
    nodes_and_shards,
    sharded,
    state_between,
)
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks, same_on_all_ranks, stop_process
from dist_utils.torch_compat import default_store


def _refused(error, match, call, *arguments):
    with pytest.raises(error, match=match):
        call(*arguments)


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
    handle.remove()  # the state is no longer of this one
    _refused(ValueError, "state is used for a model", quantize_all_reduce, plain, state)
    other.set_requires_all_reduce(False)
    instead = r"'layers\.2'.*accumulate with set_requires_gradient_sync\(False\)"
    _refused(ValueError, instead, backward, other, 0)
    assert state.statistics.plain_buckets == state.statistics.quantized_buckets == 0
    scatter_needs = "is sharded over ranks .* but the state's process group has"
    _refused(ValueError, scatter_needs, quantize_reduce_scatter, plain, whole)
    _refused(ValueError, scatter_needs, quantize_reduce_scatter, sharded(one_shard["shard"]), whole)


@needs_hooks
def test_wrong_models_states_and_groups_are_refused():
    run_ranks(_refusals, 4, timeout=100)


def _replicate_is_refused(_):
    mesh = nodes_and_shards(1)
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    try:
        replicas = replicate(Net(), mesh=mesh["node"])
    except TypeError:  # torch 2.9 has another name for it, and wants a mesh as for HSDP
        replicas = replicate(Net(), device_mesh=mesh)
    state = state_between(mesh)
    _refused(ValueError, "instead of replicate.*a mesh of one rank", quantize_all_reduce, replicas, state)
    _refused(ValueError, r"is sharded over ranks \[\d?\]", quantize_reduce_scatter, replicas, state)


@needs_hooks
def test_replicate_is_refused():
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    run_ranks(_replicate_is_refused, 2, timeout=60)


def _names(_):
    """Names are those in the model, without wrappers; modules sharded together have the first one's."""
    mesh = nodes_and_shards(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    fsdp.fully_shard(net[1], mesh=mesh["shard"])
    fsdp.fully_shard([net[2], net[3]], mesh=mesh["shard"])
    fsdp.fully_shard(net, mesh=mesh["shard"])
    wrapped = torch.nn.Sequential(torch.compile(net, backend="eager"))
    handle = quantize_all_reduce(wrapped, state_between(mesh))
    assert handle.keys == ["0", "0.1", "0.2"]
    handle.remove()
    assert quantize_all_reduce(net, state_between(mesh)).keys == ["(model)", "1", "2"]


def _different_ranks(rank):
    """One rank has a different model, or no FSDP model: all ranks raise."""
    mesh = nodes_and_shards(1)
    net, state = sharded(mesh["shard"], cut=(rank,)), state_between(mesh)
    _refused(AgreementError, r"module 'layers\.0' is not there on rank 0", quantize_all_reduce, net, state)
    net = sharded(mesh["shard"]) if rank else Net()
    error = AgreementError if rank else ValueError
    _refused(error, "applied neither to the model", quantize_all_reduce, net, state_between(mesh))
    sizes = (20, 30) if rank else (30, 20)  # the same number of values in another shape
    net = fsdp.fully_shard(torch.nn.Linear(*sizes, bias=False), mesh=mesh["shard"])
    _refused(AgreementError, r"module '\(model\)' is", quantize_all_reduce, net, state_between(mesh))


def _unfit_states(_):
    """Options that FSDP does not support, a second state, and hooks of others."""
    mesh, flat = nodes_and_shards(1), init_device_mesh("cpu", (2,))
    flat_tensor = "exact_1d does not work: FSDP hands over.* one flat tensor"
    net, wide = sharded(mesh["shard"]), sharded(flat)
    _refused(ValueError, flat_tensor, quantize_all_reduce, net, state_between(mesh, exact_1d=True))
    exact_1d = QuantizedAllreduceState(exact_1d=True)
    _refused(ValueError, flat_tensor, quantize_reduce_scatter, wide, exact_1d)
    wide.unshard()  # it still has all its parameters, in another form
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = quantize_reduce_scatter(wide, QuantizedAllreduceState(flat))
    second = QuantizedAllreduceState(flat)
    _refused(ValueError, "has the reduce-scatter of another state", quantize_reduce_scatter, wide, second)
    first.remove()
    quantize_reduce_scatter(wide, second)
    of_ddp = state_between(mesh, bits=4)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    ddp.register_comm_hook(of_ddp, quantized_allreduce_hook)
    backward(ddp, 0)
    both = sharded(mesh["shard"])
    quantize_all_reduce(both, of_ddp)
    _refused(ValueError, "buckets or for plain tensors, not for both", backward, both, 0)
    # A handle removes what it has added, and nothing else.
    calls = []
    handle = quantize_all_reduce(net, state_between(mesh))
    net.layers[0].set_all_reduce_hook(calls.append)
    handle.remove()
    backward(net, 0)
    assert len(calls) == 1
    state = state_between(mesh)
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
    for check in (_names, _different_ranks, _unfit_states, _sharded_too_late):
        check(rank)


@needs_hooks
def test_unfit_states_and_different_models_are_refused_and_handles_remove_only_their_own():
    run_ranks(_unfit, 2, timeout=100)


def _tensor_parallel(_):
    """Ranks that hold different parts of a tensor must not average it."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("node", "shard", "tensor"))
    other_parts = r"module '\(model\)' is .*\(0, 0\) of \(1, 2\).* on .*\(0, 1\) of \(1, 2\)"
    for group in (mesh["tensor"], None):
        state = QuantizedAllreduceState(group)
        _refused(AgreementError, other_parts, quantize_all_reduce, Halves(mesh, mesh["shard"]), state)
    quantize_all_reduce(Halves(mesh, mesh["shard"]), QuantizedAllreduceState(mesh["node"]))


@needs_hooks
def test_a_group_with_other_parts_of_tensor_parallelism_is_refused():
    run_ranks(_tensor_parallel, 4, timeout=60)


def _one_rank_dies(rank):
    mesh = nodes_and_shards(1)
    net = sharded(mesh["shard"])
    quantize_all_reduce(net, state_between(mesh))
    backward(net, 0)
    net.zero_grad()
    if rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError):
        backward(net, 1)
    return "raised"


@needs_hooks
def test_a_rank_that_dies_is_an_error_of_backward():
    results = run_ranks(_one_rank_dies, 2, timeout=100, group_timeout=20, may_die={1})
    assert results[0] == "raised"


def _mesh_with_timeout(rank, rows, timeout):
    """Return a mesh whose groups along each dimension have a timeout."""
    mine = []
    for groups in rows:
        made = [dist.new_group(row, timeout=timedelta(seconds=timeout)) for row in groups]
        mine += [group for group, row in zip(made, groups, strict=True) if rank in row]
    shape = (len(rows[0][0]), len(rows[1][0]))
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=("node", "shard"))


def _others_stop(rank, timeout):
    """All others stop where they would average: one has the same shard, one shares FSDP's collectives."""
    mesh = _mesh_with_timeout(rank, ([[0, 2], [1, 3]], [[0, 1], [2, 3]]), timeout)
    net = sharded(mesh["shard"])
    quantize_all_reduce(net, state_between(mesh))
    if rank:
        net.layers[2].set_all_reduce_hook(lambda _: stop_process())
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[2\] did not"):
        backward(net, 0)
    return time.monotonic() - began


@needs_hooks
def test_ranks_that_do_not_come_are_waited_for_once():
    timeout = patience(3.0)
    seconds, *_ = run_ranks(_others_stop, 4, timeout, may_die={1, 2, 3}, timeout=60 + 4 * timeout)
    assert seconds < 2 * timeout


class _Failing(torch.autograd.Function):
    """Raises in backward while ``failing`` is set."""

    failing = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if _Failing.failing:
            raise ZeroDivisionError
        return gradient


class _Checkpointed(torch.nn.Module):
    """Layers under reentrant checkpoints, with a place in the middle where backward can fail."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(3))
        for layer in self.layers:
            fsdp.fully_shard(layer, mesh=mesh["shard"])
        fsdp.fully_shard(self, mesh=mesh["shard"])

    def forward(self, x):
        x.requires_grad_()
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, _Failing.apply(x) if index == 1 else x, use_reentrant=True)
        return x


def _after_failures(rank):
    """A pass fails on both ranks, and then on one of them: passes inside it do not count for the next."""
    mesh = nodes_and_shards(1)
    net, state = _Checkpointed(mesh), state_between(mesh, bits=4)
    quantize_all_reduce(net, state)
    for failing in ((0, 1), (1,)):
        _Failing.failing = rank in failing
        with pytest.raises(ZeroDivisionError if _Failing.failing else RuntimeError):
            backward(net, 0)
        if len(failing) == 1:
            state.close()
        _Failing.failing = False
        net.reset_iter_state()
        net.zero_grad()
        backward(net, 1)
        assert same_on_all_ranks(gradients(net))
        net.zero_grad()
    return kept_names(state)


@needs_hooks
@needs_reset
def test_nothing_of_a_failed_pass_comes_into_the_next_and_close_is_a_fresh_start():
    keys = run_ranks(_after_failures, 2, timeout=100, group_timeout=20)
    assert keys == [{"layers.0", "layers.1", "layers.2"}] * 2


def _late(rank, timeout):
    """Ranks wait for each other in vain and make the step again. The root has a parameter of its own."""
    mesh = _mesh_with_timeout(rank, ([[0, 1]], [[0], [1]]), timeout)
    nets, state = [sharded(mesh), sharded(mesh["shard"])], state_between(mesh, min_bytes=EXACT)
    net = nets[1]
    quantize_all_reduce(net, state)
    if rank == 1:
        default_store().wait(["raised"], timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="did not"):
        backward(net, 0)
    default_store().set("raised", "")
    dist.barrier()
    state.close()
    net.zero_grad()
    net.reset_iter_state()
    net.zero_grad()
    for one in nets:
        backward(one, 1)
    return all_equal(*map(gradients, nets))


@needs_hooks
@needs_reset
def test_ranks_that_waited_in_vain_can_make_the_step_again():
    assert all(run_ranks(_late, 2, patience(1.0), timeout=100))


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
