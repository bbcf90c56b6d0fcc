"""Ranks that return, raise, die and hang, as the caller sees them."""

import contextlib
import ctypes
import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.testing import (
    RankDied,
    RanksHung,
    RankTraceback,
    patience,
    run_ranks,
    stop_process,
)


class Custom(Exception):  # noqa: N818
    """Does not survive pickling: its __init__ takes two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _sum(rank, start):
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return value, os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def test_results_come_back_in_rank_order():
    results = run_ranks(_sum, 3, 10)
    assert [(value.item(), rank) for value, rank, _, _ in results] == [(33, "0"), (33, "1"), (33, "2")]
    assert all(world == "3" for _, _, world, _ in results)


def _no_group(rank):
    return dist.is_initialized()


def test_no_backend_means_no_process_group():
    assert run_ranks(_no_group, 1, backend=None) == [False]


def _fail(rank, error):
    if rank == 1:
        raise error
    dist.barrier()


def test_an_error_comes_back_with_its_type_and_traceback():
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(_fail, 2, KeyError("lost"))
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "rank 1 raised" in str(caught.value.__cause__)
    assert "in _fail" in str(caught.value.__cause__)


def _fail_oddly(rank):
    raise Custom("one", "two")


def test_an_error_that_does_not_pickle_keeps_its_name_and_text():
    with pytest.raises(RuntimeError, match="Custom: one two"):
        run_ranks(_fail_oddly, 1, backend=None)


class Unpickled(Exception):  # noqa: N818
    """Becomes something else when unpickled."""

    def __reduce__(self):
        return str, ("text",)


class NotShown(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError

    def __reduce__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"), [(Unpickled, "Unpickled: why"), (NotShown, "NotShown: <exception str")]
)
def test_an_error_that_comes_back_as_something_else_keeps_its_name(error, text):
    with pytest.raises(RuntimeError, match=text):
        run_ranks(_fail_with, 1, error, backend=None)


def _fail_with(rank, error):
    raise error("why")


class OnlyThere:
    """Comes back from no other process."""

    def __reduce__(self):
        return _fail_here, (os.getpid(),)


def _fail_here(pid):
    raise ArithmeticError("made elsewhere")


def _return_oddly(rank, odd):
    dist.barrier()
    if rank == 0:
        return 0
    return OnlyThere() if odd == "unpickle" else lambda: None


@pytest.mark.parametrize("odd", ["pickle", "unpickle"])
def test_a_result_that_does_not_come_back_is_an_error_that_names_the_rank(odd):
    with pytest.raises(TypeError, match=f"the result of rank 1 does not {odd}: "):
        run_ranks(_return_oddly, 2, odd)


def _fail_as_pytest_does(rank):
    with pytest.raises(ValueError, match="never"):
        pass


def test_a_failed_check_of_pytest_comes_back_too():
    with pytest.raises(RuntimeError, match="Failed: DID NOT RAISE") as caught:  # it does not pickle
        run_ranks(_fail_as_pytest_does, 1, backend=None)
    assert "in _fail_as_pytest_does" in str(caught.value.__cause__)


def _imported_for_ddp(rank):
    before = {name for name in sys.modules if name.startswith("torch.")}
    shared = gc.get_freeze_count()
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    return len({name for name in sys.modules if name.startswith("torch.")} - before), shared


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a server that forks")
def test_a_rank_is_forked_with_all_that_a_ddp_model_imports():
    ((imported, shared),) = run_ranks(_imported_for_ddp, 1)
    assert imported < 10  # otherwise about 800
    assert shared > 100_000  # objects that the garbage collector leaves alone


def _init_by_itself(rank):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_function_may_make_its_process_group_from_the_environment():
    assert run_ranks(_init_by_itself, 2, backend=None) == [2.0, 2.0]


def _die(rank, how):
    if rank == 0:
        dist.barrier()
    elif how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(7)


@pytest.mark.parametrize(("how", "text"), [("signal", "SIGKILL"), ("exit", "exit code 7")])
def test_a_dead_rank_is_named_though_its_peers_fail_too(how, text):
    with pytest.raises(RankDied, match=f"rank 1 of 2 .*{text}"):
        run_ranks(_die, 2, how)


def _survive(rank):
    if rank == 1:
        time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
        os._exit(7)
    with pytest.raises(RuntimeError):
        dist.barrier()
    return "survived"


def test_ranks_that_may_die_have_no_result():
    assert run_ranks(_survive, 2, may_die={1}) == ["survived", None]


def _stop(rank):
    if rank == 1:
        stop_process()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        dist.barrier()
    return "survived"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="cannot stop a process")
def test_a_rank_that_stops_is_noticed_at_the_timeout_and_ended():
    assert run_ranks(_stop, 2, may_die={1}, group_timeout=patience(2.0)) == ["survived", None]


def test_only_a_rank_can_be_stopped():
    with pytest.raises(RuntimeError, match="is for a rank of run_ranks"):
        stop_process()


def _hang(rank):
    if rank == 1:
        time.sleep(1000)
    return rank


def test_a_hang_ends_at_the_timeout_and_names_the_rank_and_the_line():
    with pytest.raises(RanksHung) as caught:
        run_ranks(_hang, 2, backend=None, timeout=5.0)
    message = str(caught.value)
    assert re.search(r"ranks \[1\] of 2 did not finish within [\d.]+ s", message), message
    line = _hang.__code__.co_firstlineno + 2
    assert re.search(rf"test_run_ranks.py\", line {line} in _hang", message), message
    assert "rank 0" not in message  # it has returned, and only waits


def _hang_for_good(rank, folder):
    (folder / f"unfinished-{rank}").write_text(str(os.getpid()))
    (folder / f"unfinished-{rank}").rename(folder / f"pid-{rank}")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(1000)  # with the GIL


_CALLER = """
import threading
from pathlib import Path
from dist_utils.testing import run_ranks
from test_run_ranks import _fork_child, _hang_for_good

