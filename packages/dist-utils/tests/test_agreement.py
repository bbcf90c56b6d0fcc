"""Ranks compare what must be alike before they communicate: an error on every rank, never a hang."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from simulated_bucket import SimulatedBucket

from dist_utils import AgreementError, require_same_terms
from dist_utils.comm_hooks import require_same_bucket, require_same_call
from dist_utils.process_groups import agreement, all_gather_plain
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import default_store

SHORT = timedelta(seconds=0.5)


def _outcome(title, terms=None, group=None, **options):
    try:
        return require_same_terms(group, title, terms, **options)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"


def _rounds(rank):
    """Agreement, differences of every kind, a missing rank, a problem, and agreement again after each."""
    names = [f"n{number}" for number in range(20)]
    shuffled = names if rank else names[::-1]
    seen = {
        "same": _outcome("hook", {"bits": 8, "gather": "int8"}),
        "order": _outcome(
            "hook", {"sets": [set(shuffled), {"a": frozenset(shuffled)}, dict.fromkeys(shuffled)]}
        ),
        "value": _outcome("hook", {"bits": 4 if rank == 1 else 8, "gather": "bf16" if rank == 2 else "int8"}),
        "set": _outcome("hook", {"names": set(names[rank:])}),
        "name": _outcome("hook", {"bits": 8} if rank else {}),
        "title": _outcome("fp16" if rank == 0 else "bf16", {"bits": rank}),
        "again": _outcome("hook", {"bits": 8}),
    }
    for late in (0, 1):  # rank 0 reads what all have said
        dist.barrier()
        if rank != late:
            seen["missing", late] = _outcome("hook", {"bits": 8}, timeout=SHORT)
        dist.barrier()
        seen["after", late] = _outcome("hook", {"bits": 8})
    if rank:
        seen["pair"] = _outcome(
            "pair", {"rank": rank}, dist.new_group([1, 2], use_local_synchronization=True)
        )
    return seen


def test_every_rank_hears_the_same_difference_and_the_next_attempt_is_a_new_one():
    ranks = run_ranks(_rounds, 3)
    for name in ranks[2]:
        assert len({seen[name] for seen in ranks if name in seen}) == 1, [seen.get(name) for seen in ranks]
    seen = {**ranks[0], **ranks[2]}
    agreed = [seen[name] for name in ("same", "order", "again", ("after", 0), ("after", 1))]
    assert [name for name in agreed if "Error" in name] == []
    assert len(set(agreed)) == len(agreed), "names are not used again"
    assert seen["value"] == (
        "AgreementError: hook differs between ranks: bits is 8 on ranks 0, 2, 4 on rank 1; "
        "gather is 'int8' on ranks 0, 1, 'bf16' on rank 2"
    )
    for name, text in {
        "set": "names is set of 'n0', 'n1'",
        "name": "bits is not there on rank 0, 8 on ranks 1, 2",
        "title": "different things: fp16 on rank 0, bf16 on ranks 1, 2",
        ("missing", 0): "ranks [1, 2] came within 0.5 s, ranks [0] did not",
        ("missing", 1): "ranks [0, 2] came within 0.5 s, ranks [1] did not",
        "pair": "rank is 1 on rank 1, 2 on rank 2",
    }.items():
        assert text in seen[name]


class _NotShown:
    def __init__(self, error):
        self._error = error

    def __repr__(self):
        raise self._error


WRONG = {
    "problem": ({"problem": ValueError("no bits")}, "ValueError: no bits"),
    "terms": ({"terms": [1]}, "AttributeError: "),
    "timeout": ({"timeout": 3}, "TypeError: timeout must be a datetime.timedelta"),
    "no repr": ({"terms": {"a": _NotShown(LookupError("no text"))}}, "LookupError: no text"),
    "exits": ({"terms": {"a": _NotShown(SystemExit(3))}}, "SystemExit: 3"),
}


def _long_terms(rank):
    equal, different = [_outcome("hook", {"names": ("ab" * (3 << 19))[own:]}) for own in (0, rank)]
    problem = ValueError("ab" * (5 << 20)) if rank == 1 else None  # more than the store takes in one value
    return equal, different, _outcome("hook", {}, problem=problem)[:60]


def test_terms_of_megabytes_that_differ_are_an_error_on_every_rank():
    ranks = run_ranks(_long_terms, 3)  # the store takes the terms of each, but not all in one value
    assert len({equal for equal, *_ in ranks}) == len({different for _, different, _ in ranks}) == 1
    told = ["AgreementError: hook: rank 1 cannot go on: ValueError: abab", "ValueError: abab"]
    assert [problem.startswith(told[rank == 1]) for rank, (*_, problem) in enumerate(ranks)] == [True] * 3
    assert ranks[0][1].startswith("AgreementError: hook differs between ranks: names is 'abab")
    assert ranks[0][1].endswith("ab ...")


def _wrong_arguments(rank, wrong_rank):
    seen = {}
    for name, (wrong, _) in WRONG.items():
        seen[name] = _outcome(**({"title": "hook"} | (wrong if rank == wrong_rank else {})))
        require_same_terms(None, "the ranks are still in step")
    terms = WRONG["no repr"][0]["terms"] if rank == wrong_rank else {}
    with pytest.raises((LookupError, AgreementError)) as caught:
        require_same_call(dist.new_group(), "hook", terms)
    seen["call"] = f"{type(caught.value).__name__}: {caught.value}"
    return seen


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_whatever_is_wrong_on_one_rank_is_raised_there_and_told_to_all_others(wrong_rank):
    ranks = run_ranks(_wrong_arguments, 2, wrong_rank)
    for name, (_, expected) in {**WRONG, "call": WRONG["no repr"]}.items():
        own, told = ranks[wrong_rank][name], ranks[1 - wrong_rank][name]
        assert own.startswith(expected)
        assert told == f"AgreementError: hook: rank {wrong_rank} cannot go on: {own}"


def _interrupted_between_rounds(rank):
    """Rank 1 gets a signal when all know that digests differ, before it reads that."""
    processes = all_gather_plain(None, os.getpid())
    first = f"dist_utils/0/{dist.group.WORLD.group_name}:0/0/digests"

    def interrupt(*_):
        raise TimeoutError("alarm")

    def await_key(key):
        while not default_store().check([f"{first}/{key}"]):
            time.sleep(0.01)

    def interrupt_peer():
        await_key("verdict")
        os.kill(processes[1], signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            await_key(1)
            time.sleep(1.0)  # by now the other rank has looked for the verdict, and does so only once
            threading.Thread(target=interrupt_peer).start()
        else:
            patch.setattr(agreement, "_pause", lambda _: 1000.0)
        outcome = _outcome("hook", {"bits": rank})
    return outcome, [_outcome("hook", {"bits": 8}) for _ in range(3)]


def test_a_rank_that_leaves_while_terms_are_told_is_in_step_afterwards():
    (error, names), (interrupt, others) = run_ranks(_interrupted_between_rounds, 2)
    assert interrupt == "TimeoutError: alarm"
    assert error == "AgreementError: hook: rank 1 stopped waiting: TimeoutError('alarm')"
    assert names == others
    assert len({name for name in names if len(name) == 32}) == 3


def _threads(rank):
    """Two threads per rank use two groups in different orders on each rank: none blocks another."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    names = [None, None]

    def come(index):
        names[index] = require_same_terms(groups[index], f"group {index}")

    threads = [threading.Thread(target=come, args=(index,)) for index in ((0, 1), (1, 0))[rank]]
    threads[0].start()
    time.sleep(0.3)
    threads[1].start()
    for thread in threads:
        thread.join()
    return names


