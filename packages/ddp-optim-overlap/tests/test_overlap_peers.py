"""The meeting of the ranks as on an accelerator, whose streams are stood in for by a CPU without any."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_optim_overlap import CommunicationError, ConfigError
from ddp_optim_overlap.passes import peers as meetings
from ddp_optim_overlap.passes.backward_pass import BackwardPass, PassKind
from ddp_optim_overlap.passes.peers import Peers
from dist_utils import OrderedWorker
from dist_utils.testing import run_ranks

CPU = torch.device("cpu")


class Stream:
    """Everything on it is done when it is enqueued."""

    def __init__(self, _):
        self.waits = 0

    def record_event(self):
        return SimpleNamespace(synchronize=self._wait)

    def _wait(self):
        self.waits += 1


def _as_on_an_accelerator(monkeypatch):
    streams = SimpleNamespace(Stream=Stream, stream=contextlib.nullcontext)
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    monkeypatch.setattr(meetings, "runs_on_host", lambda *_: False)


def _meetings(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        _as_on_an_accelerator(monkeypatch)
        peers = Peers(OrderedWorker(dist.group.WORLD), "test")
        steps, pauses = BackwardPass(PassKind.STEPS, number=7), BackwardPass(PassKind.PAUSED)
        peers.wait()  # before any pass
        peers.meet(1, steps, CPU, failed=False)
        peers.wait()
        peers.wait()
        peers.meet(2, steps, CPU, failed=rank == 1)
        with pytest.raises(CommunicationError, match="another rank failed") as caught:
            peers.wait()
        assert caught.value.report.number == 7
        peers.meet(2 + rank, steps, CPU, failed=False)
        with pytest.raises(ConfigError, match="different backward passes"):
            peers.wait()
        peers.meet(3, pauses if rank == 1 else steps, CPU, failed=False)
        with pytest.raises(ConfigError, match=r"handle\.pause"):
            peers.wait()
        peers.meet(4, BackwardPass(PassKind.JOINED) if rank == 1 else steps, CPU, failed=False)
        peers.wait()


def test_ranks_hear_of_each_other_where_collectives_are_enqueued():
    run_ranks(_meetings, 2)
