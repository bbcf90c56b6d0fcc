"""Collectives of plain tensors: the values of the hook, for any list of tensors, or an error first."""

import itertools
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from quant_buckets import assert_same, rank_values, simulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from dist_utils import AgreementError
from dist_utils.testing import grad_bucket, patience, run_ranks
from dist_utils.torch_compat import default_store

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
STATES = {
    "int8": {},
    "int8 small ones plain": {"min_bytes": 5_000},
    "int8 16 bits back": {"gather": "fp16"},
    "int4 both": {"bits": 4, "error_feedback": "both"},
}


def make(**options):
    return QuantizedAllreduceState(**{"min_bytes": 0, **options})


def _tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(500, generator=generator),
        torch.randn(70, 31, generator=generator).t(),
        torch.randn(3, dtype=torch.float64, generator=generator),
        torch.randn(129, dtype=torch.complex64, generator=generator).conj(),
        torch.randn(0, generator=generator),
        torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(20_000, generator=generator),
        torch.randn(100, generator=generator).bfloat16(),
        torch.randn(1, generator=generator).bfloat16(),
    ]


def _flat(tensors, dtype):
    """Return the numbers of all tensors of a dtype in one row; complex ones are two each."""
    parts = [one.resolve_conj().contiguous() for one in tensors if one.dtype == dtype]
    return torch.cat([(torch.view_as_real(one) if one.is_complex() else one).flatten() for one in parts])


def _lists(rank):
    """A list has the bits of the formula for one row of numbers of each dtype; or it is averaged as it is."""
    everyone, world_size = [_tensors(peer) for peer in range(dist.get_world_size())], dist.get_world_size()
    for (name, options), op, async_op in itertools.product(STATES.items(), (SUM, AVG), (False, True)):
        case, state, tensors = (name, str(op), async_op), make(**options), _tensors(rank)
        done = all_reduce(tensors, op, state, async_op, key="tensors")
        assert (done.wait() is tensors) if async_op else (done is None)
        factor, plain = world_size if op == SUM else 1, 0
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float64):
            result, inputs = _flat(tensors, dtype), [_flat(one, dtype) for one in everyone]
            if dtype == torch.float64 or result.nbytes < state.options.least_bytes(world_size):
                plain += 1
                exact = factor * sum(one.double() for one in inputs) / world_size
                rounding = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(result.double(), exact, rtol=rounding, atol=rounding)
            else:
                assert_same([result], [simulate(state, inputs) * factor], (case, dtype))
        assert state.statistics.plain_buckets == plain, case
    biases = rank_values(500)
    bias, weight = biases[rank].clone(), torch.full((20, 25), 1e6)
    all_reduce([weight, bias], AVG, make(exact_1d=True))
    torch.testing.assert_close(bias, sum(biases) / world_size, rtol=1e-6, atol=1e-6)
    ones = torch.ones(9)
    all_reduce(ones)
    assert ones.tolist() == [world_size] * 9, "without a state"