def test_threads_use_two_groups_in_any_order():
    first, second = run_ranks(_threads, 2)
    assert first == second
    assert first[0] != first[1]


def _threads_of_one_group(_):
    """The calls of all threads are equal: it does not matter which threads of two ranks meet."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda _: _outcome("hook"), range(60)))


def test_threads_that_make_equal_calls_in_one_group_all_meet():
    first, second = run_ranks(_threads_of_one_group, 2)
    assert set(first) == set(second)
    assert len(set(first)) == 60


def _restarted(rank):
    """Rank 1 of an attempt dies while it waits; that of the next attempt comes later than rank 0."""
    if rank == 1:
        dead = os.fork()
        if dead == 0:
            require_same_terms(None, "of the dead attempt")
        time.sleep(1.0)
        os.kill(dead, signal.SIGKILL)
        os.waitpid(dead, 0)
    dist.barrier()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    time.sleep(0.5 * rank)
    return _outcome("hook")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_what_a_dead_attempt_has_left_in_the_store_is_no_answer():
    first, second = run_ranks(_restarted, 2)
    assert first == second
    assert "Error" not in first


def _counted_differently(rank):
    """The agents of two machines have counted a restart differently, and the store is the attempt's own."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    return _outcome("hook")


def test_ranks_meet_in_a_store_of_their_own_whatever_their_agents_have_counted():
    first, second = run_ranks(_counted_differently, 2)
    assert first == second
    assert "Error" not in first


