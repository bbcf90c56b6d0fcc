"""Error feedback of plain tensors: by keys, from step to step, saved and resumed."""

import gc

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce, reduce_scatter_tensor
from dist_utils import AgreementError
from dist_utils.testing import patience, run_ranks, same_on_all_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def make(**options):
    return QuantizedAllreduceState(**{"min_bytes": 0, "bits": 4, **options})


def _values(rank, step, key):
    seed = 1000 * step + 10 * rank + len(key)
    return torch.randn(3000, generator=torch.Generator().manual_seed(seed))


def _step(state, rank, step, keys=("a", "bb")):
    """Return the means of a step."""
    tensors = {key: _values(rank, step, key) for key in keys}
    with state.step():
        started = [all_reduce(tensor, AVG, state, async_op=True, key=key) for key, tensor in tensors.items()]
        for future in started:
            future.wait()
    return torch.cat(list(tensors.values()))


def _unbiased(rank):
    """A step's rounding errors are added to the next: the mean over steps converges, in any order of keys."""
    value = _values(rank, 0, "a")
    exact = value.clone()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    for make_calls in (
        lambda state, tensor, step: all_reduce(tensor, AVG, state, key="a"),
        _two_keys,
    ):
        state, total = make(), torch.zeros(3000)
        for step in range(16):
            tensor = value.clone()
            make_calls(state, tensor, step)
            total += tensor / 16
        assert state.feedback.steps == 16
        assert (total - exact).abs().mean() < (tensor - exact).abs().mean() / 4
        assert same_on_all_ranks([tensor])


def _two_keys(state, tensor, step):
    first, second = tensor[:1000], tensor[1000:]
    with state.step():
        for part, key in [(first, "first"), (second, "second")][:: 1 if step % 2 else -1]:
            all_reduce(part, AVG, state, key=key)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_step_loses_is_added_to_the_next(world_size):
    run_ranks(_unbiased, world_size)


def _fails(state, rank):
    with pytest.raises(KeyError), state.step():  # noqa: PT012 - the block is what fails
        all_reduce(_values(rank, 7, "a"), AVG, state, key="a")
        raise KeyError


def _is_discarded(state, rank):
    _step(state, rank, 7)
    state.discard_step()


def _not_finite(state, rank):
    tensor = _values(rank, 7, "a")
    tensor[5] = torch.inf if rank == 1 else 0.0
    all_reduce(tensor, AVG, state, key="a")
    assert not tensor.isfinite().all()


def _not_finite_in_one_shard(state, rank):
    gradients = _values(rank, 7, "a")
    gradients[5] = torch.inf if rank == 1 else 0.0
    with state.step():
        all_reduce(_values(rank, 7, "a"), AVG, state, key="a")
        reduce_scatter_tensor(torch.empty(1000), gradients, AVG, state, key="shards")


def _sum_overflows(state, rank):
    """The mean of the same values would be finite."""
    half = torch.full((3000,), 30_000.0, dtype=torch.float16)
    with state.step():
        all_reduce(_values(rank, 7, "a"), AVG, state, key="a")
        all_reduce(half, SUM, state, key="half")
    assert half.isinf().all()


def _sum_of_shards_overflows(state, rank):
    half, shard = torch.full((3000,), 30_000.0, dtype=torch.float16), torch.empty(1000, dtype=torch.float16)
    with state.step():
        all_reduce(_values(rank, 7, "a"), AVG, state, key="a")
        reduce_scatter_tensor(shard, half, SUM, state, key="half")
    assert shard.isinf().all()


def _one_call_is_refused(state, rank):
    with state.step():
        all_reduce(_values(rank, 7, "a"), AVG, state, key="a")
        with pytest.raises(AgreementError):
            all_reduce(torch.ones(10 + rank), AVG, state, key="other")
    state.close()  # a refusal stays until then


def _has_another_key(state, rank):
    all_reduce(_values(rank, 7, "a"), AVG, state, key="c")


DO_NOT_COUNT = (
    _fails,
    _is_discarded,
    _not_finite,
    _not_finite_in_one_shard,
    _sum_overflows,
    _sum_of_shards_overflows,
    _one_call_is_refused,
    _has_another_key,
)


