"""How a profiler shows jobs of an OrderedWorker, and what ranges do while no profiler runs."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from dist_utils import OrderedWorker
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread, profiler_range


def _add(group):
    dist.all_reduce(torch.ones(2), group=group)


def _threads_of_jobs(config):
    """Profile a job with a name and one without; return the threads on which their ranges are shown."""
    with OrderedWorker(name="mine") as worker:
        worker.submit(_add).wait()
        with profile(experimental_config=config) as profiler:
            with profiler_range("here"):
                worker.submit(_add, name="mine:bucket_3").wait()
            worker.submit(_add).wait()
        worker.submit(_add, name="mine:too_late").wait()
        return [
            (event.name, event.thread)
            for event in profiler.events()
            if event.name == "here" or event.name.startswith("mine")
        ]


def _profiled_jobs(rank):
    del rank
    return _threads_of_jobs(None), _threads_of_jobs(every_thread())


def test_jobs_are_shown_by_name_on_the_workers_thread():
    for of_one_thread, of_all in run_ranks(_profiled_jobs, 2):
        assert [name for name, _ in of_one_thread] == ["here"]
        if every_thread() is None:  # torch 2.6
            continue
        assert sorted(name for name, _ in of_all) == ["here", "mine", "mine:bucket_3"]
        threads = dict(of_all)
        assert threads["mine"] == threads["mine:bucket_3"] != threads["here"]


def test_a_range_is_nothing_while_no_profiler_runs():
    assert profiler_range("one") is profiler_range("two")
    with profile() as profiler:
        asked = []
        thread = threading.Thread(target=lambda: asked.append(profiler_range("elsewhere")))
        thread.start()
        thread.join()
        with profiler_range("here"):
            pass
    assert isinstance(asked[0], torch.profiler.record_function)
    assert "here" in {event.name for event in profiler.events()}
    assert profiler_range("one") is profiler_range("two")


def test_a_range_ends_with_an_error():
    with profile() as profiler, pytest.raises(ValueError, match="mine"), profiler_range("here"):
        raise ValueError("mine")
    assert [event.name for event in profiler.events() if event.name == "here"] == ["here"]
