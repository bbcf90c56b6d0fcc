"""Every value is in exactly one chunk, shard and piece, for any lengths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_quant_hooks.exchange.planner import cut, shard_lengths
from ddp_quant_hooks.kernels import Layout

few = settings(deadline=None, max_examples=200)
blocks = st.sampled_from([32, 64, 128, 256, 512, 1024])
lengths = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 40))


@few
@given(lengths, st.integers(1, 1 << 24), blocks)
def test_chunks_cover_everything_once_at_block_boundaries(length, most, block):
    most = max(most, length >> 10)  # otherwise there are too many for a test
    spans = cut(length, most, block)
    assert (spans[0].start, spans[-1].stop) == (0, length)
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert {span.start % block for span in spans} == {0}
    assert max(map(len, spans)) <= most + block


@few
@given(lengths, st.integers(1, 300), blocks)
def test_there_is_a_shard_for_each_rank_and_none_is_much_larger(length, ranks, block):
    shards = shard_lengths(length, ranks, block)
    assert (len(shards), sum(shards)) == (ranks, length)
    assert {shard % block for shard in [one for one in shards if one][:-1]} <= {0}
    full = [-(-shard // block) for shard in shards]
    assert max(full) - min(full) <= 1


@few
@given(st.sampled_from(["int8", "int4", "fp16"]), blocks, st.integers(0, 1 << 16))
def test_a_message_is_its_payload_and_a_scale_for_each_block(kind, block, values):
    layout = Layout(kind, block)
    message = torch.empty(layout.message_bytes(values), dtype=torch.uint8)
    scales = layout.scales(message, values)
    assert scales.numel() == layout.blocks(values) == -(-values // block)
    assert layout.message_bytes(values) % 16 == 0, "so that the next one is aligned, too"
    assert 0 <= layout.message_bytes(values) - layout.payload_bytes(values) - scales.nbytes < 16


def test_messages_are_a_quarter_of_fp32():
    assert Layout("int8", 128).message_bytes(1280) == 1280 + 4 * 10 + 8
    assert Layout("int8", 128).message_bytes(1) == 128 + 4 + 12
    assert Layout("int4", 32).message_bytes(640) == 320 + 4 * 20
    assert Layout("fp16", 128).message_bytes(1280) == 2560 + 4 * 10 + 8
    assert Layout("int8", 128).message_bytes(0) == 0
