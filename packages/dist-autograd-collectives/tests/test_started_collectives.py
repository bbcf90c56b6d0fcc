"""Collectives that are started early and waited for late, forward and backward, also around checkpoints."""

import gc
import itertools
import mmap
import signal
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dist_autograd_collectives as dac
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import default_store

TIMEOUT = patience(1.0)


def _order(rank):
    """The names of what ran, as a profiler shows them."""
    x, z = torch.full((3,), 1.0 + rank, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    with torch.profiler.profile() as profiler:
        handle = dac.start(dac.all_gather_stack, x)
        computed = z.sin()
        (handle.wait().sum(0) * computed).sum().backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name.partition("::")[2] for event in events]
    return [name for name in names if name.startswith("all_gather_stack") or name in ("sin", "cos")]


def test_communication_surrounds_what_is_computed_meanwhile():
    forward = ["all_gather_stack:start", "sin", "all_gather_stack:wait"]
    backward = ["all_gather_stack:backward:start", "cos", "all_gather_stack:backward:wait"]
    assert run_ranks(_order, 2) == [forward + backward] * 2


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


def _dropped_and_failed(rank, limit):
    """What one rank alone has started fails, in a sum of torch's own that comes after it."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    if rank == 0:
        dac.start(dac.all_gather_cat, torch.ones(2), group=group)
    total = dac.all_reduce(torch.ones(50_000), group=group).unique().tolist()
    dist.barrier()  # an exit before would be an error of the others
    return total


def test_an_error_of_a_dropped_handle_reaches_no_other_call():
    assert run_ranks(_dropped_and_failed, 3, TIMEOUT, timeout=60) == [[3]] * 3


def _dropped_sums(_):
    """Sums of torch's own, of which only a wait frees the memory; the growth in MiB of 100 of 0.5 MiB."""
    x = torch.ones(1 << 17)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

    for number in range(150):
        if number == 50:
            before = resident()
        dac.start(dac.all_reduce, x)
        dac.all_reduce(x)
    return resident() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's count of pages")
def test_what_dropped_handles_have_started_is_freed_by_the_next_calls():
    assert max(run_ranks(_dropped_sums, 3, timeout=60)) < 15


AGAIN = r" was waited for before, and that wait has failed or has not ended"


def _failed(rank):
    """A handle whose peer never comes: its error is raised once, and no handle is kept."""
    group, gone = dist.new_group(timeout=timedelta(seconds=TIMEOUT)), []
    dac.all_reduce(torch.ones(1), group=group)  # connects
    if rank:
        dist.barrier()
        return []
    for _ in range(2):  # the second one is dropped
        handle = dac.start(dac.all_gather_cat, torch.ones(2), group=group)
        gone.append(weakref.ref(handle))
    handle = gone[0]() or handle
    for text in (" failed on rank 0", AGAIN, AGAIN):
        with pytest.raises(RuntimeError, match=f"all_gather_cat{text}") as caught:
            handle.wait()
        del caught
    dist.barrier()
    gc.disable()
    del handle
    return [one() for one in gone]


def test_an_error_of_a_handle_is_raised_and_holds_nothing():
    assert run_ranks(_failed, 2) == [[None, None], []]


def _waits_of_two_threads(rank):
    if rank:
        time.sleep(0.5)
    handle = dac.start(dac.all_reduce, torch.ones(1))
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(handle.wait) for _ in range(2)]
    return first.result() is second.result(), handle.wait().item()


def test_two_threads_get_one_result():
    assert run_ranks(_waits_of_two_threads, 2) == [(True, 2.0)] * 2


def _interrupted(rank):
    """Rank 0 is interrupted while rank 1 has not come."""
    if rank:
        time.sleep(1)
        return dac.start(dac.all_reduce, torch.ones(1)).wait().item()
    handle = dac.start(dac.all_reduce, torch.ones(1))
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    with pytest.raises(RuntimeError, match=r"all_reduce\(SUM\)" + AGAIN):
        handle.wait()
    return 2.0


def _interrupt(*_):
    raise KeyboardInterrupt


def test_after_an_interrupt_the_next_wait_says_so():
    assert run_ranks(_interrupted, 2) == [2.0, 2.0]


