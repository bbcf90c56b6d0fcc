"""Collectives of plain tensors: the values of the hook, for any list of tensors, or an error first."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from dist_utils import AgreementError
from dist_utils.testing import grad_bucket, patience, run_ranks, same_bits, same_on_all_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
STATES = {
    "int8": {},
    "int8 small ones plain": {"min_bytes": 5_000},
    "int8 exact 1d": {"exact_1d": True},
    "int8/fp16": {"gather": "fp16"},
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
        torch.randn(1_400_000, generator=generator),
        torch.randn(100, generator=generator).bfloat16(),
        torch.randn(1, generator=generator).bfloat16(),
    ]


def _exact(tensors, op):
    """Return sums or means in fp64, and the same for the ranks' largest magnitudes, by dtype."""
    ranks = 1 if op == SUM else dist.get_world_size()
    largest = {}
    for dtype in {tensor.dtype: None for tensor in tensors}:
        magnitudes = [
            tensor.abs().max().double() for tensor in tensors if tensor.dtype == dtype and tensor.numel()
        ]
        largest[dtype] = torch.stack(magnitudes).max()
        dist.all_reduce(largest[dtype])
    wide = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=torch.complex128 if tensor.is_complex() else torch.float64)
        copy.copy_(tensor)
        dist.all_reduce(torch.view_as_real(copy) if copy.is_complex() else copy)
        wide.append(copy / ranks)
    return wide, {dtype: float(total) / ranks for dtype, total in largest.items()}


def _errors(rank):
    """Return the cases that are further from the exact result than rounding allows."""
    bad = []
    for name, options in STATES.items():
        for op in (SUM, AVG):
            results = []
            for async_op in (False, True):
                state, tensors = make(**options), _tensors(rank)
                exact, largest = _exact(tensors, op)
                done = all_reduce(tensors, op, state, async_op, key="tensors")
                assert (done.wait() is tensors) if async_op else (done is None)
                results.append([tensor.resolve_conj() for tensor in tensors])
                # A value moves by half a step of its block when it is sent and when its mean is, and a step
                # is the block's largest magnitude in 127, 7, or less than 2^9 (bf16's) parts.
                steps = 127 if "8" in name else 7
                for tensor, wide in zip(tensors, exact, strict=True):
                    top = largest[tensor.dtype]
                    allowed = 1.01 * top / steps + top * 2**-8 * (tensor.dtype == torch.bfloat16)
                    distance = (tensor - wide).abs().amax().item() if tensor.numel() else 0.0
                    limit = 2**0.5 * allowed if tensor.is_complex() else allowed
                    if distance > limit or (tensor.dtype == torch.float64 and distance > 1e-15 * 4):
                        bad.append((name, str(op), tensor.dtype, tuple(tensor.shape), distance, limit))
                assert same_on_all_ranks(results[-1]), name
                if "plain" in name:
                    assert state.statistics.plain_buckets == 3, "those of fp64, complex64 and bf16"
            assert same_bits(*results), "at once or later: the same bits"
    return bad


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_and_means_are_near_and_the_same_on_all_ranks(world_size):
    assert run_ranks(_errors, world_size, timeout=120) == [[]] * world_size


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
        assert torch.equal(averaged, alone)
        assert torch.equal(torch.cat(several), alone)
    sent = [state.statistics.bytes_sent for state in states]
    assert sent[0] == sent[1] == sent[2]
    return sent[0] / states[0].statistics.bytes_of_allreduce


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_the_hook(world_size):
    assert run_ranks(_like_the_hook, world_size) == [pytest.approx(0.258, abs=0.001)] * world_size


def _halves(rank):
    world_size, length = dist.get_world_size(), 100_003
    everyone = [
        torch.randn(world_size * length, generator=torch.Generator().manual_seed(r))
        for r in range(world_size)
    ]
    mine, state, out = everyone[rank].clone(), make(), torch.empty(length)
    exact = torch.stack(everyone).double().mean(0).view(world_size, length)
    reduce_scatter_tensor(out, mine, AVG, state)
    assert torch.equal(mine, everyone[rank]), "the input stays"
    limit = 0.505 / 127 * max(one.abs().max() for one in everyone)
    assert (out - exact[rank]).abs().max() <= limit
    total = torch.empty(length)
    assert reduce_scatter_tensor(total, mine, group=state, async_op=True).wait() is total
    assert torch.allclose(total, out * world_size, rtol=1e-6)
    sent = state.statistics.bytes_sent
    assert sent <= 2 * 1.04 * (world_size - 1) * length

    for plain, dtype in ((QuantizedAllreduceState(min_bytes=1 << 30), torch.float32), (state, torch.float64)):
        values = [one.to(dtype) for one in everyone]
        out = torch.empty(length, dtype=dtype)
        reduce_scatter_tensor(out, values[rank], SUM, plain)
        near = {"rtol": 1e-5, "atol": 1e-5}
        assert torch.allclose(out.double(), world_size * exact[rank], **near)
    complex_in = torch.view_as_complex(everyone[rank][: world_size * 2000].view(-1, 2).clone())
    complex_out = torch.empty(1000, dtype=torch.complex64)
    reduce_scatter_tensor(complex_out, complex_in, AVG, state)
    expected = torch.stack([one[: world_size * 2000] for one in everyone]).mean(0).view(world_size, -1)[rank]
    assert (torch.view_as_real(complex_out).view(-1) - expected).abs().max() <= limit

    residuals, means = make(bits=4, error_feedback="both"), torch.zeros(length)
    for _ in range(16):
        out = torch.empty(length)
        reduce_scatter_tensor(out, mine, AVG, residuals, key="gradients")
        means += out / 16
    once, often = (out - exact[rank]).abs().mean(), (means - exact[rank]).abs().mean()
    assert often < once / 4, "what a step loses is in the next one's result"


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_are_reduced(world_size):
    run_ranks(_halves, world_size)


