"""What a profiler shows of overlapped steps."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from ddp_optim_overlap import OverlapMode, overlap_optimizer
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread


def _ranges(rank):
    """Return, for each mode, the names of the overlap's ranges in one pass, and their threads."""
    found = []
    for mode in OverlapMode:
        torch.manual_seed(rank)
        net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(3)])
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.03)
        handle = overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode=mode)
        ddp(torch.randn(4, 100)).sum().backward()  # after this one DDP forms its final buckets
        ddp.zero_grad()
        handle.wait()
        with profile(experimental_config=every_thread()) as profiler:
            ddp(torch.randn(4, 100)).sum().backward()
            handle.wait()
        found.append(
            {
                event.name: event.thread
                for event in profiler.events()
                if event.name.startswith(("overlapped step", "ddp-optim-overlap"))
            }
        )
    return found


def test_every_step_has_a_range_by_name():
    for by_bucket, whole in run_ranks(_ranges, 2):
        assert "overlapped step" in whole
        if every_thread() is None:  # torch 2.6 shows no thread but the caller's
            assert sorted(by_bucket) == []
            continue
        steps = [f"overlapped step:bucket_{index}" for index in range(3)]
        jobs = [f"ddp-optim-overlap:bucket_{index}" for index in range(3)]
        meeting = "ddp-optim-overlap:meet_peers"
        assert sorted(by_bucket) == [*jobs, meeting, *steps]
        assert len(set(by_bucket.values())) == 1
        assert sorted(whole) == ["ddp-optim-overlap:averages", meeting, "overlapped step"]
        assert whole["overlapped step"] != whole[meeting]