def _do_not_count(rank):
    """Steps that fail, are discarded, or are not finite leave the residuals as they were."""

    def after(disturb):
        state = make()
        _step(state, rank, 0)
        disturb(state, rank)
        return _step(state, rank, 1)

    undisturbed = after(lambda state, rank: None)
    for disturb in DO_NOT_COUNT:
        assert torch.equal(after(disturb), undisturbed), disturb.__name__
    assert not torch.equal(after(lambda state, rank: _step(state, rank, 7)), undisturbed)


def test_steps_that_do_not_count_leave_the_residuals():
    run_ranks(_do_not_count, 3)


def _resumes(rank):
    for options in ({}, {"error_feedback": "shard"}, {"bits": 8, "error_feedback": "both"}):
        state = make(**options)
        assert state.state_dict()["lengths"] == {}, "nothing was averaged yet"
        for step in range(2):
            _step(state, rank, step)
        saved = state.state_dict()
        assert saved["lengths"] == {"a": 3000, "bb": 3000}
        gathered = state.gather_state_dict()
        fresh, scattered = make(**options), make(**options)
        fresh.load_state_dict(saved)
        scattered.scatter_state_dict(gathered)
        for step in range(2, 4):
            went_on = _step(state, rank, step)
            assert torch.equal(_step(fresh, rank, step), went_on)
            assert torch.equal(_step(scattered, rank, step), went_on)
        state.load_state_dict(saved)  # back to an earlier step
        again = make(**options)
        again.load_state_dict(saved)
        assert torch.equal(_step(state, rank, 9), _step(again, rank, 9))
        with pytest.raises(ValueError, match="key 'a' had 3000 values before, and now it has 30"):
            all_reduce(torch.ones(30), AVG, again, key="a")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(world_size):
    run_ranks(_resumes, world_size, timeout=90)


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


def _passes_are_steps(rank, function):
    """All calls of one backward() are a step, even in passes inside it; one that fails does not count."""

    def run(step, state, *, fails=False):
        x = _values(rank, step, "a").requires_grad_()
        y = function.apply(function.apply(x, state, "lower"), state, "upper")
        if fails:
            x.register_hook(lambda _: 1 / 0)
        (y * _values(rank, step, "bb")).sum().backward()
        return x.grad

    undisturbed, disturbed = make(), make()
    for state in (undisturbed, disturbed):
        run(0, state)
        if state is disturbed:
            with pytest.raises(ZeroDivisionError):
                run(7, state, fails=True)
    assert torch.equal(run(1, undisturbed), run(1, disturbed))
    assert (undisturbed.feedback.steps, disturbed.feedback.steps) == (2, 2)


class Inner(torch.autograd.Function):
    """Begins a pass inside the pass, like reentrant checkpoints, and averages values in it."""

    @staticmethod
    def forward(ctx, x, state, key):
        ctx.state, ctx.key = state, key
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            inside = torch.ones(3000, requires_grad=True)
            (Doubled.apply(inside, ctx.state, ctx.key) * gradient).sum().backward()
        return inside.grad, None, None


def test_calls_inside_backward_are_one_step():
    run_ranks(_passes_are_steps, 2, Doubled)
    run_ranks(_passes_are_steps, 1, Doubled)


def test_calls_in_passes_inside_of_a_pass_are_one_step():
    run_ranks(_passes_are_steps, 2, Inner)


def _peer_dies(rank):
    state = make()
    _step(state, rank, 0)
    if rank == 1:
        raise SystemExit(3)
    with pytest.raises(RuntimeError):
        _step(state, rank, 1)
    with pytest.raises(RuntimeError):
        all_reduce(torch.ones(3000), AVG, state, key="a")
    kept = state.state_dict()
    state.close()
    gc.collect()
    return kept["steps"]


def test_a_peer_that_dies_is_an_error_and_the_step_does_not_count():
    first, _, last = run_ranks(_peer_dies, 3, may_die={1}, group_timeout=patience(5.0))
    assert (first, last) == (1, 1)