def _like_the_hook(rank):
    """A list has the bits of one tensor, and that has the bits of a bucket."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(2_700_001, generator=generator)
    parts = [part.clone() for part in whole.split([1, 128, 1_300_000, 131_000, 900_000, 368_872])]
    states = [make(error_feedback="both") for _ in range(3)]
    bucket = grad_bucket([torch.nn.Parameter(whole.clone())])
    for _ in range(2):
        alone, several = whole.clone(), [part.clone() for part in parts]
        bucket.set_buffer(whole.clone())
        averaged = quantized_allreduce_hook(states[0], bucket).wait()
        all_reduce(alone, AVG, states[1], key="whole")
        all_reduce(several, AVG, states[2], key="parts")
        assert_same([averaged] * 2, [alone, torch.cat(several)])
    return [state.statistics.bytes_ratio for state in states]


def _shards(rank):
    """Each rank has the mean or sum of its shard, in few bits or as it is."""
    world_size, length = dist.get_world_size(), 100_004
    everyone = rank_values(world_size * length)
    exact = (sum(one.double() for one in everyone) / world_size).view(world_size, length)[rank]
    half_step = 0.505 / 127 * max(one.abs().max().item() for one in everyone)
    state, plain = make(), make(min_bytes=1 << 30)
    for group, op, dtype, limit in (
        (state, AVG, torch.float32, half_step),
        (state, SUM, torch.float32, half_step),
        (state, AVG, torch.complex64, half_step),
        (state, AVG, torch.float64, 1e-14),
        (plain, SUM, torch.float32, 1e-5),
    ):
        mine, out = everyone[rank].clone(), torch.empty(length)
        if dtype.is_complex:
            mine, out = torch.view_as_complex(mine.view(-1, 2)), torch.view_as_complex(out.view(-1, 2))
        mine, out = mine.to(dtype), out.to(dtype)
        before = mine.clone()
        assert reduce_scatter_tensor(out, mine, op, group, async_op=True).wait() is out
        assert torch.equal(mine, before), "the input stays"
        flat = torch.view_as_real(out).view(-1) if dtype.is_complex else out
        factor = world_size if op == SUM else 1
        assert (flat - factor * exact).abs().max() <= factor * limit, (op, dtype)
    assert state.statistics.plain_buckets == 1
    assert plain.statistics.bytes_ratio == 1
    return state.statistics.bytes_sent


def _values(rank):
    _lists(rank)
    return _like_the_hook(rank), _shards(rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_lists_and_shards_have_the_bits_of_the_formula_and_lists_those_of_the_hook(world_size):
    values = (world_size - 1) * 100_004
    for ratios, sent in run_ranks(_values, world_size, timeout=150):
        assert ratios == [pytest.approx(0.258, abs=0.001)] * 3
        assert sent <= 3 * 1.04 * values + 8 * values, "8 bits and scales, and once fp64"


def _refusals(rank):
    state, feedback, exact = make(), make(error_feedback="both"), make(exact_1d=True)
    ones, leaf = torch.ones(100), torch.ones(3, requires_grad=True)
    square = torch.ones(10, 10)
    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])

    def refused(kind, match, call, *arguments, **options):
        with pytest.raises(kind, match=match):
            call(*arguments, **options)

    for kind, match, tensors in (
        (TypeError, "a tensor or a sequence of tensors, got a dict", {"a": ones}),
        (TypeError, "floating-point dtype, got .* torch.int64", torch.ones(3).long()),
        (ValueError, "two of the tensors share memory", [square, square.t()]),
        (ValueError, "is a DTensor, whose memory", sharded),
    ):
        refused(kind, match, all_reduce, tensors, AVG, state)
    refused(ValueError, "ReduceOp.SUM or ReduceOp.AVG", all_reduce, ones, dist.ReduceOp.MAX, state)
    refused(TypeError, "ReduceOp.SUM or ReduceOp.AVG, got 'mean'", all_reduce, ones, "mean", state)
    refused(TypeError, "got ProcessGroup", all_reduce, ones, AVG, dist.group.WORLD)
    for kind, match, output, whole in (
        (ValueError, "has 100 elements, .* 2 .* 3 of output", torch.ones(3), ones),
        (ValueError, "output is of torch.float64", torch.ones(50).double(), ones),
        (ValueError, "output must be contiguous", torch.ones(5, 10).t(), ones),
        (ValueError, "share memory", ones[:50], ones),
        (ValueError, "share memory", ones[50:], ones),
        (TypeError, "input must be a tensor", ones, [ones]),
    ):
        refused(kind, match, reduce_scatter_tensor, output, whole)
    refused(ValueError, "exact_1d does not work", reduce_scatter_tensor, torch.ones(50), ones, AVG, exact)
    refused(TypeError, "key must be a string", all_reduce, ones, AVG, state, key=1)
    refused(ValueError, "a key must name", all_reduce, ones, AVG, feedback)
    refused(ValueError, "a key must name", reduce_scatter_tensor, torch.ones(50), ones, AVG, feedback)
    with feedback.step():
        all_reduce(ones, AVG, feedback, key="twice")
        refused(ValueError, "'twice' was used", all_reduce, ones, AVG, feedback, key="twice")
        refused(ValueError, "had 100 values before", all_reduce, torch.ones(9), AVG, feedback, key="twice")
        all_reduce([ones, ones.clone()], AVG, feedback, key="list")
        refused(ValueError, r"'list\[1\]' was used", all_reduce, ones, AVG, feedback, key="list[1]")
        refused(RuntimeError, "inside step", feedback.load_state_dict, feedback.state_dict())
        refused(RuntimeError, "step.. inside step", feedback.step().__enter__)
    bucket, hooked = grad_bucket([ones]), make(error_feedback="both")
    with pytest.raises(RuntimeError, match="not for both"):
        quantized_allreduce_hook(feedback, bucket).wait()
    quantized_allreduce_hook(hooked, bucket).wait()
    refused(ValueError, "not for both", all_reduce, ones, AVG, hooked, key="a")
    all_reduce(leaf, AVG, state)  # a parameter may be averaged
    return leaf.tolist()


def _differ(rank):
    """Ranks that call differently get an error; other differences: integration_tests/test_peers.py."""
    used, lists = make(), [torch.ones((4, 25) if rank else 100), torch.ones(4 if rank else (2, 2))]
    all_reduce(torch.ones(7), SUM, used)  # a later call is compared when it is new
    with pytest.raises(AgreementError, match="op is"):
        all_reduce(torch.ones(9), (SUM, AVG)[rank], used)
    with pytest.raises(AgreementError, match="one dimension is"):
        all_reduce(lists, AVG, make(exact_1d=True))


def _another_op(rank):
    """All calls are known by now, so they are not compared; their messages do not meet."""
    state, other, ones = make(), make(), torch.ones(1000)
    calls = [
        lambda **how: all_reduce(ones, SUM, state, key="a", **how),
        lambda **how: all_reduce(ones, AVG, state, key="a", **how),
        lambda **how: reduce_scatter_tensor(torch.empty(500), ones, AVG, other, key="a", **how),
        lambda **how: all_reduce(torch.ones(500), AVG, other, key="a", **how),
    ]
    for call in calls:
        call()
    for future in [calls[place + rank](async_op=True) for place in (0, 2)]:
        with pytest.raises(RuntimeError):
            future.wait()


def test_another_op_or_function_on_one_rank_is_an_error_on_all():
    run_ranks(_another_op, 2, group_timeout=patience(2.0))


def _comparisons(rank):
    """Return how often the ranks have compared something in a first and in a second call, on all threads."""
    counts = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "compare":
            counts[-1] += 1

    state = make(min_bytes=1 << 20)
    threading.setprofile(note)
    sys.setprofile(note)
    for _ in range(2):
        counts.append(0)
        all_reduce([torch.ones(10), torch.ones(3, dtype=torch.float64)], AVG, state)
    sys.setprofile(None)
    threading.setprofile(None)
    return counts


def test_tensors_without_compression_are_compared_once():
    """The state's terms, and then the call: not a second time in the private group, where its job runs."""
    assert run_ranks(_comparisons, 2) == [[2, 0]] * 2


