"""What a collective returns: new tensors, filled buffers, any strides, both conventions, large tensors."""

import gc
import os
import typing
import weakref

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks


def _buffers(rank):
    x = torch.full((2,), 1.0 + rank, requires_grad=True)
    buffer, wide, whole = torch.empty(2), torch.zeros(2, 2), torch.empty(2, 2)
    first = dac.all_to_all_single(buffer, x)
    second = dac.all_to_all_single(buffer, 10 * x)  # the same buffer again
    (first + second).sum().backward()
    out = [torch.empty(1 + rank), torch.empty(1 + rank)]
    dac.all_to_all(out, [torch.full((1 + other,), float(rank)) for other in range(2)])
    return {
        "used twice": (buffer.tolist(), x.grad.tolist()),
        "a column": (dac.reduce_scatter(wide[:, 0], [x, x]).tolist(), wide.tolist()),
        "uneven": [entry.tolist() for entry in out],
        "whole": (dac.all_gather_base(whole, x).tolist(), whole.tolist()),
    }


def test_buffers_are_filled_and_may_be_used_again():
    for rank, seen in enumerate(run_ranks(_buffers, 2)):
        assert seen == {
            "used twice": ([10, 20], [11, 11]),
            "a column": ([3, 3], [[3, 0], [3, 0]]),
            "uneven": [[0.0] * (1 + rank), [1.0] * (1 + rank)],
            "whole": ([[1, 1], [2, 2]], [[1, 1], [2, 2]]),
        }


SWAP = [(0, 1), (1, 0)]
CALLS = {
    "all_reduce": lambda x: [dac.all_reduce(x)],
    "all_reduce_coalesced": lambda x: dac.all_reduce_coalesced([x, 2 * x]),
    "broadcast": lambda x: [dac.broadcast(x, 1)],
    "all_gather": dac.all_gather,
    "all_gather_cat": lambda x: [dac.all_gather_cat(x)],
    "all_gather_stack": lambda x: [dac.all_gather_stack(x, 1)],
    "gather": lambda x: dac.gather(x, 0),
    "reduce_scatter_dim": lambda x: [dac.reduce_scatter_dim(x)],
    "permute": lambda x: [dac.permute(x, SWAP)],
}


def _new_tensors(rank):
    """Results can be changed in place, and a view whose sign flip is pending is sent with its sign."""
    found = {}
    for name, call in CALLS.items():
        x = torch.full((4,), 1.0 + rank, requires_grad=True)
        negative = [part.detach().clone() for part in call(torch._neg_view(x))]
        for result, negated in zip(call(x), negative, strict=True):
            if not torch.equal(result, -negated):
                found[name] = result, negated
            result.add_(1)
        if x.tolist() != [1.0 + rank] * 4:
            found[name] = x
    return found


def test_results_are_new_tensors_and_have_their_sign():
    assert run_ranks(_new_tensors, 2) == [{}, {}]


def _empty_sums(_):
    """Nothing is sent, and the tensor that a sine has saved counts no change."""
    x = torch.ones(3, 2, requires_grad=True) * 1
    wave = x.sin().sum()
    total = dac.all_reduce(x[:0])
    total.add_(1)
    (wave + total.sum()).backward()
    return total.shape


def test_a_sum_of_empty_tensors_is_a_new_tensor():
    assert run_ranks(_empty_sums, 2, group_timeout=20) == [(0, 2)] * 2


def _kept(_):
    """What is kept for later calls with the same arguments: neither tensors nor groups."""
    found = []
    group = dist.new_group([0, 1])
    for name, call in CALLS.items():
        x = torch.ones(4, len(name), requires_grad=True)  # of a shape without a plan
        results = call(x)
        sum(result.sum() for result in results).backward()
        objects = {"tensor": x, "gradient": x.grad, "result": results[0]}
        references = {what: weakref.ref(one) for what, one in objects.items()}
        del x, results, objects
        gc.collect()
        found += [(name, what) for what, reference in references.items() if reference() is not None]
    dac.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    reference = weakref.ref(group)
    del group
    gc.collect()
    return found, reference()


