"""Ranks that return, raise, die and hang, as the caller of ``run_ranks`` sees them."""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dist_utils.testing import RankDied, RanksHung, RankTraceback, patience, run_ranks, stop_process


def _sum(rank, start):
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return value.item(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_results_come_back_in_rank_order():
    assert run_ranks(_sum, 3, 10) == [(33, str(rank), "3") for rank in range(3)]


def _add(rank, tensor, module):
    tensor += rank + 1
    dist.barrier()
    module.weight.data.fill_(tensor.item())
    return tensor.item(), module.weight.item()


def test_each_rank_has_copies_of_the_arguments():
    tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
    before = module.weight.item()
    assert run_ranks(_add, 2, tensor, module) == [(1.0, 1.0), (2.0, 2.0)]
    assert (tensor.item(), module.weight.item()) == (0.0, before)
    assert not tensor.is_shared()


def _start_method(_):
    return multiprocessing.get_start_method()


def test_ranks_start_processes_as_their_caller_does():
    """By forking, where that is the default: a DataLoader's workers import nothing."""
    assert run_ranks(_start_method, 1) == [multiprocessing.get_start_method()]


class Custom(Exception):  # noqa: N818
    """Does not survive pickling: its __init__ takes two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _fail(rank, name):
    if rank == 0:
        dist.barrier()
    elif name == "skip":
        pytest.skip("no GPU")
    elif name == "pytest":
        with pytest.raises(ValueError, match="never"):
            pass
    else:
        raise {
            "KeyError": KeyError("lost"),
            "Custom": Custom("one", "two"),
            "exit": SystemExit(0),
            "unknown": _unknown_class()("not here"),
        }[name]


def _unknown_class():
    """Return a class of errors that only this process can import."""
    module = types.ModuleType("only_there")
    sys.modules["only_there"] = module
    module.Unknown = type("Unknown", (Exception,), {"__module__": "only_there"})
    return module.Unknown


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("KeyError", KeyError, "lost"),
        ("Custom", RuntimeError, "Custom: one two"),
        ("pytest", pytest.fail.Exception, "DID NOT RAISE"),
        ("skip", pytest.skip.Exception, "no GPU"),
        ("exit", RankDied, r"sys\.exit\(0\)"),
        ("unknown", RuntimeError, "a rank's error cannot be made here: ModuleNotFoundError"),
    ],
)
def test_an_error_comes_back_with_its_traceback_and_its_type_if_it_pickles(name, kind, text):
    with pytest.raises(kind, match=text) as caught:
        run_ranks(_fail, 2, name)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "dist_utils.testing.server" not in sys.modules  # it changes the garbage collector
    assert "rank 1 raised" in str(caught.value.__cause__)
    assert "in _fail" in str(caught.value.__cause__)


class OnlyThere:
    """Comes back from no other process."""

    def __reduce__(self):
        return _raise, ()


def _raise():
    raise ArithmeticError("made elsewhere")


def _return_oddly(rank, odd):
    if odd == "unknown":
        return None if rank else _unknown_class()()
    if rank == 0:
        return 0
    return OnlyThere() if odd == "unpickle" else lambda: None


@pytest.mark.parametrize(("odd", "text"), [("pickle", "lambda"), ("unpickle", "made elsewhere")])
def test_a_result_that_does_not_come_back_is_an_error_of_its_rank(odd, text):
    with pytest.raises((AttributeError, pickle.PicklingError, ArithmeticError), match=text) as caught:
        run_ranks(_return_oddly, 2, odd, backend=None)
    assert "rank 1 raised" in str(caught.value.__cause__)


def test_a_result_of_a_class_that_the_caller_lacks_is_an_error():
    with pytest.raises(RuntimeError, match="the result of rank 0 cannot be made here: ModuleNotFoundError"):
        run_ranks(_return_oddly, 2, "unknown", backend=None)


def _what_imports_do(rank):
    return dist.get_debug_level().name, np.random.random()  # noqa: NPY002 - NumPy's global state


def test_ranks_read_their_environment_and_draw_their_own_numbers(monkeypatch):
    found = []
    for level in ("DETAIL", "OFF"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        found.append(run_ranks(_what_imports_do, 2, backend=None))
    assert [[level for level, _ in ranks] for ranks in found] == [["DETAIL"] * 2, ["OFF"] * 2]
    assert len({number for ranks in found for _, number in ranks}) == 4


def _die(rank, how):
    if rank == 0:
        with contextlib.suppress(RuntimeError if how == "survived" else ()):
            dist.barrier()
        return "survived"
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        os.abort()
    time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
    os._exit(7)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("signal", "killed by SIGKILL"),
        ("crash", r"killed by SIGABRT\nrank 1 crashed here:\n(?s:.*)in _die"),
        ("exit", "exit code 7"),
    ],
)
def test_a_dead_rank_is_named_though_its_peers_fail_too(how, text):
    with pytest.raises(RankDied, match=f"rank 1 of 2 ended without a result: {text}"):
        run_ranks(_die, 2, how)


def test_ranks_that_may_die_have_no_result():
    assert run_ranks(_die, 2, "survived", may_die={1}) == ["survived", None]


def test_what_a_rank_that_may_die_raises_is_an_error():
    with pytest.raises(KeyError, match="lost"):
        run_ranks(_fail, 2, "KeyError", may_die={1})


def _stop(rank):
    if rank == 1:
        stop_process()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        dist.barrier()
    return "survived"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="cannot stop a process")
def test_a_rank_that_stops_is_noticed_at_the_timeout_and_ended():
    assert run_ranks(_stop, 2, may_die={1}, group_timeout=patience(1.0)) == ["survived", None]
    with pytest.raises(RuntimeError, match="is for a rank of run_ranks"):
        stop_process()


def _hang(rank):
    if rank == 1:
        time.sleep(1000)


def test_a_hang_ends_at_the_timeout_and_names_the_rank_and_the_line():
    with pytest.raises(RanksHung, match=r"ranks \[1\] of 2 did not finish within [\d.]+ s") as caught:
        run_ranks(_hang, 2, backend=None, timeout=2.0)
    line = _hang.__code__.co_firstlineno + 2
    assert f'test_run_ranks.py", line {line} in _hang' in str(caught.value)
    assert "rank 0" not in str(caught.value)  # it has returned, and only waits


def _hang_for_good(rank, folder):
    (folder / f"unfinished-{rank}").write_text(str(os.getpid()))
    (folder / f"unfinished-{rank}").rename(folder / f"pid-{rank}")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(1000)  # with the GIL


_CALLER = """
from pathlib import Path
from dist_utils.testing import run_ranks
from test_run_ranks import _hang_for_good

if __name__ == "__main__":
    run_ranks(_hang_for_good, 2, Path({folder!r}), timeout=600.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="F_SETSIG exists only on Linux")
def test_ranks_that_hang_end_when_their_caller_is_killed(tmp_path):
    (tmp_path / "caller.py").write_text(_CALLER.format(folder=str(tmp_path)))
    caller = subprocess.Popen([sys.executable, str(tmp_path / "caller.py")], env=_environment())
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    try:
        _wait_until(lambda: all(path.exists() for path in pids))
    finally:
        caller.kill()
        caller.wait()
    try:
        _wait_until(lambda: not any(_runs(int(path.read_text())) for path in pids))
    finally:
        for path in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def _environment():
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


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
        ("2", {}, TypeError, ""),
        (2, {"timeout": float("nan")}, ValueError, "timeout must be positive and finite, got nan"),
        (2, {"group_timeout": "60"}, TypeError, ""),
        (torch.cuda.device_count() + 1, {"backend": "nccl"}, ValueError, "nccl needs a GPU per rank: "),
    ],
)
def test_bad_input_starts_nothing(world_size, options, error, message, tmp_path):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        run_ranks(_leave_a_note, world_size, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def _leave_a_note(rank, folder):
    (folder / "ran").touch()


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
    factors = [factor for rank in run_ranks(_crowd, 4, min(os.sched_getaffinity(0))) for factor in rank]
    assert min(factors) >= 1
    assert max(factors) <= 30
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