def _modes(rank):
    """Inference mode and torch.compile, with values that are not contiguous."""
    state, feedback = make(), make(error_feedback="both")
    kept = torch.full((20, 30), 1.0 + rank)
    with torch.inference_mode():
        all_reduce(kept.t(), AVG, state)
        all_reduce(kept, AVG, feedback, key="kept")
    all_reduce(kept, AVG, feedback, key="kept")

    def doubled(x):
        y = 2 * x
        all_reduce(y, SUM, state)
        shard = torch.zeros(150)
        reduce_scatter_tensor(shard, y, AVG, state)
        return shard + 1

    compiled = torch.compile(doubled, backend="eager")(torch.ones(300))
    return kept.unique().tolist(), compiled.unique().tolist()


def _calls(rank):
    _differ(rank)
    return _refusals(rank), _modes(rank)


def test_wrong_or_different_calls_are_refused_and_inference_mode_and_compilation_work():
    expected = [1.0] * 3, ([1.5], [5.0])
    assert run_ranks(_calls, 2, timeout=100) == [expected] * 2


def _callbacks(rank):
    """Calls in few bits and without compression are started before any of them can complete."""
    state, completed = make(), []
    calls = []
    for dtype in (torch.float32, torch.float64):
        values, shard = torch.ones(3000, dtype=dtype), torch.ones(1500, dtype=dtype)
        calls += [
            lambda values=values: all_reduce(values, group=state, async_op=True),
            lambda values=values, shard=shard: reduce_scatter_tensor(
                shard, values, group=state, async_op=True
            ),
        ]
    for call in calls:
        call().wait()  # from now on the call is known: no rank waits for another one
    if rank == 1:
        default_store().wait(["callbacks are there"])
        for call in calls:
            call()
        state.wait()
        return list(range(4))

    def call_again(number):
        completed.append(number)
        all_reduce(torch.ones(3), SUM, state if number % 2 else None)

    futures = [call().then(lambda _, number=number: call_again(number)) for number, call in enumerate(calls)]
    default_store().set("callbacks are there", "")
    for future in futures:
        with pytest.raises(RuntimeError, match="in a callback of another call's future"):
            future.wait()
    return completed


def test_futures_complete_in_order_and_a_call_in_a_callback_is_refused():
    assert run_ranks(_callbacks, 2) == [[0, 1, 2, 3]] * 2
