"""Batches that move to a GPU."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dist_utils import recursive_to

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pinned", [False, True])
def test_side_stream_copies_arrive_before_they_are_used(pinned):
    sources = [torch.full((1 << 22,), float(value)) for value in range(8)]
    if pinned:
        sources = [source.pin_memory() for source in sources]
    for _ in range(5):
        (moved,) = recursive_to(sources, "cuda", True)
        sums = [tensor.sum() for tensor in moved]
        del moved  # the next round may reuse its memory only when the sums are done
        assert [total.item() for total in sums] == [value * float(1 << 22) for value in range(8)]


def test_a_packed_sequence_on_a_gpu():
    packed = pack_sequence([torch.ones(3), torch.ones(2)], enforce_sorted=False)
    (moved,) = recursive_to(packed, "cuda", True)
    assert (moved.data.device.type, moved.sorted_indices.device.type) == ("cuda", "cuda")
    assert moved.batch_sizes.device.type == "cpu"
