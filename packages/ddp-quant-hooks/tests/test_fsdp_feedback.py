"""Error feedback under FSDP2: which uses of a module are a step, and which residuals belong to a model."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    backward,
    gradients,
    kept_names,
    local,
    needs_hooks,
    needs_reset,
    nodes_and_shards,
    sharded,
    state_between,
)
from quant_buckets import assert_same
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils.testing import call_in_backward, run_ranks, same_bits, same_on_all_ranks

pytestmark = needs_hooks


def _averaging(mesh):
    net, state = sharded(mesh["shard"]), state_between(mesh, bits=4)
    quantize_all_reduce(net, state)
    return net, state


def _scattering(mesh):
    net, state = sharded(mesh["shard"]), state_between({"node": mesh["shard"]}, bits=4)
    quantize_reduce_scatter(net, state)
    return net, state


def _files_of_other_shards(mesh):
    """They have the same number of values, and the same rank in the state's group."""
    net, state = _averaging(mesh)
    backward(net, 0)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, state.state_dict())
    other = everyone[dist.get_rank() ^ 1]
    with pytest.raises(
        ValueError, match=r"residuals are of shards \['\(\d,\) of \(2,\)'\], but this rank has"
    ):
        state.load_state_dict(other)
    before = state_between(mesh, bits=4)
    before.load_state_dict(other)
    with pytest.raises(ValueError, match=r"state has residuals of shards .*, but this rank has"):
        quantize_all_reduce(sharded(mesh["shard"]), before)


def _file_of_other_names(mesh):
    """A module of the saved model is now the whole model."""
    net, state = _averaging(mesh)
    backward(net, 0)
    layer = fully_shard(torch.nn.Sequential(torch.nn.Linear(37, 37)), mesh=mesh["shard"])
    other = state_between(mesh, bits=4)
    quantize_all_reduce(layer, other)
    saved = state.state_dict()
    saved["keys"].pop("(model)")
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"are of \['layers.*but the model has \['\(model\)'\]"):
        backward(layer, 0)


def _other_residuals(_):
    mesh = nodes_and_shards()
    _files_of_other_shards(mesh)
    _file_of_other_names(mesh)


def test_residuals_of_other_shards_and_modules_are_refused():
    run_ranks(_other_residuals, 4, timeout=100)


def _other_parameters(_):
    """Another set of parameters with gradients begins without residuals, also after a resume."""
    for make, mesh in ((_averaging, nodes_and_shards(1)), (_scattering, nodes_and_shards())):
        net, state = make(mesh)
        again, resumed = make(mesh)
        for step, frozen in enumerate((True, False, True, False)):
            for one in (net, again):
                one.layers[0].bias.requires_grad_(not frozen)
                one.zero_grad()
                backward(one, step)
            resumed.load_state_dict(copy.deepcopy(resumed.state_dict()))
        assert_same(gradients(net), gradients(again))
        assert kept_names(state) == kept_names(resumed)