def _grid(rank):
    state = HierarchicalAllreduceState(mesh=init_device_mesh("cpu", (2, 2)), min_bytes=0)
    tensors = [torch.full((1000,), float(rank)), torch.full((70, 70), float(rank))]
    all_reduce(tensors, AVG, state)
    shard = torch.empty(1000)
    reduce_scatter_tensor(shard, torch.full((4000,), float(rank)), AVG, state)
    tensors.append(shard)
    return [tensor.unique().tolist() for tensor in tensors]


def test_a_hierarchy_averages_plain_tensors():
    assert run_ranks(_grid, 4) == [[[1.5]] * 3] * 4


def _alone(rank):
    tensor, state = torch.randn(1000), make(error_feedback="both")
    before = tensor.clone()
    with state.step():
        all_reduce(tensor, AVG, state, key="a")
        assert all_reduce([tensor], SUM, state, async_op=True, key="b").wait()[0] is tensor
    assert torch.equal(tensor, before)
    out = torch.empty(10, 100)
    reduce_scatter_tensor(out, tensor, AVG, state, key="c")
    assert torch.equal(out.view(-1), tensor)


def test_one_rank_alone_keeps_its_values():
    run_ranks(_alone, 1)


def _refusals(rank):
    state, feedback = make(), make(error_feedback="both")
    ones = torch.ones(100)
    leaf = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        inference = torch.ones(3)
    square, freed = torch.ones(10, 10), torch.ones(3)
    freed.untyped_storage().resize_(0)
    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])

    def refused(kind, match, call, *arguments, **options):
        with pytest.raises(kind, match=match):
            call(*arguments, **options)

    refused(TypeError, "a tensor or a sequence of tensors, got a dict", all_reduce, {"a": ones}, AVG, state)
    refused(TypeError, "got a list of Tensor, int", all_reduce, [ones, 3], AVG, state)
    refused(
        TypeError,
        "floating-point dtype, got .* torch.int64",
        all_reduce,
        torch.ones(3).long(),
        AVG,
        state,
    )
    refused(TypeError, "tensor 1 must be dense", all_reduce, [ones, ones.to_sparse()], AVG, state)
    refused(ValueError, "part of a graph", all_reduce, leaf * 2, AVG, state)
    refused(ValueError, "inference mode", all_reduce, inference, AVG, state)
    refused(ValueError, "share memory .expand", all_reduce, torch.ones(1).expand(5), AVG, state)
    refused(ValueError, "two of the tensors share memory", all_reduce, [square, square.t()], AVG, state)
    refused(ValueError, "holds no memory", all_reduce, freed, AVG, state)
    refused(ValueError, "a DTensor that holds no memory", all_reduce, sharded, AVG, state)
    batched = torch.func.vmap(lambda x: all_reduce(x, AVG, state))
    refused(ValueError, "a batch of 2", batched, torch.ones(2, 3))
    refused(ValueError, "meta tensor", all_reduce, torch.ones(3, device="meta"), AVG, state)
    refused(ValueError, "ReduceOp.SUM or ReduceOp.AVG", all_reduce, ones, dist.ReduceOp.MAX, state)
    refused(TypeError, "ReduceOp.SUM or ReduceOp.AVG, got 'mean'", all_reduce, ones, "mean", state)
    refused(TypeError, "got ProcessGroup", all_reduce, ones, AVG, dist.group.WORLD)
    refused(TypeError, "key must be a string", all_reduce, ones, AVG, state, key=1)
    refused(ValueError, "a key must name", all_reduce, ones, AVG, feedback)
    refused(ValueError, "a key must name", reduce_scatter_tensor, ones[:50], torch.ones(100), AVG, feedback)
    refused(ValueError, "has 100 elements, .* 2 .* 3 of output", reduce_scatter_tensor, torch.ones(3), ones)
    refused(ValueError, "output is of torch.float64", reduce_scatter_tensor, torch.ones(50).double(), ones)
    refused(ValueError, "output must be contiguous", reduce_scatter_tensor, torch.ones(5, 10).t(), ones)
    refused(ValueError, "share memory", reduce_scatter_tensor, ones[:50], ones)
    refused(TypeError, "input must be a tensor", reduce_scatter_tensor, ones, [ones])
    with feedback.step():
        all_reduce(ones, AVG, feedback, key="twice")
        refused(ValueError, "'twice' was used", all_reduce, ones, AVG, feedback, key="twice")
        refused(ValueError, "had 100 values before", all_reduce, torch.ones(9), AVG, feedback, key="twice")
        all_reduce([ones, ones.clone()], AVG, feedback, key="list")
        refused(ValueError, r"'list\[1\]' was used", all_reduce, ones, AVG, feedback, key="list[1]")
        refused(RuntimeError, "inside step", feedback.load_state_dict, feedback.state_dict())
        refused(RuntimeError, "step.. inside step", feedback.step().__enter__)
    with state.step():
        refused(RuntimeError, "step.. inside step", state.step().__enter__)
    with state.step():
        all_reduce(ones, AVG, state)
    bucket = grad_bucket([ones])
    refused(ValueError, "not for both", quantized_allreduce_hook, feedback, bucket)
    hooked = make(error_feedback="both")
    quantized_allreduce_hook(hooked, bucket).wait()
    refused(ValueError, "not for both", all_reduce, ones, AVG, hooked, key="a")
    all_reduce(leaf, AVG, state)  # a parameter may be averaged
    return leaf.tolist()


