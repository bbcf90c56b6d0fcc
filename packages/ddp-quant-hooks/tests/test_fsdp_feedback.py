"""Error feedback under FSDP2: steps, uses of a module, micro-batches, and resuming from a checkpoint."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    EXACT,
    all_equal,
    backward,
    batch,
    gradients,
    kept_names,
    needs_hooks,
    needs_reset,
    nodes_and_shards,
    sharded,
    state_between,
    train,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter
from dist_utils.testing import run_ranks, same_on_all_ranks

pytestmark = needs_hooks


def _averaging(mesh, *, options=None, **net_options):
    net, state = sharded(mesh["shard"], **net_options), state_between(mesh, **(options or {"bits": 4}))
    quantize_all_reduce(net, state)
    return net, state


def _scattering(mesh, **net_options):
    net, state = sharded(mesh["shard"], **net_options), state_between({"node": mesh["shard"]}, bits=4)
    quantize_reduce_scatter(net, state)
    return net, state


def _resumed(make, mesh, accumulate):
    """Train five steps: in one go, with a stop after two, and then without residuals; return the results."""

    def trained(net, steps, first=0):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return train(net, steps, first=first, accumulate=accumulate, optimizer=optimizer)

    results = [trained(make(mesh)[0], 5)]
    net, state = make(mesh)
    trained(net, 2)
    saved = copy.deepcopy((net.state_dict(), state.state_dict()))
    for with_residuals in (True, False):
        net, state = make(mesh)
        net.load_state_dict(saved[0])
        if with_residuals:
            state.load_state_dict(saved[1])
        results.append(trained(net, 3, first=2))
    return results


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
    saved["lengths"].pop("(model)")
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"are of \['layers.*but the model has \['\(model\)'\]"):
        backward(layer, 0)


def _resumes(_):
    mesh, outcomes = nodes_and_shards(), []
    _files_of_other_shards(mesh)
    _file_of_other_names(mesh)
    for make in (_averaging, _scattering):
        for accumulate in (False, True):
            wanted, resumed, without = _resumed(make, mesh, accumulate)
            outcomes.append((all_equal(wanted, resumed), all_equal(wanted, without)))
    return outcomes


def test_a_resumed_run_is_the_run_that_went_on_bit_by_bit():
    for outcomes in run_ranks(_resumes, 4, timeout=150):
        assert outcomes == [(True, False)] * 4


def _mean_of_many_steps(_):
    """The same gradients in every step: with feedback the mean of the averages comes closer and closer."""
    mesh = nodes_and_shards(1)
    exact, _ = _averaging(mesh, options={"min_bytes": EXACT})
    backward(exact, 0)
    errors = []
    for feedback in ("none", "both"):
        net, state = _averaging(mesh, options={"bits": 4, "error_feedback": feedback})
        total = None
        for _ in range(8):
            net.zero_grad()
            backward(net, 0)
            new = gradients(net)
            total = new if total is None else [a + b for a, b in zip(total, new, strict=True)]
        wanted = gradients(exact)
        errors.append(max((a / 8 - b).abs().max() for a, b in zip(total, wanted, strict=True)))
        assert state.statistics.quantized_buckets == 8 * 4
    return errors


def test_feedback_makes_up_for_what_a_step_has_lost():
    for none, both in run_ranks(_mean_of_many_steps, 2, timeout=100):
        # The total loss is at most that of the last step: an eighth of it in the mean.
        assert both < none / 4


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
        assert all_equal(gradients(net), gradients(again))
        assert kept_names(state) == kept_names(resumed)


def _failed_pass(_):
    """A pass that a module's backward breaks changes no residual."""
    mesh = nodes_and_shards(1)
    results = []
    for fails in (False, True):
        net, _ = _averaging(mesh)
        backward(net, 0)
        net.zero_grad()
        if fails:
            x = batch(7).requires_grad_()
            x.register_hook(_fail)
            loss = net(x).square().mean()
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            net.reset_iter_state()
            net.zero_grad()
        backward(net, 1)
        results.append(gradients(net))
    return all_equal(*results)


def _fail(_):
    raise ZeroDivisionError


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
        x = x.requires_grad_()
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def _with_checkpoints(_):
    mesh, nets = nodes_and_shards(1), []
    for bits, reentrant in ((None, True), (4, True), (None, False), (4, False)):
        net = Checkpointed(mesh, reentrant=reentrant)
        state = state_between(mesh, **({"bits": 4} if bits else {"min_bytes": EXACT}))
        quantize_all_reduce(net, state)
        for step in range(3):
            net.zero_grad()
            backward(net, step)
        nets.append(net)
        assert same_on_all_ranks(gradients(net))
        if bits:
            # With reentrant checkpoints each use of a layer has gradients of its own, which are averaged.
            assert kept_names(state) == {"layers.0", "layers.1"} | ({"layers.0#2"} if reentrant else set())
            assert state.statistics.quantized_buckets == 3 * len(kept_names(state))
    exact_reentrant, reentrant, exact, plain = map(gradients, nets)
    # The same sums in another order, and nothing lost when FSDP adds to a tensor during its exchange.
    for one, other in zip(exact_reentrant, exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    return not all_equal(reentrant, exact) and not all_equal(plain, exact)


def _explicit_steps(_):
    """All passes inside of step() are one step, in which a module may be used several times."""
    mesh = nodes_and_shards(1)
    net, state = _averaging(mesh)
    for step in range(2):
        net.zero_grad()
        with state.step():
            backward(net, step)
            backward(net, step + 10)
    assert same_on_all_ranks(gradients(net))
    once = {"(model)", "layers.0", "layers.1", "layers.2"}
    return kept_names(state) == once | {f"{key}#2" for key in once}


@needs_reset
def test_a_failed_pass_changes_no_residual():
    assert all(run_ranks(_failed_pass, 2, timeout=60))


def _passes(rank):
    _other_parameters(rank)
    return _explicit_steps(rank), _with_checkpoints(rank)


def test_other_parameters_passes_inside_of_passes_and_explicit_steps():
    assert run_ranks(_passes, 2, timeout=100) == [(True, True)] * 2
