"""A thread begins, or its start raises and what it was to run is neither called nor kept."""

import threading
import weakref

import pytest

from dist_utils.process_groups.thread_starts import start_thread


class Target:
    def __init__(self):
        self.called = threading.Event()

    def run(self):
        self.called.set()


def test_a_thread_that_begins_runs_its_target():
    target = Target()
    thread = start_thread(target.run, name="worker", seconds=60.0)
    thread.join()
    assert target.called.is_set()
    assert (thread.name, thread.daemon) == ("worker", True)


def test_a_thread_that_begins_too_late_runs_nothing(monkeypatch):
    begin, go, done = threading.Thread._bootstrap, threading.Event(), threading.Event()

    def late(thread):
        go.wait()
        begin(thread)
        done.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", late)
    target = Target()
    called, alive = target.called, weakref.ref(target)
    with pytest.raises(TimeoutError, match=r"'worker' did not begin within 0.1 s"):
        start_thread(target.run, name="worker", seconds=0.1)
    del target
    assert alive() is None
    go.set()
    assert done.wait(60.0)
    assert not called.is_set()


def test_an_error_of_the_start_is_raised(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no thread")))
    target = Target()
    called, alive = target.called, weakref.ref(target)
    with pytest.raises(RuntimeError, match="no thread"):
        start_thread(target.run, name="worker", seconds=60.0)
    del target
    assert alive() is None
    assert not called.is_set()
