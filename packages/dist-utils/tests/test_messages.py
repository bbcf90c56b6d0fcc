"""Messages between two ranks: as a batch, and of any length."""

import pytest
import torch
import torch.distributed as dist

from dist_utils import start_messages
from dist_utils.process_groups import all_gather_plain, runs_on_host
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.short


def _exchanged(rank):
    """Every rank sends values of its own to each peer; their number depends on the peer.

    In turn all messages are short, some are, and none is: long ones are posted in another order.
    """
    group, peers = dist.group.WORLD, [peer for peer in range(3) if peer != rank]
    results = []
    for repeat, length in enumerate((1000, 10_000, 100_000)):
        received = {peer: torch.zeros(length * rank) for peer in peers}
        works = start_messages(
            group,
            receives=[(peer, received[peer]) for peer in peers],
            sends=[(peer, torch.full((length * peer,), float(10 * rank + repeat))) for peer in peers],
            tag=repeat,
        )
        for work in works:
            work.wait()
        results.append({peer: received[peer].unique().tolist() for peer in peers})
    with torch.device("meta"):  # the default device is not where plain data travels
        return results, all_gather_plain(None, {"rank": rank, "text": "x" * rank})


def test_everybody_gets_what_everybody_sent():
    """Rank 0 gets nothing: empty tensors are not sent."""
    for rank, (results, gathered) in enumerate(run_ranks(_exchanged, 3)):
        for repeat, found in enumerate(results):
            peers = [peer for peer in range(3) if peer != rank]
            assert found == {peer: [float(10 * peer + repeat)] if rank else [] for peer in peers}
        assert gathered == [{"rank": peer, "text": "x" * peer} for peer in range(3)]


def _refused(rank):
    group, ones = dist.group.WORLD, torch.ones(3)
    gone = dist.new_group([0])
    dist.destroy_process_group(gone)
    for wrong, peer, message in (
        (group, -1, "rank -1 is out of range for a group of 1 ranks"),
        (group, 1, "rank 1 is out of range for a group of 1 ranks"),
        (group, 0, "rank 0 is this one"),
        (dist.GroupMember.NON_GROUP_MEMBER, 0, "not in the group"),
        (gone, 0, "not registered"),
    ):
        with pytest.raises(ValueError, match=message):
            start_messages(wrong, receives=[], sends=[(peer, ones)])
    nothing = start_messages(group, receives=[(0, torch.empty(0))], sends=[])
    return nothing, [runs_on_host(group, torch.device(kind)) for kind in ("cpu", "cuda:0")]


def test_ranks_that_are_no_peers_are_refused_and_gloo_runs_on_the_host_for_every_device():
    assert run_ranks(_refused, 1) == [([], [True, True])]


def _of_another_length(rank):
    """Return the contents of tensors for which no message of their length arrives."""
    group, sent, received = dist.group.WORLD, torch.ones(1000), [torch.zeros(999), torch.zeros(1001)]
    if rank == 0:
        works = [
            work for tag in (0, 1) for work in start_messages(group, receives=[], sends=[(1, sent)], tag=tag)
        ]
    else:
        works = [
            work
            for tag, tensor in enumerate(received)
            for work in start_messages(group, receives=[(0, tensor)], sends=[], tag=tag)
        ]
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    return [tensor.unique().tolist() for tensor in received]


def test_a_message_never_meets_a_tensor_of_another_length():
    assert run_ranks(_of_another_length, 2, group_timeout=2.0)[1] == [[0.0], [0.0]]
