"""Collectives that are started early and waited for late, forward and backward."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dist_autograd_collectives as dac
from dist_autograd_collectives import backend
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import default_store


class _Compute(torch.autograd.Function):
    """Records when it runs."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("compute")
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        ctx.events.append("compute's backward")
        return cotangent, None


def _order(rank):
    events = []
    begin = backend.begin

    def noted(tensors, linear_map):
        events.append(f"launch {linear_map.kind}")
        wait = begin(tensors, linear_map)

        def noted_wait():
            events.append(f"wait {linear_map.kind}")
            return wait()

        return noted_wait

    backend.begin = noted
    x = torch.full((3,), 1.0 + rank, requires_grad=True)
    z = torch.full((3,), 2.0, requires_grad=True)
    handle = dac.start(dac.all_gather_stack, x)
    computed = _Compute.apply(z, events)
    gathered = handle.wait()
    (gathered.sum(0) * computed).sum().backward()
    return events, x.grad.tolist(), z.grad.tolist()


def test_communication_surrounds_what_is_computed_meanwhile():
    for events, x_grad, z_grad in run_ranks(_order, 2):
        assert events == [
            "launch all_gather",
            "compute",
            "wait all_gather",
            "launch reduce_scatter",
            "compute's backward",
            "wait reduce_scatter",
        ]
        assert x_grad == [4, 4, 4]
        assert z_grad == [3, 3, 3]


def _twice(rank):
    """Second order, a retained graph, several running at once, and one that nobody waits for."""
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    handles = [dac.start(dac.all_reduce, k * x) for k in (1, 2)]
    first, second = handles[1].wait(), handles[0].wait()  # in any order
    value = (first**3 + second).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (hessian_row,) = torch.autograd.grad(gradient.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(value, x)
    dac.start(dac.all_reduce, x)
    after = dac.all_reduce(x.detach())
    return gradient.tolist(), hessian_row.tolist(), torch.equal(again, gradient), after.tolist()


def test_started_collectives_have_every_gradient():
    xs = [torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True) for rank in range(2)]
    total = sum(xs)
    value = 2 * ((2 * total) ** 3 + total).sum()  # the loss of both ranks
    first = torch.autograd.grad(value, xs, create_graph=True)
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first), xs)
    for rank, (gradient, row, same, after) in enumerate(run_ranks(_twice, 2)):
        assert gradient == pytest.approx(first[rank].tolist(), rel=1e-12)
        assert row == pytest.approx(second[rank].tolist(), rel=1e-12)
        assert same
        assert after == [3, 4]


def _overlaps(rank):
    """The other rank starts only after this one: a start that waited would never return."""
    x, store = torch.ones(4), default_store()
    dac.all_reduce(x)  # connects
    if rank:
        store.wait(["started"])
    handle = dac.start(dac.all_reduce, x)
    store.set("started", "")
    return handle.wait().tolist()


def test_starting_does_not_wait_for_other_ranks():
    assert run_ranks(_overlaps, 2) == [[2.0] * 4] * 2


def _checkpointed(rank):
    """A checkpoint's second forward stops as soon as nothing more is needed: here between start and wait."""

    def block(x):
        handle = dac.start(dac.all_gather_stack, 2 * x)
        early = x.sin()
        return early.sum() + handle.wait().sum()

    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    found = []
    for reentrant in (False, True):
        x.grad = None
        checkpoint(block, x, use_reentrant=reentrant).backward()
        found.append(x.grad.tolist())
    right = 4 + x.detach().cos()
    return found, right.tolist(), dac.all_reduce(torch.ones(1)).tolist()


def test_a_checkpoint_may_drop_what_it_started():
    for found, right, after in run_ranks(_checkpointed, 2):
        assert found == [pytest.approx(right, rel=1e-12)] * 2
        assert after == [2]


