"""Ranks compare what must be identical before they communicate: an error on every rank, never a hang."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dist_utils import AgreementError, require_same_terms
from dist_utils.testing import run_ranks


def _caught(title, terms=None, group=None, **options):
    try:
        return require_same_terms(group, title, terms, **options)
    except (AgreementError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _rounds(rank):
    """Agreement, differences of every kind, a missing rank, a problem, and agreement again after each."""
    seen = {"same": _caught("hook", {"bits": 8, "gather": "int8"})}
    seen["value"] = _caught(
        "hook", {"bits": 4 if rank == 1 else 8, "gather": "bf16" if rank == 2 else "int8"}
    )
    seen["name"] = _caught("hook", {"bits": 8} if rank else {})
    seen["title"] = _caught("fp16" if rank == 0 else "bf16", {"bits": rank})
    problem = ValueError("no bits") if rank == 2 else None
    seen["problem"] = _caught("hook", {"bits": 8}, problem=problem)
    seen["again"] = _caught("hook", {"bits": 8})
    dist.barrier()
    if rank != 1:
        seen["missing"] = _caught("hook", {"bits": 8}, timeout=timedelta(seconds=0.5))
    dist.barrier()
    seen["after"] = _caught("hook", {"bits": 8})
    if rank:
        seen["pair"] = _caught("pair", {"rank": rank}, dist.new_group([1, 2], use_local_synchronization=True))
    return seen


def test_every_rank_hears_the_same_difference_and_the_next_attempt_is_a_new_one():
    seen = run_ranks(_rounds, 3)
    for key in ("same", "again", "after"):
        assert len({one[key] for one in seen}) == 1
        assert "Error" not in seen[0][key]
    assert len({seen[0][key] for key in ("same", "again", "after")}) == 3, "names are not used again"
    for one in seen:
        assert one["value"] == (
            "AgreementError: hook differs between ranks: bits is 8 on ranks 0, 2, 4 on rank 1; "
            "gather is 'int8' on ranks 0, 1, 'bf16' on rank 2"
        )
        assert "bits is not there on rank 0, 8 on ranks 1, 2" in one["name"]
        assert "different things: fp16 on rank 0, bf16 on ranks 1, 2" in one["title"]
    assert seen[2]["problem"] == "ValueError: no bits"
    for one in seen[:2]:
        assert one["problem"] == "AgreementError: hook: rank 2 cannot go on: ValueError: no bits"
    assert seen[0]["missing"] == seen[2]["missing"]
    assert "ranks [0, 2] came within 0.5 s, ranks [1] did not" in seen[0]["missing"]
    assert seen[1]["pair"] == seen[2]["pair"]
    assert "rank is 1 on rank 1, 2 on rank 2" in seen[1]["pair"]


def _first_is_missing(rank):
    """The rank that reads all claims is the one that is missing; later all take part."""
    start = time.monotonic()
    missing = _caught("hook", timeout=timedelta(seconds=0.5)) if rank else ""
    seconds = time.monotonic() - start
    dist.barrier()
    return missing, seconds, _caught("hook")


def test_the_first_rank_may_be_the_one_that_is_missing():
    (_, _, name), *others = run_ranks(_first_is_missing, 3)
    for missing, seconds, other in others:
        assert "ranks [1, 2] came within 0.5 s, ranks [0] did not" in missing
        assert seconds < 20
        assert other == name


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


def _another_life(rank, port):
    """The default group is destroyed and made again on the same store, in the same process."""
    names = []
    for _ in range(2):
        store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(len(names)), store), rank=rank, world_size=2
        )
        names.append(require_same_terms(None, "hook", {"bits": 8}))
        dist.barrier()
        dist.destroy_process_group()
    return names


def test_a_second_process_group_on_the_same_store_agrees_again():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_ranks(_another_life, 2, server.port, backend=None)
    assert first == second
    assert first[0] != first[1]


def _restarted(rank, attempt):
    """Keys that a dead attempt left in the job's store do not affect the next attempt."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # as if the attempt before had ended in the middle of its first round
        store.set(f"dist_utils/terms/0/{dist.group.WORLD.group_name}:0/0/1", '["hook", {}, ""]')
    dist.barrier()
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        missing = _caught("hook", timeout=timedelta(seconds=0.5)) if rank == 0 else ""
        dist.barrier()
        return missing, time.monotonic() - start, require_same_terms(None, "hook")


def test_a_restarted_job_ignores_keys_of_the_dead_attempt():
    (missing, _, name), (_, _, other) = run_ranks(_restarted, 2, 1)
    assert "ranks [1] did not" in missing
    assert name == other


def _alone(rank):
    assert require_same_terms(None, "hook") != require_same_terms(None, "hook")
    with pytest.raises(ValueError, match="no bits"):
        require_same_terms(None, "hook", problem=ValueError("no bits"))


def test_one_rank_agrees_with_itself():
    run_ranks(_alone, 1)


def _keys_and_threads(rank, agreements):
    """Many agreements, among them failed ones, leave nothing in the store and start no thread."""
    store = dist.distributed_c10d._get_default_store()
    require_same_terms(None, "first")
    dist.barrier()
    keys, threads = store.num_keys(), threading.active_count()
    dist.barrier()
    for number in range(agreements):
        assert "Error" not in _caught("hook", {"number": number})
    assert "differs" in _caught("hook", {"rank": rank})
    dist.barrier()
    return store.num_keys() - keys, threading.active_count() - threads


@pytest.mark.parametrize("agreements", [300, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_agreements_leave_no_key_and_no_thread(agreements):
    assert run_ranks(_keys_and_threads, 3, agreements, timeout=200) == [(0, 0)] * 3


class _NotShown:
    def __init__(self, error):
        self._error = error

    def __repr__(self):
        raise self._error


def _odd_terms(rank):
    """Equal terms in another order are equal; whatever a rank cannot say is told to the others."""
    numbers = list(range(50)) if rank else list(reversed(range(50)))
    seen = {"nested": _caught("hook", {"sets": [{str(number) for number in numbers}, {"a": set(numbers)}]})}
    for name, wrong in (
        ("names", {"terms": {1: "a"}}),
        ("negative", {"timeout": timedelta(seconds=-1)}),
        ("silent", {"terms": {"a": _NotShown(LookupError("no text"))}}),
        ("exits", {"terms": {"a": _NotShown(SystemExit(3))}}),
    ):
        try:
            seen[name] = _caught("hook", **(wrong if rank else {"terms": {"a": 1}}))
        except (TypeError, LookupError, SystemExit) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    return seen


def test_equal_terms_are_equal_in_any_order_and_problems_are_told():
    first, second = run_ranks(_odd_terms, 2)
    assert first["nested"] == second["nested"]
    assert "Error" not in first["nested"]
    for name, kind in (("names", "TypeError"), ("negative", "ValueError"), ("silent", "LookupError")):
        assert second[name].startswith(kind)
        assert first[name] == f"AgreementError: hook: rank 1 cannot go on: {second[name]}"
    assert (first["exits"], second["exits"]) == (
        "AgreementError: hook: rank 1 cannot go on: SystemExit: 3",
        "SystemExit: 3",
    )