def _waits_again(rank):
    """A signal's handler waits while the wait that it interrupts has a result and has not returned it."""
    if rank:
        time.sleep(1)
        return dac.start(dac.all_reduce, torch.ones(1)).wait().item()
    handle = dac.start(dac.all_reduce, torch.ones(1))
    signal.signal(signal.SIGALRM, lambda *_: handle.wait())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(RuntimeError, match=r"all_reduce\(SUM\)" + AGAIN):
        handle.wait()
    return 2.0


def test_a_wait_inside_a_wait_is_an_error():
    assert run_ranks(_waits_again, 2, timeout=30) == [2.0, 2.0]


def _inference(rank):
    del rank
    with torch.inference_mode():
        gathered = torch.empty(6)
        dac.start(dac.all_gather_base, gathered, torch.ones(2)).wait()
        return dac.start(dac.reduce, torch.ones(20_000), 0).wait().sum().item(), gathered.tolist()


def test_what_is_started_in_inference_mode():
    assert run_ranks(_inference, 3) == [(total, [1.0] * 6) for total in (60_000.0, 0.0, 0.0)]


def _several(rank):
    """Two run at once and are waited for in another order; their graph is kept for a second backward."""
    x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    handles = [dac.start(dac.all_reduce, k * x) for k in (1, 2)]
    value = (handles[1].wait() ** 2 + handles[0].wait()).sum()
    return [torch.autograd.grad(value, x, retain_graph=True)[0].tolist() for _ in range(2)]


def test_several_started_collectives_have_their_gradients_in_any_order():
    # The sums are 3 and 4; of both ranks' losses (2 s)^2 + s.
    assert run_ranks(_several, 2) == [[[50, 66]] * 2] * 2


def _modes(rank):
    w = torch.full((2,), 1.0 + rank, requires_grad=True)
    seen = {}
    handle = dac.start(dac.all_reduce, w)
    with torch.no_grad():
        result = handle.wait()
        seen["in no_grad"] = (2 * result).requires_grad
    with torch.inference_mode():
        seen["in inference mode"] = handle.wait() is result, result.is_inference()
    seen["with gradients"] = handle.wait() is result, result.requires_grad
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


def test_a_result_is_the_same_wherever_it_is_waited_for_with_its_gradient():
    for seen in run_ranks(_modes, 2, group_timeout=30):
        assert seen == {
            "in no_grad": False,
            "in inference mode": (True, False),
            "with gradients": (True, True),
            "gradient": [12, 12],
            "started in inference": [3, 3],
            "stays usable": [3, 3],
        }


LOSING = {
    "all_reduce": lambda w: (dac.all_reduce, w),
    "all_reduce avg": lambda w: (dac.all_reduce, w, "avg"),
    "all_reduce of a complex tensor": lambda w: (dac.all_reduce, w.to(torch.complex64)),
    "all_reduce_coalesced": lambda w: (dac.all_reduce_coalesced, [torch.ones(2, 2), w]),
    "reduce_scatter": lambda w: (dac.reduce_scatter, torch.empty(2, 2), [torch.ones(2, 2), w]),
    "all_gather": lambda w: (dac.all_gather, w),
    "all_gather_cat": lambda w: (dac.all_gather_cat, w),
    "all_gather_stack": lambda w: (dac.all_gather_stack, w),
    "scatter": lambda w: (dac.scatter, [w, w]),
    "all_to_all": lambda w: (dac.all_to_all, [torch.empty(2, 2), torch.empty(2, 2)], [w, w]),
    "all_to_all_dim": lambda w: (dac.all_to_all_dim, w, 1, 0),
    "permute": lambda w: (dac.permute, w, [(0, 1), (1, 0)]),
}


def _losing(_):
    """What loses a gradient without an error, if it is started without gradients and awaited with them."""
    w, silent = torch.ones(2, 2, requires_grad=True), []
    for name, arguments in LOSING.items():
        with torch.enable_grad():
            function, *args = arguments(w)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                handle = dac.start(function, *args)
            try:
                handle.wait()
            except RuntimeError as error:
                assert "was started without gradients" in str(error), error  # noqa: PT017
            else:
                silent.append((name, mode))
    return silent