def _prefetched(rank):
    """Weights are gathered before a checkpoint and waited for in it, in all orders that people use."""
    wrong = []
    for function in (dac.all_reduce, dac.all_gather_cat, dac.reduce_scatter_dim, dac.all_gather):
        for reentrant in (True, False):
            for waits in ("inside", "twice inside", "before and inside", "in no_grad, then inside", "nested"):
                found = [_gradients(function, started, reentrant, waits, rank) for started in (True, False)]
                if found[0] is None or not all(map(torch.equal, *found)):
                    wrong.append((function.__name__, reentrant, waits))
    return wrong


def _gradients(function, started, reentrant, waits, rank):
    w = torch.full((2, 2), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2).requires_grad_()
    if started:
        handle = dac.start(function, 2 * w)
        wait = handle.wait
    else:
        plain = function(2 * w)
        wait = lambda: plain  # noqa: E731

    def weight():
        got = wait()
        return got if isinstance(got, torch.Tensor) else torch.cat(got)

    def block(x):
        y = x @ weight().t()
        if waits == "twice inside":
            y = y + x @ (weight() ** 2).t()
        return (y**2).sum()

    run = lambda x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    extra = weight().sum() if waits == "before and inside" else 0
    if waits == "in no_grad, then inside":
        with torch.no_grad():
            extra = weight().sum()
    if waits == "nested":
        inner = run
        run = lambda x: checkpoint(lambda x: inner(x).sin(), x, use_reentrant=reentrant)  # noqa: E731
    loss = run(x)
    if waits == "before and inside" and reentrant:
        # A separate backward, because the inner one frees the graph that both share, for any operation.
        loss.backward(retain_graph=True)
        return w.grad, x.grad
    (loss + extra).backward()
    return w.grad, x.grad


def test_what_was_started_before_a_checkpoint_has_its_gradient_in_it():
    assert run_ranks(_prefetched, 2, group_timeout=30) == [[], []]


def _modes(rank):
    w = torch.full((2,), 1.0 + rank, requires_grad=True)
    seen = {}
    handle = dac.start(dac.all_reduce, w)
    with torch.no_grad():
        result = handle.wait()
        seen["without"] = (2 * result).requires_grad
    with torch.inference_mode():
        seen["inference"] = handle.wait() is result and not result.is_inference()
    seen["with"] = result.requires_grad and handle.wait() is result
    (result**2).sum().backward()
    seen["gradient"] = w.grad.tolist()
    with torch.inference_mode():
        handle = dac.start(dac.all_reduce, w.detach())
        handle.wait()
    seen["started in inference"] = handle.wait().tolist()
    with torch.no_grad():
        handle = dac.start(dac.all_reduce, w)
    with pytest.raises(RuntimeError, match=r"all_reduce\(SUM\) was started without gradients"):
        handle.wait()
    with torch.no_grad():
        seen["stays usable"] = handle.wait().tolist()
    return seen


def test_a_result_has_a_gradient_wherever_it_is_waited_for_with_one():
    for seen in run_ranks(_modes, 2, group_timeout=30):
        assert seen == {
            "without": False,
            "inference": True,
            "with": True,
            "gradient": [12, 12],
            "started in inference": [3, 3],
            "stays usable": [3, 3],
        }


def _each_block_starts_the_next(rank, reentrant):
    """Prefetch inside checkpoints: correct, or refused where the gradient would be lost."""
    ws = [torch.full((2,), 1.0 + rank + i, requires_grad=True) for i in range(3)]
    handles = {0: dac.start(dac.all_reduce, ws[0])}

    def block(x, i):
        if i + 1 < len(ws):
            handles[i + 1] = dac.start(dac.all_reduce, ws[i + 1])
        return x * handles[i].wait()

    x = torch.ones(2, requires_grad=True)
    y = x
    for i in range(len(ws)):
        y = checkpoint(block, y, i, use_reentrant=reentrant)
    y.sum().backward()
    return [w.grad.tolist() for w in ws]