if __name__ == "__main__":
    folder = Path({folder!r})
    threading.Thread(target=_fork_child, args=(folder,), daemon=True).start()
    run_ranks(_hang_for_good, 2, folder, timeout=600.0)
"""


def _fork_child(folder):
    """Start a process that outlives the caller; it was forked while ranks ran."""
    _wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in range(2)))
    if os.fork() == 0:
        (folder / "unfinished-child").write_text(str(os.getpid()))
        (folder / "unfinished-child").rename(folder / "pid-child")
        time.sleep(1000)


@pytest.mark.skipif(sys.platform != "linux", reason="F_SETSIG exists only on Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_ranks_that_hang_end_when_their_caller_is_killed(how, tmp_path):
    (tmp_path / "caller.py").write_text(_CALLER.format(folder=str(tmp_path)))
    caller = subprocess.Popen([sys.executable, str(tmp_path / "caller.py")], env=_environment(tmp_path))
    pids = [tmp_path / f"pid-{name}" for name in (0, 1, "child")]
    try:
        _wait_until(lambda: all(path.exists() for path in pids))
    finally:
        caller.send_signal(how)
        caller.wait()
    try:
        _wait_until(lambda: not any(_runs(int(path.read_text())) for path in pids[:2]))
        assert _runs(int(pids[2].read_text()))
    finally:
        for path in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int(path.read_text()), signal.SIGKILL)


_CALLER_WITHOUT_OUTPUT = """
from pathlib import Path
from dist_utils.testing import run_ranks
from test_run_ranks import _no_group

if __name__ == "__main__":
    Path({file!r}).write_text(repr(run_ranks(_no_group, 2)))