def test_a_plan_keeps_neither_tensors_nor_groups():
    assert run_ranks(_kept, 2) == [([], None)] * 2


class _Lengths:
    """Numbers that are read one after the other, and hashed by identity, as those of ctypes are."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def __getitem__(self, place):
        return self.numbers[place]


def _changed_lengths(_):
    """Calls with the same object, which says something else in between."""
    x, by_name, lengths = torch.arange(4.0), {"first": 1, "second": 3}, _Lengths(1, 3)
    calls = [
        lambda: dac.reduce_scatter_dim(x, sizes=lengths),
        lambda: dac.reduce_scatter_dim(x, sizes=by_name.values()),
        lambda: dac.all_to_all_dim(x, 0, 0, input_sizes=lengths, output_sizes="auto"),
    ]
    found = [call().tolist() for call in calls]
    lengths.numbers = (3, 1)
    by_name.update(first=3, second=1)
    return found, [call().tolist() for call in calls]


def test_lengths_that_change_in_place_count_anew():
    (first, first_then), (second, second_then) = run_ranks(_changed_lengths, 2, group_timeout=20)
    assert first == [[0.0], [0.0], [0.0, 0.0]]
    assert second == [[2.0, 4.0, 6.0], [2.0, 4.0, 6.0], [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]]
    assert first_then == [[0.0, 2.0, 4.0], [0.0, 2.0, 4.0], [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]]
    assert second_then == [[6.0], [6.0], [3.0, 3.0]]


def _large(rank, length, hosts):
    """Longer than messages and sums of Gloo that are short, and not divisible by the world size."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // hosts)  # as torchrun would set it
    size, first = dist.get_world_size(), torch.arange(float(length)).remainder(100_003)
    x = (first + rank).requires_grad_()
    one, everyone, copied = dac.reduce(x, 1), dac.all_reduce(x), dac.broadcast(x, 1)
    total = size * first + sum(range(size))
    torch.testing.assert_close(one, total if rank == 1 else torch.zeros(length), rtol=0, atol=0)
    torch.testing.assert_close(everyone, total, rtol=0, atol=0)
    torch.testing.assert_close(copied, first + 1, rtol=0, atol=0)
    torch.testing.assert_close(x, first + rank, rtol=0, atol=0)
    (2 * one + 3 * everyone + 5 * copied).sum().backward()
    gradients, x.grad = x.grad.unique().tolist(), None
    parts = [x * (other + 1) for other in range(size)]
    arrived = dac.all_to_all([torch.empty(length) for _ in parts], parts)
    for other, part in enumerate(arrived):
        torch.testing.assert_close(part, (first + other) * (rank + 1), rtol=0, atol=0)
    sum(arrived).sum().backward()
    return gradients, x.grad.unique().tolist()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hosts", [1, 2])
def test_large_sums_broadcasts_and_exchanges(size, hosts):
    gradients = [[2.0 + 3 * size + (5 * size if rank == 1 else 0)] for rank in range(size)]
    exchanged = [sum(range(1, size + 1))]
    assert run_ranks(_large, size, 500_001, hosts) == [(own, exchanged) for own in gradients]


