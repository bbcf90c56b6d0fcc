"""Calls that work alike on every supported torch, and what happens where torch has renamed a private name."""

import json
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.profiler import profile

from dist_utils import OrderedWorker, torch_compat
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import MissingTorchFeatureError, every_thread, private, profiler_range


def _collectives(rank):
    world = dist.group.WORLD
    mine = torch.tensor([rank, rank + 10])
    gathered, gathered_async = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    torch_compat.all_gather_single(gathered, mine)
    torch_compat.all_gather_single(gathered_async, mine, async_op=True).wait()
    part = torch.empty(1, dtype=torch.int64)
    torch_compat.reduce_scatter_single(part, mine)
    start, name = torch_compat.start_traceable_collective, world.group_name
    return {
        "all_gather": (gathered.tolist(), gathered_async.tolist()),
        "reduce_scatter": part.tolist(),
        "all_reduce": start("all_reduce", mine, "sum", name)().tolist(),
        "all_to_all": start("all_to_all_single", mine, [1, 1], [1, 1], name)().tolist(),
        "traceable gather": start("all_gather_into_tensor", mine, 2, name)().tolist(),
        "timeout": torch_compat.group_timeout(world, torch.device("cpu")),
        "no backend": torch_compat.group_timeout(world, torch.device("meta")),
    }


def test_collectives_under_one_name():
    for rank, seen in enumerate(run_ranks(_collectives, 2, group_timeout=33.0)):
        assert seen == {
            "all_gather": ([0, 10, 1, 11], [0, 10, 1, 11]),
            "reduce_scatter": [[1], [21]][rank],
            "all_reduce": [1, 21],
            "all_to_all": [[0, 1], [10, 11]][rank],
            "traceable gather": [0, 10, 1, 11],
            "timeout": timedelta(seconds=33),
            "no backend": default_pg_timeout,
        }


def test_the_end_of_a_backward_pass():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert not torch_compat.inside_backward()

    def notice(_):
        assert torch_compat.inside_backward()
        torch_compat.after_backward(lambda: order.append("after the end"))
        torch_compat.at_end_of_backward(lambda: order.append("end"))

    x.register_hook(lambda _: order.append("first layer"))
    y.register_hook(notice)
    y.sum().backward()
    order.append("behind backward()")
    assert order == ["first layer", "end", "after the end", "behind backward()"]


def test_nothing_is_called_after_a_backward_pass_that_failed():
    called = []

    def fail(_):
        torch_compat.after_backward(lambda: called.append(1))
        raise ValueError("a bad layer")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ValueError, match="a bad layer"):
        x.sum().backward()
    assert not called


def test_versions_count_writes_in_place():
    x = torch.ones(2)
    before = torch_compat.tensor_version(x)
    x.mul_(2)
    x.view(-1).add_(1)
    assert torch_compat.tensor_version(x) == before + 2


def _profiled_jobs(rank):
    """Profile a job with a name and one without; return the threads on which their ranges are shown."""
    found = []
    with OrderedWorker(name="mine") as worker:
        for config in (None, every_thread()):
            worker.submit(dist.barrier).wait()
            with profile(experimental_config=config) as profiler:
                with profiler_range("here"):
                    worker.submit(dist.barrier, name="mine:bucket_3").wait()
                worker.submit(dist.barrier).wait()
            worker.submit(dist.barrier, name="mine:too_late").wait()
            events = [event for event in profiler.events() if event.name.startswith(("here", "mine"))]
            found.append({event.name: event.thread for event in events})
    return found


def test_a_profiler_shows_jobs_by_name_on_the_workers_thread():
    for of_one_thread, of_all in run_ranks(_profiled_jobs, 2):
        assert list(of_one_thread) == ["here"]
        if every_thread() is not None:  # as in torch 2.6
            assert sorted(of_all) == ["here", "mine", "mine:bucket_3"]
            assert of_all["mine"] == of_all["mine:bucket_3"] != of_all["here"]


def test_a_range_is_nothing_while_no_profiler_runs():
    assert profiler_range("one") is profiler_range("two")
    asked = []
    with profile() as profiler:
        thread = threading.Thread(target=lambda: asked.append(profiler_range("elsewhere")))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="mine"), profiler_range("here"):
            raise ValueError("mine")
    assert isinstance(asked[0], torch.profiler.record_function)
    assert [event.name for event in profiler.events() if event.name == "here"] == ["here"]


def test_the_package_can_be_imported_without_any_private_name():
    """The same for the other packages is in integration_tests/test_missing_private_names.py."""
    command = [sys.executable, str(Path(__file__).with_name("missing_names.py")), "dist_utils"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {name: problem for name, problem in found["imports"].items() if problem} == {}
    assert found["bound elsewhere"] == []
    assert "torch._C._current_graph_task_id" in found["imports"]


USES = {
    "_current_graph_task_id": ("torch._C", torch_compat.inside_backward),
    "_engine_run_backward": ("torch.autograd.graph", torch_compat.inside_nested_backward),
    "_ExperimentalConfig": ("torch._C._profiler", torch_compat.every_thread),
    "is_batchedtensor": ("torch._C._functorch", lambda: torch_compat.transformed_as(torch.ones(1))),
    "_get_default_store": ("torch.distributed.distributed_c10d", torch_compat.default_store),
}


@pytest.mark.parametrize("name", USES)
def test_the_function_that_needs_one_names_it(name, monkeypatch):
    owner, use = USES[name]
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(MissingTorchFeatureError, match=rf"^torch 2\..* has no {owner}\.{name}, "):
        use()


@pytest.mark.parametrize(
    ("owner", "place"),
    [("torch._none", r"torch\._none"), (torch.nn.Linear(1, 1), "Linear"), (torch.Tensor, "Tensor")],
)
def test_a_missing_module_and_a_missing_attribute_are_named_in_other_processes_too(owner, place):
    with pytest.raises(
        MissingTorchFeatureError, match=rf"has no {place}\._none, .* needed for a test"
    ) as caught:
        private(owner, "_none", "a test")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