"""


@pytest.mark.parametrize("closed", [1, 2])
def test_the_caller_may_have_no_standard_output_or_error(closed, tmp_path):
    (tmp_path / "caller.py").write_text(_CALLER_WITHOUT_OUTPUT.format(file=str(tmp_path / "results")))
    command = f'exec "{sys.executable}" "{tmp_path / "caller.py"}" {closed}>&-'
    subprocess.run(["/bin/sh", "-c", command], env=_environment(tmp_path), timeout=patience(60.0), check=True)
    assert (tmp_path / "results").read_text() == "[True, True]"


def _environment(folder):
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def _wait_until(condition):
    deadline = time.monotonic() + patience(30.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("world_size", "options", "error", "message"),
    [
        (0, {}, ValueError, "world_size must be positive and finite, got 0"),
        (2.0, {}, TypeError, "world_size must be of type int, got 2.0"),
        (True, {}, TypeError, "world_size must be of type int, got True"),
        (2, {"timeout": -1}, ValueError, "timeout must be positive and finite, got -1"),
        (2, {"timeout": float("nan")}, ValueError, "timeout must be positive and finite, got nan"),
        (2, {"timeout": "60"}, TypeError, "timeout must be of type float, got '60'"),
        (2, {"group_timeout": 0}, ValueError, "group_timeout must be positive and finite, got 0"),
        (2, {"group_timeout": True}, TypeError, "group_timeout must be of type float, got True"),
    ],
)
def test_bad_input_starts_nothing(world_size, options, error, message, tmp_path):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        run_ranks(_leave_a_note, world_size, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def _leave_a_note(rank, folder):
    (folder / "ran").touch()


def test_nccl_without_enough_gpus_starts_nothing(tmp_path):
    too_many = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"nccl needs a GPU per rank: {too_many} ranks"):
        run_ranks(_leave_a_note, too_many, tmp_path, backend="nccl")
    assert list(tmp_path.iterdir()) == []


def _timeout_of_group(rank):
    return torch_compat.group_timeout(dist.group.WORLD, torch.device("cpu")).total_seconds()


def test_no_collective_gives_up_before_the_launcher():
    """The launcher waits up to thirty times as long for ranks that get no core."""
    assert run_ranks(_timeout_of_group, 1, timeout=20.0) == [600.0]
    assert run_ranks(_timeout_of_group, 1, timeout=20.0, group_timeout=7.0) == [7.0]


class _Late:
    """Loaded by one rank of all ``seconds`` later than by the others."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds

    def __setstate__(self, state):
        self.__dict__ = state
        try:
            (self.folder / "late").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(self.seconds)


def _return_sum(rank, late):
    value = torch.ones(())
    dist.all_reduce(value)
    return value.item()


def test_a_process_may_start_later_than_a_collective_may_take(tmp_path):
    limit = patience(1.0)
    assert run_ranks(_return_sum, 2, _Late(tmp_path, 2 * limit), group_timeout=limit) == [2.0, 2.0]


def _crowd(rank, core):
    os.sched_setaffinity(0, {core})
    dist.barrier()
    factors = [patience(10.0) / 10.0 for _ in range(8)]
    dist.barrier()
    return factors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot choose a core")
def test_patience_grows_with_the_work_of_others():
    ranks = run_ranks(_crowd, 4, min(os.sched_getaffinity(0)))
    factors = [factor for rank in ranks for factor in rank]
    assert all(1 <= factor <= 30 for factor in factors)
    assert sum(factors) / len(factors) > 1.5  # four, were they all computing all the time


def _print(rank, text):
    sys.stdout.write(f"{text} out {rank}\n")
    os.write(2, f"{text} err {rank}\n".encode())


@pytest.mark.parametrize("text", ["first", "second"])  # the server of the ranks starts in an earlier test
def test_ranks_print_to_where_the_caller_does(text, capfd):
    run_ranks(_print, 2, text, backend=None)
    captured = capfd.readouterr()
    assert sorted(captured.out.split("\n")) == ["", f"{text} out 0", f"{text} out 1"]
    assert sorted(captured.err.split("\n")) == ["", f"{text} err 0", f"{text} err 1"]


def test_ranks_print_to_a_file_that_the_caller_has_opened_since(tmp_path):
    kept = os.dup(1)
    for name in ("one", "two"):
        with (tmp_path / name).open("wb") as file:
            os.dup2(file.fileno(), 1)
            try:
                run_ranks(_print, 1, name, backend=None)
            finally:
                os.dup2(kept, 1)
        assert (tmp_path / name).read_text() == f"{name} out 0\n"
    os.close(kept)


@dataclasses.dataclass(frozen=True)
class _FrozenError(Exception):
    code: int


def _raises_frozen(rank):
    raise _FrozenError(7)


def test_an_error_that_takes_no_cause_is_shown():
    with pytest.raises((RuntimeError, _FrozenError), match="7"):
        run_ranks(_raises_frozen, 1)


def _killed_by_a_real_time_signal(rank):
    os.kill(os.getpid(), 37)
    time.sleep(60)


def test_a_signal_without_a_name_is_told_by_its_number():
    with pytest.raises(RankDied, match="killed by signal 37"):
        run_ranks(_killed_by_a_real_time_signal, 1)
