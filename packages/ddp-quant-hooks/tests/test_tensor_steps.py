"""Steps of plain tensors: which calls belong to one, and which of them do not count."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import assert_same, differences

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce, reduce_scatter_tensor
from dist_utils import AgreementError
from dist_utils.testing import run_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def make(**options):
    return QuantizedAllreduceState(**{"min_bytes": 0, "bits": 4, **options})


def _values(step, key):
    seed = 1000 * step + 10 * dist.get_rank() + len(key)
    return torch.randn(3000, generator=torch.Generator().manual_seed(seed))


def _mean(state, step, key="a"):
    mean = _values(step, key)
    all_reduce(mean, AVG, state, key=key)
    return mean


def _keys_in_any_order(rank):
    """Residuals are found by keys, not by the order of the calls in a step."""
    results = []
    for turned in (0, 1):
        state, means = make(), []
        for step in range(3):
            means.append(_values(step, "a"))
            calls = [(means[-1][:1000], "first"), (means[-1][1000:], "second")]
            with state.step():
                for part, key in calls[:: -1 if step == turned else 1]:
                    all_reduce(part, AVG, state, key=key)
        assert state.state_dict()["steps"] == 3
        results.append(means)
    assert_same(*results)


def _not_finite_in_one_shard(state, rank):
    gradients = _values(7, "a")
    gradients[5] = torch.inf if rank == 1 else 0.0
    with state.step():
        _mean(state, 7)
        reduce_scatter_tensor(torch.empty(1000), gradients, AVG, state, key="shards")


def _sum_overflows(state, rank):
    """The mean of the same values would be finite."""
    half = torch.full((3000,), 30_000.0, dtype=torch.float16)
    with state.step():
        _mean(state, 7)
        all_reduce(half, SUM, state, key="half")
    assert half.isinf().all()


def _sum_of_shards_overflows(state, rank):
    half, shard = torch.full((3000,), 30_000.0, dtype=torch.float16), torch.empty(1000, dtype=torch.float16)
    with state.step():
        _mean(state, 7)
        reduce_scatter_tensor(shard, half, SUM, state, key="half")
    assert shard.isinf().all()


def _one_call_is_refused(state, rank):
    with state.step():
        _mean(state, 7)
        with pytest.raises(AgreementError):
            all_reduce(torch.ones(10 + rank), AVG, state, key="other")
    state.close()  # a refusal stays until then


def _has_another_key(state, rank):
    _mean(state, 7, "c")


DO_NOT_COUNT = (
    _not_finite_in_one_shard,
    _sum_overflows,
    _sum_of_shards_overflows,
    _one_call_is_refused,
    _has_another_key,
)


def _do_not_count(rank):
    """Return by how much the mean after a step differs that has a call which does not count."""

    def after(disturb):
        state = make()
        _mean(state, 0)
        disturb(state, rank)
        return _mean(state, 1)

    undisturbed = after(lambda *_: None)
    return differences(
        {disturb.__name__: after(disturb) for disturb in DO_NOT_COUNT},
        {disturb.__name__: undisturbed for disturb in DO_NOT_COUNT},
    )


def _blocks_and_keys(rank):
    _keys_in_any_order(rank)
    return _do_not_count(rank)


def test_calls_find_residuals_by_their_keys_and_one_that_fails_ends_the_step():
    assert run_ranks(_blocks_and_keys, 3) == [{}] * 3


class Doubled(torch.autograd.Function):
    """Averages its gradient inside backward(), as sharded training does."""

    @staticmethod
    def forward(ctx, x, state, key):
        ctx.state, ctx.key = state, key
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        mean = gradient.clone()
        all_reduce(mean, AVG, ctx.state, key=ctx.key)
        return 2 * mean, None, None


class Inner(Doubled):
    """Begins a pass inside the pass, like reentrant checkpoints, and averages values in it."""

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            inside = torch.ones(3000, requires_grad=True)
            (Doubled.apply(inside, ctx.state, ctx.key) * gradient).sum().backward()
        return inside.grad, None, None


def _passes_are_steps(rank, function):
    """All calls of one backward() are a step, even in passes inside it; one that fails does not count.

    Nor does it matter whether the step after it is the backward() of the same loss and gradient once more.
    """

    def loss_of(step, state):
        x = _values(step, "a").requires_grad_()
        y = function.apply(function.apply(x, state, "lower"), state, "upper")
        return x, y * _values(step, "bb")

    def run(step, state):
        x, loss = loss_of(step, state)
        loss.sum().backward()
        return x.grad

    undisturbed, disturbed, repeated = make(), make(), make()
    for state in (undisturbed, disturbed, repeated):
        run(0, state)
    expected = run(1, undisturbed)
    for state in (disturbed, repeated):
        x, loss = loss_of(7 if state is disturbed else 1, state)
        failing, gradient = x.register_hook(lambda _: 1 / 0), torch.ones_like(loss)
        with pytest.raises(ZeroDivisionError):
            loss.backward(gradient, retain_graph=True)
        failing.remove()
        if function is Inner:
            state.close()  # else passes inside the next pass are taken for a part of this one
        if state is repeated:
            loss.backward(gradient)
        assert_same([expected], [x.grad if state is repeated else run(1, state)])
    return [state.state_dict()["steps"] for state in (undisturbed, disturbed, repeated)]


@pytest.mark.parametrize(("world_size", "function"), [(2, Doubled), (1, Doubled), (2, Inner)])
def test_calls_inside_backward_are_one_step(world_size, function):
    assert run_ranks(_passes_are_steps, world_size, function) == [[2, 2, 2]] * world_size
