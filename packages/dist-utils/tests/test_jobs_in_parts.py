"""Jobs in parts: others begin while one would wait, results and errors are those of whole jobs."""

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dist_utils import OrderedWorker, start_messages
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL


def _exchange(number, group):
    """Send every other rank a number, and then the sum of all; return the sum of what has come."""
    me, others = group.rank(), [rank for rank in range(group.size()) if rank != group.rank()]
    own = torch.tensor([float(number + me)])
    for shot in range(2):
        arrived = {rank: torch.empty(1) for rank in others}
        works = start_messages(
            group,
            receives=[*arrived.items()],
            sends=[(rank, own.clone()) for rank in others],
            tag=2 * number + shot,
        )
        yield
        for work in works:
            work.wait()
        own = own + sum(arrived.values())
    return own.item()


def _many(rank):
    """Return the results of jobs in parts among whole ones, on ranks that are slow at different times.

    The caller uses the default group meanwhile.
    """
    random.seed(rank)
    world_size, ended, futures = dist.get_world_size(), [], []
    with OrderedWorker() as worker:

        def whole(group):
            value = torch.ones(1)
            for _ in range(2):
                dist.all_reduce(value, group=group)
                time.sleep(random.random() / 1000)
            return value.item()

        for number in range(60):
            if number % 7 == 6:
                future = worker.submit(whole)
            else:
                future = worker.submit_in_parts(lambda group, number=number: _exchange(number, group))
            future.then(lambda _, number=number: ended.append(number))
            futures.append(future)
            if number % 5 == 0:
                dist.all_reduce(torch.ones(1))
            if random.random() < 0.3:
                time.sleep(0.01 * random.random())
        worker.wait()
        assert len(ended) == 60
    total = sum(range(world_size))
    expected = [
        world_size**2 if number % 7 == 6 else world_size * (world_size * number + total)
        for number in range(60)
    ]
    return ended == sorted(ended), [future.value() for future in futures] == expected


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_turns_of_their_parts_give_every_rank_the_same_results(ranks):
    assert run_ranks(_many, ranks, group_timeout=patience(20.0)) == [(True, True)] * ranks


def _turns(_):
    """Return the order of parts where a second job is there before the first goes on."""
    begun, order = threading.Event(), []

    def job(name, parts):
        def of_worker(_group):
            for part in range(parts):
                order.append((name, part))
                if name == "first" and part == 0:
                    begun.wait(patience(10.0))
                yield
            return name

        return of_worker

    def whole(_group):
        order.append("whole")

    with OrderedWorker() as worker:
        futures = [worker.submit_in_parts(job("first", 2)), worker.submit_in_parts(job("second", 1))]
        futures.append(worker.submit(whole))
        begun.set()
        results = [future.wait() for future in futures]
    return order, results


def test_later_jobs_begin_while_earlier_ones_pause_and_whole_ones_come_after_all():
    ((order, results),) = run_ranks(_turns, 1)
    assert order == [("first", 0), ("second", 0), ("first", 1), "whole"]
    assert results == ["first", "second", None]


def _fails(rank):
    """Return the errors where a part raises on one rank, of jobs around it."""
    worker, closed = OrderedWorker(), []

    def job(number):
        def parts(group):
            try:
                if number == 2 and rank == 0:
                    yield
                    raise LookupError("a part has failed")
                result = yield from _exchange(number, group)
            finally:
                closed.append(number)
            return result

        return parts

    futures = [worker.submit_in_parts(job(number)) for number in range(5)]
    texts = []
    for future in futures[2:]:
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        texts.append(str(caught.value))
    worker.wait()
    worker.close()
    return futures[0].wait(), texts, sorted(closed)[:3]


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="this torch cannot end a group before its process")
def test_a_part_that_raises_fails_all_jobs_that_have_not_ended_on_every_rank():
    results = run_ranks(_fails, 2, group_timeout=patience(20.0))
    for first, texts, closed in results:
        assert first == 2.0
        assert len(texts) == 3
        assert closed == [0, 1, 2]
    assert all("a part has failed" in text for text in results[0][1])