class Alike(torch.nn.Module):
    """Parameters of one shape, of which a forward pass uses some."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))

    def forward(self, x, *names):
        return sum((getattr(self, name) * x).sum() for name in names)


def _unused(net):
    net(torch.randn(64, 64), "a").backward()


def _frozen(net):
    net.b.requires_grad_(False)
    net(torch.randn(64, 64), "a").backward()
    net.a.requires_grad_(False)
    net.b.requires_grad_(True)


def _unused_and_frozen(net):
    _unused(net)
    net.a.requires_grad_(False)


def _parameters_of_one_size(_):
    """A residual of one parameter never comes into another one of as many values."""
    for function, axis in ((quantize_all_reduce, "node"), (quantize_reduce_scatter, "shard")):
        for use_the_first in (_unused, _frozen, _unused_and_frozen):
            mesh = nodes_and_shards(1 if axis == "node" else 2)
            net = fully_shard(Alike(), mesh=mesh["shard"])
            function(net, QuantizedAllreduceState(mesh[axis], bits=4, min_bytes=0))
            use_the_first(net)
            net.zero_grad()
            net(torch.zeros(64, 64), "b").backward()
            assert local(net.b.grad).count_nonzero() == 0, (axis, use_the_first)


def _another_model(_):
    """Residuals of a model do not come into another one whose modules have the same names."""
    mesh = nodes_and_shards(1)
    state = state_between(mesh, bits=4)
    for values, keep in ((torch.randn(64, 64), True), (torch.zeros(64, 64), False)):
        net = fully_shard(Alike(), mesh=mesh["shard"])
        handle = quantize_all_reduce(net, state)
        net(values, "a", "b").backward()
        handle.remove()
        assert bool(local(net.a.grad).count_nonzero()) is keep


class Checkpointed(torch.nn.Module):
    """Layers whose forward passes are recomputed in passes of their own; the first layer is used twice."""

    def __init__(self, mesh, *, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(2))
        self.reentrant = reentrant
        for layer in self.layers:
            fully_shard(layer, mesh=mesh["shard"])

    def forward(self, x):
        x = call_in_backward(x.requires_grad_(), lambda: self.fails and 1 / 0)
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

    fails = False


def _with_checkpoints(_, shards=1):
    """With reentrant checkpoints each use of a layer has gradients of its own, which are averaged."""
    mesh = nodes_and_shards(shards)
    for reentrant in (True, False):
        net, state = Checkpointed(mesh, reentrant=reentrant), state_between(mesh, bits=4)
        quantize_all_reduce(net, state)
        for step in range(3):
            net.zero_grad()
            backward(net, step)
            assert same_on_all_ranks(gradients(net), state.process_group)
        assert kept_names(state) == {"layers.0", "layers.1"} | ({"layers.0#2"} if reentrant else set())
        assert state.statistics.quantized_buckets == 3 * len(kept_names(state))


def _after_a_failed_pass(_):
    """The passes inside a pass that failed, on all ranks, do not count as uses in the next one."""
    net, state = Checkpointed(mesh := nodes_and_shards(1), reentrant=True), state_between(mesh, bits=4)
    quantize_all_reduce(net, state)
    net.fails = True
    with pytest.raises(ZeroDivisionError):
        backward(net, 0)
    net.fails = False
    for module in (net, *net.layers):
        module.zero_grad()
    for layer in net.layers:
        layer.reset_iter_state()
    net.zero_grad()
    state.close()
    backward(net, 1)
    assert same_on_all_ranks(gradients(net), state.process_group)
    assert kept_names(state) == {"layers.0", "layers.1", "layers.0#2"}


@needs_reset
def test_nothing_of_a_failed_pass_comes_into_the_next():
    run_ranks(_after_a_failed_pass, 2, timeout=60)


def _explicit_steps(_, shards=1):
    """All passes inside of step() are one step, in which a module may be used several times."""
    net, state = _averaging(nodes_and_shards(shards))
    for step in range(2):
        net.zero_grad()
        with state.step():
            backward(net, step)
            backward(net, step + 10)
    assert same_on_all_ranks(gradients(net), state.process_group)
    once = {"(model)", "layers.0", "layers.1", "layers.2"}
    assert kept_names(state) == once | {f"{key}#2" for key in once}
    assert state.state_dict()["steps"] == 2


def _not_finite_in_a_shard(_):
    """The step counts on no rank: a GradScaler skips it on all."""
    for function, axis in ((quantize_all_reduce, "node"), (quantize_reduce_scatter, "shard")):
        mesh = nodes_and_shards()
        net = fully_shard(Alike(), mesh=mesh["shard"] if axis == "node" else mesh)
        state = QuantizedAllreduceState(mesh[axis], bits=4, min_bytes=0)
        function(net, state)
        for bad in (False, True):
            before = state.state_dict()
            x = torch.randn(64, 64)
            if bad and dist.get_rank() == 0:
                x[0, 0] = torch.inf  # in the first shard, of the first node
            net(x, "a", "b").backward()
            net.zero_grad()
        assert same_bits(state.state_dict()["keys"], before["keys"])


def _with_shards(rank):
    """Ranks with other shards agree on every step, also on one of several passes, or with passes inside."""
    _not_finite_in_a_shard(rank)
    _with_checkpoints(rank, shards=2)
    _explicit_steps(rank, shards=2)


def test_a_step_that_is_not_finite_in_one_shard_counts_nowhere():
    run_ranks(_with_shards, 4, timeout=90)


def _passes(rank):
    for check in (
        _other_parameters,
        _parameters_of_one_size,
        _another_model,
        _with_checkpoints,
        _explicit_steps,
    ):
        check(rank)


def test_other_parameters_passes_inside_of_passes_and_explicit_steps():
    run_ranks(_passes, 2, timeout=100)