def _alone(rank):
    assert require_same_terms(None, "hook") != require_same_terms(None, "hook")
    return _outcome("hook", problem=ValueError("no bits"))


def test_one_rank_agrees_with_itself():
    assert run_ranks(_alone, 1) == ["ValueError: no bits"]


def _keys_and_threads(rank):
    store = default_store()
    require_same_terms(None, "first")
    dist.barrier()
    keys, threads = store.num_keys(), threading.active_count()
    dist.barrier()
    for number in range(100):
        require_same_terms(None, "hook", {"number": number})
    assert "differs" in _outcome("hook", {"rank": rank})
    dist.barrier()
    return store.num_keys() - keys, threading.active_count() - threads


def test_agreements_leave_no_key_and_no_thread():
    assert run_ranks(_keys_and_threads, 3) == [(0, 0)] * 3


def _known(rank):
    """What is known is not compared again: one rank alone returns. A refusal is raised again."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    names = [f"n{number}" for number in range(20)]
    for step in range(2):
        if step == 0 or rank == 0:
            shuffled = names if rank == step else names[::-1]
            unordered = {"set": set(shuffled), "dict": {"a": dict.fromkeys(shuffled)}}
            require_same_call(None, "call", dict.fromkeys(shuffled, unordered))
            for title in ("one", "two"):
                for index, parameter in enumerate(parameters):
                    require_same_bucket(None, title, {"bits": 8}, SimulatedBucket(parameter, index=index))
            for number in range(30):
                require_same_call(
                    None, "call", {"key": f"layer {number}", "text": "\ud800"}, [torch.ones(number)]
                )
    dist.barrier()
    messages, longer_on_rank_1 = [], torch.nn.Parameter(torch.ones(3 + rank))
    for call in (
        lambda group: require_same_bucket(group, "ab"[rank], {}, SimulatedBucket(parameters[0])),
        lambda group: require_same_bucket(group, "a", {"bits": 4 + rank}, SimulatedBucket(parameters[0])),
        lambda group: require_same_bucket(group, "a", {}, SimulatedBucket(parameters[0], index=rank)),
        lambda group: require_same_bucket(group, "a", {}, SimulatedBucket(longer_on_rank_1)),
        lambda group: require_same_call(group, "a", {"key": "ab"[rank]}),
        lambda group: require_same_call(group, "a", {}, [torch.ones(1 + rank)]),
    ):
        group = dist.new_group()
        with pytest.raises(AgreementError) as caught:
            call(group)
        messages.append(str(caught.value))
        if rank == 0:  # without another comparison, for anything in this group
            with pytest.raises(AgreementError) as again:
                require_same_bucket(group, "one", {"bits": 8}, SimulatedBucket(parameters[0]))
            assert str(again.value) == messages[-1]
        dist.barrier()
    require_same_bucket(dist.new_group(), "one", {"bits": 8}, SimulatedBucket(parameters[0]))
    return messages


def test_a_bucket_or_a_call_is_compared_once_and_a_refusal_is_raised_again():
    first, second = run_ranks(_known, 2)
    assert first == second
    expected = (
        "a on rank 0, b on rank 1",
        "bits is 4 on rank 0, 5 on rank 1",
        "index of the bucket is 0 on rank 0, 1 on rank 1",
        "values in the bucket is 3 on rank 0, 4 on rank 1",
        "key is 'a' on rank 0, 'b' on rank 1",
        "tensors is [(1, torch.float32, 'cpu')] on rank 0, [(2, ",
    )
    for message, text in zip(first, expected, strict=True):
        assert text in message