def test_starting_in_one_checkpoint_and_waiting_in_the_next():
    # The sums are 3, 5, 7; the gradient of each is the product of the others, times two ranks.
    assert run_ranks(_each_block_starts_the_next, 2, False) == [[[70, 70], [42, 42], [30, 30]]] * 2
    with pytest.raises(RuntimeError, match="was started without gradients"):
        run_ranks(_each_block_starts_the_next, 2, True, group_timeout=30)


def _transformed(rank):
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64)

    def total(x):
        return (dac.start(dac.all_gather_stack, x).wait() ** 2).sum()

    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(total(leaf), leaf)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    (traced,) = torch.autograd.grad(compiled(leaf), leaf)
    return torch.equal(torch.func.grad(total)(x), right), torch.equal(traced, right)


def test_started_collectives_can_be_transformed_and_compiled():
    assert run_ranks(_transformed, 2) == [(True, True)] * 2


def test_only_collectives_can_be_started():
    with pytest.raises(TypeError, match="start takes a collective of this package"):
        dac.start(torch.add, 1, 2)


def _scatter_is_waited_for_again(rank):
    """Without like= a description is sent, which is read once."""
    parts = [torch.full((3,), float(index), requires_grad=True) for index in range(2)]
    handle = dac.start(dac.scatter, parts if rank == 0 else None, 0, anchor=True)
    with torch.no_grad():
        without = handle.wait()
    for _ in range(2):
        part = handle.wait()
    (part * 2).sum().backward()
    return without.tolist(), part.tolist(), parts[1].grad.tolist() if rank == 0 else None


def test_a_scatter_can_be_waited_for_again():
    first, last = run_ranks(_scatter_is_waited_for_again, 2, group_timeout=20)
    assert first == ([0.0] * 3, [0.0] * 3, [2.0] * 3)
    assert last == ([1.0] * 3, [1.0] * 3, None)


def _dropped(rank):
    """One rank starts early and drops its handle; the other comes to it later."""
    store = default_store()
    dac.all_reduce(torch.ones(1))  # connects
    if rank:
        store.wait(["dropped"])
    handle = dac.start(dac.all_gather_cat, torch.ones(2))
    del handle
    gc.collect()
    store.set("dropped", "")
    return [dac.all_gather_cat(torch.full((1,), float(k))).tolist() for k in range(2)]


def test_a_dropped_handle_never_waits_and_leaves_nothing_to_the_next_call():
    assert run_ranks(_dropped, 2, timeout=30, group_timeout=20) == [[[0, 0], [1, 1]]] * 2


def _many_dropped(rank):
    """What was dropped does not pile up."""
    for _ in range(50):
        dac.start(dac.all_reduce, torch.ones(4))
        dac.all_reduce(torch.ones(4))
    return sum(map(len, backend._abandoned.values()))


def test_dropped_handles_do_not_pile_up():
    assert run_ranks(_many_dropped, 2, group_timeout=20) == [0, 0]


def _kept_results(rank):
    """What MAX saves is not the checkpoint's, which would miss it when it runs its function again."""
    return [
        _same_in_a_checkpoint(torch.full((3,), 1.0 + rank), operation, reentrant)
        for operation in ("sum", "max", "product")
        for reentrant in (True, False)
    ]


def _same_in_a_checkpoint(values, operation, reentrant):
    x, z = (values.clone().requires_grad_() for _ in range(2))
    handle = dac.start(dac.all_reduce, x, operation)
    checkpoint(lambda y: (y * handle.wait()).sin().sum(), z, use_reentrant=reentrant).backward()
    (right,) = torch.autograd.grad((z.detach() * dac.all_reduce(x, operation)).sin().sum(), x)
    return torch.equal(x.grad, right) and handle.wait() is handle.wait()


def test_the_result_is_the_same_in_every_checkpoint():
    assert run_ranks(_kept_results, 2, group_timeout=20) == [[True] * 6] * 2
