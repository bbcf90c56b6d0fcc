"""Overlapped steps in a profiler and in reports."""

import pytest
import torch
from overlap_runs import step_buckets_of
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from ddp_optim_overlap import StepReport, overlap_optimizer
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread


def _watch(rank):
    """Return a report, the names of the overlap's ranges in one pass, and their threads."""
    step_buckets_of(1)
    torch.manual_seed(rank)
    net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(3)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.03)
    handle = overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp(torch.randn(4, 100)).sum().backward()  # after this one DDP forms its final buckets
    ddp.zero_grad()
    handle.wait()
    with profile(experimental_config=every_thread()) as profiler:
        ddp(torch.randn(4, 100)).sum().backward()
        report = handle.wait()
    shown = {
        event.name: event.thread
        for event in profiler.events()
        if event.name.startswith(("overlapped step", "ddp-optim-overlap"))
    }
    return report.as_dict(), shown


@pytest.fixture(scope="module")
def watched():
    return run_ranks(_watch, 2)


def test_every_step_has_a_range_by_name(watched):
    for _, shown in watched:
        if every_thread() is None:  # torch 2.6 shows only the caller's thread
            assert sorted(shown) == []
            continue
        steps = [f"overlapped step:bucket_{index}" for index in range(3)]
        jobs = [f"ddp-optim-overlap:bucket_{index}" for index in range(3)]
        assert sorted(shown) == [*jobs, "ddp-optim-overlap:meet_peers", *steps]
        assert len(set(shown.values())) == 1


def test_reports_as_plain_numbers(watched):
    for reported, _ in watched:
        assert all(type(value) in (int, float) for value in reported.values())
        assert (reported["number"], reported["buckets"], reported["stepped"]) == (2, 3, 3)
        assert reported["hidden_ratio"] == reported["seconds_hidden"] / reported["seconds"]
    report = StepReport(7, 4, (0, 2), (3,), 0.5, 0.25, torch.tensor(1.5))
    assert report.as_dict() == {
        "number": 7,
        "buckets": 4,
        "stepped": 2,
        "partial": 1,
        "seconds": 0.5,
        "seconds_hidden": 0.25,
        "hidden_ratio": 0.5,
        "norm": 1.5,
    }
    assert not {"hidden_ratio", "norm"} & set(StepReport().as_dict())