def test_wrong_arguments_are_refused_before_anything_is_sent():
    assert run_ranks(_refusals, 2) == [[1.0] * 3] * 2


def _differ(rank):
    """Ranks that call differently get an error, and can start over."""
    cases = {
        "op is": lambda: all_reduce(torch.ones(9), (SUM, AVG)[rank], make()),
        "key is": lambda: all_reduce(torch.ones(9), AVG, make(), key="ab"[rank]),
        "tensors is .*10": lambda: all_reduce(torch.ones(9 + rank), AVG, make()),
        "tensors is": lambda: all_reduce(torch.ones(10 + rank), AVG, used()),
        "about to do different": lambda: (
            all_reduce(torch.ones(8), AVG, STATE)
            if rank
            else reduce_scatter_tensor(torch.ones(4), torch.ones(8), AVG, STATE)
        ),
        "bits is": lambda: all_reduce(torch.ones(9), AVG, make(bits=(8, 4)[rank], error_feedback="none")),
        "one dimension is": lambda: all_reduce(
            [torch.ones((4, 25) if rank else 100), torch.ones(4 if rank else (2, 2))],
            AVG,
            make(exact_1d=True),
        ),
    }

    def used():
        state = make()
        all_reduce(torch.ones(9), AVG, state)
        return state

    STATE = used()  # noqa: N806 - used in a case above
    for match, call in cases.items():
        with pytest.raises(AgreementError, match=match):
            call()
    state = make()
    with pytest.raises(RuntimeError, match=r"tensors is .*10"):
        all_reduce(torch.ones(9 + rank), AVG, state, async_op=True).wait()
    state.close()
    ones = torch.full((9,), float(rank))
    all_reduce(ones, SUM, state)
    return ones.tolist()


def test_ranks_that_call_differently_raise_on_every_rank():
    assert run_ranks(_differ, 2) == [[1.0] * 9] * 2


def _another_op(rank):
    """Both calls are known by now, so they are not compared; their messages do not meet."""
    state, ones = make(), torch.ones(1000)
    for op in (SUM, AVG):
        all_reduce(ones, op, state, key="a")
    with pytest.raises(RuntimeError):
        all_reduce(ones, AVG if rank else SUM, state, key="a")
    other = make()
    reduce_scatter_tensor(torch.empty(500), ones, AVG, other, key="a")
    all_reduce(torch.ones(500), AVG, other, key="a")
    calls = [
        lambda: reduce_scatter_tensor(torch.empty(500), ones, AVG, other, key="a"),
        lambda: all_reduce(torch.ones(500), AVG, other, key="a"),
    ]
    with pytest.raises(RuntimeError):
        calls[rank]()


def test_another_op_or_function_on_one_rank_is_an_error_on_all():
    run_ranks(_another_op, 2, group_timeout=patience(2.0))


def _modes(rank):
    """Inference mode, torch.compile and callbacks, each with values that are not contiguous."""
    state, feedback = make(), make(error_feedback="both")
    kept = torch.full((20, 30), 1.0 + rank)
    with torch.inference_mode():
        all_reduce(kept.t(), AVG, state)
        all_reduce(kept, AVG, feedback, key="kept")
    all_reduce(kept, AVG, feedback, key="kept")
    feedback.state_dict()

    def doubled(x):
        y = 2 * x
        all_reduce(y, SUM, state)
        shard = torch.zeros(150)
        reduce_scatter_tensor(shard, y, AVG, state)
        return shard + 1

    compiled = torch.compile(doubled, backend="eager")(torch.ones(300))
    inside = all_reduce(torch.ones(3_000_000), SUM, state, async_op=True).then(
        lambda _: all_reduce(torch.ones(3), SUM, state)
    )
    with pytest.raises(RuntimeError, match="callback of another call's future"):
        inside.wait()
    return kept.unique().tolist(), compiled.unique().tolist()


def test_inference_mode_compilation_and_callbacks():
    assert run_ranks(_modes, 2, timeout=60) == [([1.5], [5.0])] * 2
