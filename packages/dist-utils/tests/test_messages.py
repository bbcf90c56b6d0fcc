"""Messages between two ranks: as a batch, of any length, and through the host's memory."""

import pytest
import torch
import torch.distributed as dist

from dist_utils import start_messages
from dist_utils.process_groups import messages, runs_on_host
from dist_utils.testing import run_ranks


def _start_through_host(group, *, receives, sends, tag=0):
    """Start messages as for an accelerator in a Gloo group; the CPU stands in for the accelerator."""
    incoming, outgoing = ([(rank, t) for rank, t in some if t.numel()] for some in (receives, sends))
    return messages._through_host(group, incoming, outgoing, tag, torch.device("cpu"))


def _exchanged(rank, world_size, start):
    """Every rank sends values of its own to each peer; their number depends on the peer.

    In turn all messages are short, some are, and none is: long ones are posted in another order.
    """
    group, peers = dist.group.WORLD, [peer for peer in range(world_size) if peer != rank]
    results = []
    for repeat, length in enumerate((1000, 10_000, 100_000)):
        received = {peer: torch.zeros(length * rank) for peer in peers}
        works = start(
            group,
            receives=[(peer, received[peer]) for peer in peers],
            sends=[(peer, torch.full((length * peer,), float(10 * rank + repeat))) for peer in peers],
            tag=repeat,
        )
        for work in works:
            work.wait()
        results.append({peer: received[peer].unique().tolist() for peer in peers})
    return results


@pytest.mark.parametrize("start", [start_messages, _start_through_host])
@pytest.mark.parametrize("world_size", [2, 3])
def test_everybody_gets_what_everybody_sent(world_size, start):
    """Rank 0 gets nothing: empty tensors are not sent."""
    for rank, results in enumerate(run_ranks(_exchanged, world_size, world_size, start)):
        for repeat, found in enumerate(results):
            assert found == {
                peer: [float(10 * peer + repeat)] if rank else []
                for peer in range(world_size)
                if peer != rank
            }


def _devices(rank):
    group = dist.group.WORLD
    nothing = start_messages(group, receives=[(0, torch.empty(0))], sends=[])
    for start in (start_messages, _start_through_host):
        for peer in (-1, 1):
            with pytest.raises(ValueError, match=f"rank {peer} is out of range for a group of 1 ranks"):
                start(group, receives=[], sends=[(peer, torch.ones(3))])
        with pytest.raises(ValueError, match="rank 0 is this one"):
            start(group, receives=[(0, torch.ones(3))], sends=[])
    with pytest.raises(ValueError, match="not in the group"):
        start_messages(dist.GroupMember.NON_GROUP_MEMBER, receives=[], sends=[(0, torch.ones(3))])
    gone = dist.new_group([0])
    dist.destroy_process_group(gone)
    with pytest.raises(ValueError, match="not registered"):
        start_messages(gone, receives=[], sends=[(0, torch.ones(3))])
    return nothing, [runs_on_host(group, torch.device(kind)) for kind in ("cpu", "cuda:0")]


def test_gloo_runs_on_the_host_for_every_device():
    assert run_ranks(_devices, 1) == [([], [True, True])]


def _a_peer_is_gone(rank, start):
    if rank == 1:
        return "gone"
    with pytest.raises(RuntimeError):  # noqa: PT012 - raised by the start, or by waiting
        for work in start(dist.group.WORLD, receives=[(1, torch.zeros(5))], sends=[(1, torch.zeros(5))]):
            work.wait()
    return "told"


@pytest.mark.parametrize("start", [start_messages, _start_through_host])
def test_a_peer_that_is_gone_raises(start):
    assert run_ranks(_a_peer_is_gone, 2, start, group_timeout=20) == ["told", "gone"]


def _of_another_length(rank, length):
    """Return the contents of a tensor for which no message of its length arrives."""
    sent, received = torch.ones(1000), torch.zeros(length)
    works = start_messages(
        dist.group.WORLD,
        receives=[(0, received)] if rank else [],
        sends=[] if rank else [(1, sent)],
    )
    with pytest.raises(RuntimeError):
        works[0].wait()
    return received.unique().tolist()


@pytest.mark.parametrize("length", [999, 1001])
def test_a_message_never_meets_a_tensor_of_another_length(length):
    assert run_ranks(_of_another_length, 2, length, group_timeout=2, timeout=30)[1] == [0.0]