def _beside_others(_):
    """Collectives of which ranks send unlike numbers of messages, then torch's own in the same group."""
    x = torch.ones(2, requires_grad=True)
    results = [dac.broadcast(x, 1), *dac.gather(x, 0), dac.permute(x, [(0, 1)]), dac.all_gather_stack(x)]
    sum(result.sum() for result in results).backward()
    total = torch.ones(2)
    dist.all_reduce(total)
    with dac.compare_calls():
        return total.tolist(), dac.all_reduce(total).tolist(), x.grad.tolist()


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_torch_may_compare_collectives_too(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    gradients = [3.0 + 1 + 1, 3.0 + 3 + 1, 3.0 + 1]
    found = run_ranks(_beside_others, 3, group_timeout=20)
    assert found == [([3.0] * 2, [9.0] * 2, [gradient] * 2) for gradient in gradients]


def _ways(rank, lengths):
    """Return which of Gloo's operations sums of these lengths are made of."""
    seen = {}
    for length in lengths:
        with torch.profiler.profile() as profiler:
            assert dac.all_reduce(torch.ones(length)).unique().tolist() == [6]
        seen[length] = {event.name for event in profiler.events() if event.name.startswith("c10d::")}
    return seen


def test_a_small_sum_is_sent_to_each_rank_while_these_are_few():
    """48 KiB for each of five others are 240 KiB, 64 KiB are 320; a ring sends 107 of them."""
    messages, ring = {"c10d::send", "c10d::recv_"}, {"c10d::allreduce_"}
    right = {1: messages, 12 << 10: messages, 16 << 10: ring}
    assert run_ranks(_ways, 6, list(right), timeout=100) == [right] * 6


CONVENTIONS = {
    "all_reduce": (dac.all_reduce, sum),
    "avg": (lambda x, grad: dac.all_reduce(x, "avg", grad=grad), lambda xs: sum(xs) / len(xs)),
    "max": (lambda x, grad: dac.all_reduce(x, "max", grad=grad), lambda xs: torch.stack(xs).amax(0)),
    "all_gather": (lambda x, grad: sum(dac.all_gather(x, grad=grad)), sum),
    "broadcast": (lambda x, grad: dac.broadcast(x, 1, grad=grad), lambda xs: xs[1] + 0 * xs[0]),
}
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def _input(rank):
    return (torch.arange(3.0) + 1 + rank).requires_grad_()


def _conventions(rank):
    """Every rank computes the same loss: its gradient counted once, and W times."""
    seen = {}
    for grad in ("sum", "replicated"):
        for name, (call, _) in CONVENTIONS.items():
            x = _input(rank)
            (first,) = torch.autograd.grad((WEIGHT * call(x, grad=grad) ** 2).sum(), x, create_graph=True)
            # Replicated, too: the squared norm of all ranks' gradients.
            norm = dac.all_reduce((first**2).sum(), grad=grad)
            (second,) = torch.autograd.grad(norm, x)
            seen[grad, name] = first.tolist(), second.tolist()
    return seen


def test_the_replicated_convention_counts_the_loss_once():
    size, xs = 2, [_input(0), _input(1)]
    found = run_ranks(_conventions, size)
    for name, (_, simulate) in CONVENTIONS.items():
        first = torch.autograd.grad((WEIGHT * simulate(xs) ** 2).sum(), xs, create_graph=True)
        norm = sum((gradient**2).sum() for gradient in first)
        second = torch.autograd.grad(norm, xs)
        for rank in range(size):
            once, twice = found[rank]["replicated", name]
            # A few sums and products of float32.
            assert once == pytest.approx(first[rank].tolist(), rel=1e-6), name
            assert twice == pytest.approx(second[rank].tolist(), rel=1e-6), name
            assert found[rank]["sum", name][0] == pytest.approx((size * first[rank]).tolist(), rel=1e-6)


def _tensor_parallel(rank):
    """Two layers, the first split by columns and the second by rows, against the unsplit layers."""
    random = torch.Generator().manual_seed(0)
    x, first, second = (
        torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (4, 6), (6, 2))
    )
    whole = ((x @ first).relu() @ second).square().sum()
    right = torch.autograd.grad(whole, (x, first, second))
    mine = slice(3 * rank, 3 * rank + 3)
    hidden = (dac.copy_to_group(x) @ first[:, mine]).relu()
    loss = dac.all_reduce(hidden @ second[mine], grad="replicated").square().sum()
    found = torch.autograd.grad(loss, (x, first, second))
    pairs = {"loss": (loss, whole), "x": (found[0], right[0])}
    pairs["columns"] = found[1][:, mine], right[1][:, mine]
    pairs["rows"] = found[2][mine], right[2][mine]
    return {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}


def test_a_tensor_parallel_layer_has_the_gradients_of_the_whole():
    for found in run_ranks(_tensor_parallel, 2):
        # Sums of 24 products of numbers up to 100, in a different order.
        assert {name: error for name, error in found.items() if not error < 1e-11} == {}


