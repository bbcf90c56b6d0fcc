"""all_reduce of plain tensors in 32 or 16 bits: the same values as the hooks, or an early error."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ddp_compress_hooks import CompressState, all_reduce, allreduce_hook, compress_hook
from dist_utils import AgreementError
from dist_utils.testing import grad_bucket, run_ranks, same_bits, same_on_all_ranks
from dist_utils.torch_compat import default_store

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
STATES = {
    "own dtype": (lambda: None, None),
    "mesh": (lambda: init_device_mesh("cpu", (dist.get_world_size(),)), None),
    "fp16": (lambda: CompressState(wire_dtype=torch.float16), torch.float16),
    "bf16, fp32 sums": (lambda: CompressState(wire_dtype=torch.bfloat16, accumulate="fp32"), torch.bfloat16),
    "own dtype, fp32 sums": (lambda: CompressState(accumulate="fp32"), None),
}


def _tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(500, generator=generator),
        torch.randn(70, 31, generator=generator).t(),
        torch.randn(3, dtype=torch.float64, generator=generator),
        torch.randn(129, dtype=torch.complex64, generator=generator).conj(),
        torch.randn(0, generator=generator),
        torch.randn(100, generator=generator).bfloat16(),
        torch.randn(7, generator=generator),
    ]


def _results(rank):
    """The error of every sum and mean, in units of what rounding may do."""
    world_size, excess = dist.get_world_size(), {}
    everyone = [_tensors(peer) for peer in range(world_size)]
    for (name, (make, wire)), op in itertools.product(STATES.items(), (SUM, AVG)):
        results = []
        for async_op in (False, True):
            tensors = _tensors(rank)
            done = all_reduce(tensors, op, make(), async_op)
            assert (done.wait() is tensors) if async_op else (done is None)
            results.append([tensor.resolve_conj() for tensor in tensors])
        assert same_bits(*results), "synchronous and asynchronous calls differ"
        assert same_on_all_ranks(results[0]), name
        for place, (tensor, parts) in enumerate(zip(results[0], zip(*everyone, strict=True), strict=True)):
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            exact = sum(part.to(wide) for part in parts) / (1 if op == SUM else world_size)
            # Every share, every partial sum, and the result is rounded.
            epsilon = max(torch.finfo(kind).eps for kind in (tensor.real.dtype, wire or tensor.real.dtype))
            largest = sum(part.abs().max().item() for part in parts if part.numel())
            limit = (world_size + 2) * epsilon * largest
            error = (tensor - exact).abs().max().item() if tensor.numel() else 0.0
            excess[name, str(op), place] = error / limit if limit else error
    return excess


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_and_means_are_near_and_the_same_on_all_ranks(world_size):
    for excess in run_ranks(_results, world_size):
        assert len(excess) == len(STATES) * 2 * 7
        assert {case: error for case, error in excess.items() if not error <= 1} == {}


def _like_others(rank):
    """The same bits as torch's sum and as the hooks' mean."""
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
    ours, theirs = values.clone(), values.clone()
    all_reduce(ours)
    tensors, under_autocast = _tensors(rank), _tensors(rank)
    all_reduce(tensors)
    with torch.autocast("cpu", torch.float16):  # which does not concatenate bf16
        all_reduce([one for one in under_autocast for one in one.tensor_split(2)])
    assert same_bits(tensors, under_autocast)
    dist.all_reduce(theirs)
    assert torch.equal(ours, theirs)
    bucket = grad_bucket([torch.ones(20_000)])
    wire = CompressState(wire_dtype=torch.bfloat16, accumulate="fp32")
    for state, hook in ((None, allreduce_hook), (wire, compress_hook)):
        bucket.set_buffer(values.clone())
        averaged, ours = hook(state, bucket).wait(), [values[:15_000].clone(), values[15_000:].clone()]
        all_reduce(ours, AVG, state)
        assert torch.equal(torch.cat(ours), averaged)
    large = [torch.full((9 << 20,), float(rank)) for _ in range(2)]  # 36 MiB: each alone, in place
    all_reduce(large, AVG)
    return [float(tensor.unique()) for tensor in large]


def test_the_bits_are_those_of_torch_and_of_the_hooks():
    assert run_ranks(_like_others, 2) == [[0.5, 0.5]] * 2


def _sums_in_fp16(rank):
    """Return sums that fp16 cannot hold, sums that it can, and sums of its smallest number."""
    found = {}
    for accumulate in ("wire", "fp32"):
        state = CompressState(accumulate=accumulate, saturate=True)
        large, fits = torch.full((4,), 40000.0).half(), torch.full((4,), (40000.0, 1024.0)[rank]).half()
        all_reduce(large, SUM, state)
        clamped = state.saturated
        all_reduce(fits, SUM, state)
        assert state.saturated == clamped
        tiny = torch.full((4,), 2.0**-24).half()
        all_reduce(tiny, SUM, CompressState(accumulate=accumulate))
        wide = torch.full((4,), (3e38, 0.0)[rank]).bfloat16()
        kept = wide.clone() if rank == 0 else torch.full((4,), 3e38).bfloat16()
        all_reduce(wide, SUM, state)
        assert torch.equal(wide, kept)
        found[accumulate] = (clamped > 0, *(one.unique().item() for one in (large, fits, tiny)))
    return found


def test_sums_in_fp16_are_clamped_if_asked_for_and_else_keep_the_smallest_numbers():
    for found in run_ranks(_sums_in_fp16, 2):
        assert found == dict.fromkeys(("wire", "fp32"), (True, 65504.0, 41024.0, 2.0**-23))


def _refusals(rank):
    ones, square = torch.ones(4), torch.ones(2, 2)
    for kind, match, arguments in (  # more of them in dist-utils
        (ValueError, "two of the tensors share memory", ([square, square.t()],)),
        (ValueError, "ReduceOp.SUM or ReduceOp.AVG", (ones, dist.ReduceOp.PRODUCT)),
        (TypeError, "got str", (ones, AVG, "world")),
    ):
        with pytest.raises(kind, match=match):
            all_reduce(*arguments)
    for match, arguments in (
        ("op is", (ones, (SUM, AVG)[rank], dist.new_group())),
        ("tensors is", (torch.ones(4 + rank), SUM, dist.new_group())),
        ("wire_dtype is", (ones, AVG, CompressState(wire_dtype=(torch.float16, torch.bfloat16)[rank]))),
    ):
        with pytest.raises(AgreementError, match=match):
            all_reduce(*arguments)
        with pytest.raises(RuntimeError, match=match):
            all_reduce(*arguments, async_op=True).wait()
    wire = CompressState(wire_dtype=torch.bfloat16, accumulate="fp32")
    with torch.inference_mode():
        all_reduce([square.t()], AVG, wire)
    all_reduce(ones)
    return ones.tolist()


def test_wrong_and_unequal_calls_are_refused():
    assert run_ranks(_refusals, 2) == [[2.0] * 4] * 2


def _in_a_callback(rank):
    """Callbacks are refused on any thread that completes a call; a user's own thread is not."""
    for name, (make, _) in STATES.items():
        state, values = make(), torch.ones(5000)
        all_reduce(values, AVG, state)  # from now on the ranks know that they agree: none waits for another
        if rank == 0:
            inside = all_reduce(values, AVG, state, async_op=True).then(lambda _: all_reduce(torch.ones(3)))
            default_store().set(name, "")
            with pytest.raises(RuntimeError, match="callback of another call's future"):
                inside.wait()
        else:
            default_store().wait([name])
            all_reduce(values, AVG, state)
    total = torch.ones(3)
    thread = threading.Thread(target=all_reduce, args=(total,))
    thread.start()
    thread.join()
    return total.tolist()


def test_a_call_in_a_callback_is_refused():
    assert run_ranks(_in_a_callback, 2) == [[2.0] * 3] * 2