def test_no_function_loses_a_gradient_silently():
    assert run_ranks(_losing, 2, group_timeout=30) == [[], []]


STARTED = {
    "all_reduce": (dac.all_reduce,),
    "max": (dac.all_reduce, "max"),
    "all_gather_cat": (dac.all_gather_cat,),
}
WAITS = ["inside", "before and inside", "in no_grad, then inside", "nested"]


def _gradients(name, started, reentrant, waits, rank):
    """A weight is gathered before a checkpoint and waited for in it, twice."""
    w = torch.full((2, 2), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2).requires_grad_()
    function, *options = STARTED[name]
    if started:
        weight = dac.start(function, 2 * w, *options).wait
    else:
        plain = function(2 * w, *options)
        weight = lambda: plain  # noqa: E731

    def block(x):
        return ((x @ weight().t() + x @ (weight() ** 2).t()) ** 2).sum()

    run = lambda x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    extra = 0
    if waits == "before and inside":
        extra = weight().sum()
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
    else:
        (loss + extra).backward()
    return w.grad, x.grad


def _prefetched(rank):
    wrong = {}
    for case in itertools.product(STARTED, (True, False), WAITS):
        name, reentrant, waits = case
        found, right = (_gradients(name, started, reentrant, waits, rank) for started in (True, False))
        if not all(map(torch.equal, found, right)):
            wrong[case] = found, right
    return wrong


def test_what_was_started_before_a_checkpoint_has_its_gradient_in_it():
    assert run_ranks(_prefetched, 2, group_timeout=30) == [{}, {}]


def _each_block_starts_the_next(rank, reentrant):
    """Prefetch inside checkpoints: correct, or refused where the gradient would be lost."""
    ws = [torch.full((2,), 1.0 + rank + i, requires_grad=True) for i in range(3)]
    handles = {0: dac.start(dac.all_reduce, ws[0])}

    def block(x, i):
        if i + 1 < len(ws):
            handles[i + 1] = dac.start(dac.all_reduce, ws[i + 1])
        return x * handles[i].wait()

    y = torch.ones(2, requires_grad=True)
    for i in range(len(ws)):
        y = checkpoint(block, y, i, use_reentrant=reentrant)
    y.sum().backward()
    return [w.grad.tolist() for w in ws]


def test_starting_in_one_checkpoint_and_waiting_in_the_next():
    # The sums are 3, 5, 7; the gradient of each is the product of the others, times two ranks.
    assert run_ranks(_each_block_starts_the_next, 2, False) == [[[70, 70], [42, 42], [30, 30]]] * 2
    with pytest.raises(RuntimeError, match="was started without gradients"):
        run_ranks(_each_block_starts_the_next, 2, True, group_timeout=30)


def _stops_early(x):
    """A checkpoint's second forward stops as soon as nothing more is needed: here between start and wait."""
    handle = dac.start(dac.all_gather_stack, 2 * x)
    early = x.sin()
    return early.sum() + handle.wait().sum()


# In the others ranks save different tensors for backward: all of them must come back to the collective.
CHECKPOINTED = {
    "started": _stops_early,
    "reduce max": lambda x: dac.reduce(x * x, 0, "max").sum(),
    "gather used on the root": lambda x: torch.stack(dac.gather(x * x, 0)).prod(0).sum(),
    "scatter": lambda x: dac.scatter([x * x, x], 1).sum(),
}


def _checkpointed(rank):
    wrong = {}
    for name, fn in CHECKPOINTED.items():
        right, *found = (torch.tensor([1.5 + rank, 2.0], requires_grad=True) for _ in range(3))
        fn(right).backward()
        for x, reentrant in zip(found, (True, False), strict=True):
            checkpoint(fn, x, use_reentrant=reentrant).backward()
            if not torch.equal(x.grad, right.grad):
                wrong[name, reentrant] = x.grad, right.grad
    return wrong, dac.all_reduce(torch.ones(1)).item()


def test_a_checkpoint_brings_every_rank_back_to_the_collective():
    assert run_ranks(_checkpointed, 2, group_timeout=30) == [({}, 2)] * 2
