"""How a bucket is cut: every element once, at block boundaries, identical on all ranks."""

from itertools import pairwise

import pytest

from ddp_quant_hooks.chunks import Span, cut, shard_lengths, shards
from ddp_quant_hooks.wire_format import Layout


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1000, 4096, 99_991])
@pytest.mark.parametrize("most", [1, 64, 1000, 10**6])
def test_chunks_cover_the_bucket_at_block_boundaries(length, most):
    chunks = cut(length, most, 32)
    assert chunks[0].start == 0
    assert chunks[-1].stop == length
    assert all(left.stop == right.start for left, right in pairwise(chunks))
    assert all(chunk.start % 32 == 0 and len(chunk) > 0 for chunk in chunks)
    assert max(map(len, chunks)) <= max(most, 1) + 2 * 32
    if len(chunks) > 4:
        assert len(chunks[0]) <= len(chunks[1])
        assert len(chunks[-1]) <= len(chunks[1]) + 32


@pytest.mark.parametrize("length", [1, 32, 33, 1000, 99_991])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100])
def test_shards_cover_the_chunk_and_differ_by_one_block_at_most(length, ranks):
    parts = shards(Span(64, 64 + length), ranks, 32)
    assert len(parts) == ranks
    assert (parts[0].start, parts[-1].stop) == (64, 64 + length)
    assert all(left.stop == right.start for left, right in pairwise(parts))
    blocks = [-(-len(part) // 32) for part in parts]
    assert max(blocks) - min(blocks) <= 1
    assert shard_lengths(length, ranks, 32) == [len(part) for part in parts]


def test_messages_are_a_quarter_of_fp32():
    assert Layout("int8", 128).message_bytes(1280) == 1280 + 4 * 10
    assert Layout("int8", 128).message_bytes(1) == 128 + 4
    assert Layout("int4", 32).message_bytes(640) == 320 + 4 * 20
    assert Layout("fp16", 128).message_bytes(1280) == 2560 + 4 * 10
    assert Layout("int8", 128).message_bytes(0) == 0
