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


def test_the_current_gpu_is_the_same_device_with_and_without_its_index():
    batch = [torch.ones(2, device="cuda")]
    for device in ("cuda", f"cuda:{torch.cuda.current_device()}", torch.cuda.current_device()):
        for side_stream in (False, True):
            assert recursive_to(batch, device, side_stream)[0] is batch