def _sparse_cotangents(rank):
    """An embedding of a gathered table has a sparse gradient on one rank."""
    found = []
    for gather in (dac.all_gather_cat, lambda table: dac.start(dac.all_gather_cat, table).wait()):
        part = torch.full((2, 1), 1.0 + rank, requires_grad=True)
        index = torch.tensor([0, 3, 3])
        torch.nn.functional.embedding(index, gather(part), sparse=rank == 0).sum().backward()
        found.append(part.grad.tolist())
    return found


def test_a_sparse_gradient_of_a_result_is_made_dense():
    first, second = run_ranks(_sparse_cotangents, 2, group_timeout=20)
    assert first == [[[2], [0]]] * 2
    assert second == [[[0], [4]]] * 2


def _alone(_):
    x = torch.full((2,), 3.0, requires_grad=True)
    calls = [dac.permute(x, [(0, 0)]), dac.permute(x, []), dac.gather(x)[0], dac.scatter([x])]
    calls += [
        dac.permute(x, pairs) for pairs in (torch.zeros(1, 2, dtype=torch.int64), [torch.zeros(2).int()])
    ]
    return [(y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()) for y in calls]


def test_a_rank_that_is_alone_sends_to_itself_or_to_nobody():
    kept, nothing = ([3, 3], [1, 1]), ([0, 0], [0, 0])
    assert run_ranks(_alone, 1) == [[kept, nothing, kept, kept, kept, kept]]


def _own_messages(rank):
    """A user's own message is pending while a collective runs."""
    theirs = torch.zeros(2)
    work = dist.irecv(theirs, 0) if rank else dist.isend(torch.full((2,), 7.0), 1)
    gathered = dac.all_gather_stack(torch.full((2,), float(rank)))
    work.wait()
    return gathered.tolist(), theirs.tolist()


def test_a_users_own_messages_do_not_get_mixed_up():
    first, second = run_ranks(_own_messages, 2)
    assert first == ([[0, 0], [1, 1]], [0, 0])
    assert second == ([[0, 0], [1, 1]], [7, 7])


def _under_autocast(rank):
    """One rank pads its part, and torch refuses to concatenate float16 under autocast to bfloat16."""
    x = torch.ones(1 + rank, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with dac.compare_calls():
            whole = dac.all_gather_cat(x, sizes=[1, 2])
        waited = dac.start(dac.all_gather_cat, x, sizes=[1, 2]).wait()
        parts = dac.reduce_scatter_dim(whole, sizes=[1, 2])
        compiled = torch.compile(dac.all_gather_cat, backend="eager", fullgraph=True)(x, sizes=[1, 2])
        sent = torch.compile(dac.permute, backend="eager", fullgraph=True)(whole, [(0, 1)])
    return {each.dtype for each in (whole, waited, parts, compiled, sent)}, parts.tolist()


def test_autocast_leaves_dtypes_alone():
    halves = {torch.float16}
    assert run_ranks(_under_autocast, 2, group_timeout=20) == [(halves, [[2, 2]]), (halves, [[2, 2]] * 2)]


def _ranges(rank):
    """What a profiler shows of a collective and of its backward."""
    x = torch.full((4,), float(rank), requires_grad=True)
    with torch.profiler.profile() as profiler:
        (gradient,) = torch.autograd.grad(dac.all_reduce(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()
        torch.func.grad(lambda y: dac.all_reduce(y, "max").sum())(x.detach())
    events = [event for event in profiler.events() if event.name.startswith("dist_autograd_collectives::")]
    events.sort(key=lambda event: event.time_range.start)
    return [event.name.partition("::")[2] for event in events if not event.name.endswith("::linear")]


def test_a_profiler_shows_the_function_that_was_called():
    sums = ["", ":backward", ":backward:backward"]
    for seen in run_ranks(_ranges, 2):
        assert seen[:3] == [f"all_reduce(SUM){order}" for order in sums]
        assert {"all_reduce(MAX)", "all_reduce(MAX):backward"} == {name for name in seen if "MAX" in name}


def test_type_hints_name_what_a_call_returns():
    returned = {
        name: typing.get_type_hints(getattr(dac, name))["return"] for name in ("all_reduce", "gather")
    }
    assert returned == {"all_reduce": torch.Tensor, "gather": tuple[torch.Tensor, ...]}
