"""The kernels on any input: all backends on the CPU give the same bits, and write nothing but results.

Every buffer lies between guard bytes, or ends where its memory does, where a sanitizer sees overruns.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import SETS, computed_by, needs_library

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from dist_utils.testing import same_bits

BACKENDS = [(name, CpuKernels(name)) for name in SETS]
FORMATS = ("int8", "int4", "fp16")
BLOCKS = (32, 64, 128, 256, 512, 1024)
GUARD = 0xA5

few = settings(deadline=None, derandomize=True, database=None, max_examples=60)
pytestmark = needs_library


class Guarded:
    """A buffer between guard bytes.

    Args:
        before: The number of guard bytes, in steps of 4: messages and fp32 values may start there.
        after: The number of guard bytes.
    """

    def __init__(self, before, after):
        self.before, self.after = 64 + 4 * before, after
        self.all = []

    def __call__(self, count, dtype=torch.uint8, fill=0):
        size = count * dtype.itemsize
        memory = torch.full((self.before + size + self.after,), GUARD, dtype=torch.uint8)
        buffer = memory[self.before : self.before + size]
        self.all.append((memory, size))
        return buffer.fill_(fill).view(dtype)

    def assert_untouched(self):
        for memory, size in self.all:
            assert (memory[: self.before] == GUARD).all()
            assert (memory[self.before + size :] == GUARD).all()


blocks = st.sampled_from(BLOCKS)


def layout_of(numbers, block_size, rotate):
    """Return a layout whose blocks are rotated if requested and possible."""
    return Layout(numbers, block_size, rotate and numbers != "fp16")


layouts = st.builds(layout_of, st.sampled_from(FORMATS), blocks, st.booleans())
guards = st.builds(Guarded, st.integers(0, 7), st.sampled_from([0, 4, 64]))
dtypes = st.sampled_from(kernels.VALUE_DTYPES)
seeds = st.integers(0, 2**48)
lengths = st.one_of(st.integers(0, 300), st.integers(0, 9000))


def any_values(count, dtype, generator, kind):
    """Return values of any bits, of any magnitude, or some that are halfway between two numbers."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(width).view(dtype)
    if kind == "bits":
        return bits
    if kind == "halves":
        return (torch.randint(-400, 400, (count,), generator=generator) / 2).to(dtype)
    exponents = torch.randint(-149, 127, (1,), generator=generator).float()
    spread = torch.randn(count, generator=generator) * torch.exp2(exponents)
    return spread.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


kinds = st.sampled_from(["bits", "halves", "magnitudes"])


def encoded_and_decoded(buffer, values, other, layout, new_layout, ranks, residual):
    """Run every function on copies of the values in guarded buffers; return what they wrote."""
    count = values.numel()
    given_values = buffer(count, values.dtype).copy_(values)
    kept = None if residual is None else buffer(count, torch.bfloat16).copy_(residual)
    lost = [buffer(count, torch.bfloat16, fill=1) for _ in range(2)]
    messages = [buffer(layout.message_bytes(count)) for _ in range(ranks)]
    kernels.encode(given_values, messages[0], layout, residual=kept, new_residual=lost[0])
    for message in messages[1:]:
        kernels.encode(buffer(count, values.dtype).copy_(other), message, layout)
    reduced = buffer(new_layout.message_bytes(count))
    kernels.reduce(messages, layout, count, reduced, new_layout, residual=kept, new_residual=lost[1])
    means = [buffer(count, dtype, fill=1) for dtype in kernels.VALUE_DTYPES]
    for mean in means:
        kernels.decode(messages, layout, mean)
    lengths = shard_lengths(count, ranks, layout)
    parts = [buffer(layout.message_bytes(length)) for length in lengths]
    kernels.encode_shards(given_values, parts, lengths, layout)
    joined = buffer(count, values.dtype, fill=1)
    kernels.decode_shards([[part] * 2 for part in parts], lengths, layout, joined)
    assert kernels.not_finite(parts, lengths, layout) == (not values.isfinite().all())
    buffer.assert_untouched()
    assert same_bits(given_values, values)
    return [*messages, reduced, *lost, *means, *parts, joined]


def shard_lengths(count, ranks, layout):
    """Return the number of values in each shard: whole blocks, distributed as evenly as possible."""
    total = layout.blocks(count)
    bounds = [min(total * rank // ranks * layout.block_size, count) for rank in range(ranks + 1)]
    return [high - low for low, high in pairwise(bounds)]


@few
@given(
    guards,
    layouts,
    st.sampled_from(FORMATS),
    dtypes,
    lengths,
    st.integers(1, 4),
    seeds,
    kinds,
    st.booleans(),
)
def test_all_that_compute_on_the_cpu_write_the_same(
    buffer, layout, new_format, dtype, count, ranks, seed, kind, with_residual
):
    generator = torch.Generator().manual_seed(seed)
    values, other = (any_values(count, dtype, generator, kind) for _ in range(2))
    residual = any_values(count, torch.bfloat16, generator, "magnitudes") if with_residual else None
    new_layout = layout_of(new_format, layout.block_size, layout.rotate)
    case = values, other, layout, new_layout, ranks, residual
    with computed_by(torch_ops):
        expected = encoded_and_decoded(buffer, *case)
    for name, backend in BACKENDS:
        with computed_by(backend):
            ours = encoded_and_decoded(Guarded(buffer.before // 4 - 16, buffer.after), *case)
        for place, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
            assert same_bits(mine, theirs), (name, place)


def any_message(buffer, layout, count, generator):
    """Return bytes that no kernel would write: scales of any bits, and numbers that encoding never makes."""
    message = buffer(layout.message_bytes(count))
    message.copy_(torch.randint(0, 256, message.shape, generator=generator, dtype=torch.uint8))
    scales = layout.scales(message, count)
    some = torch.rand(scales.shape, generator=generator)
    scales[some < 0.6] = torch.randn(scales.shape, generator=generator)[some < 0.6]
    return message


def read_messages(buffer, layout, new_layout, ranks, count, seed):
    """Read the same bytes, in guarded buffers, as messages; return the results."""
    generator = torch.Generator().manual_seed(seed)
    messages = [any_message(buffer, layout, count, generator) for _ in range(ranks)]
    before = [message.clone() for message in messages]
    means = [buffer(count, dtype, fill=1) for dtype in kernels.VALUE_DTYPES]
    for mean in means:
        kernels.decode(messages, layout, mean)
    reduced, lost = buffer(new_layout.message_bytes(count)), buffer(count, torch.bfloat16)
    kernels.reduce(messages, layout, count, reduced, new_layout, new_residual=lost)
    lengths = shard_lengths(count, ranks, layout)
    parts = [[any_message(buffer, layout, length, generator) for _ in range(2)] for length in lengths]
    joined = buffer(count, torch.float32, fill=1)
    kernels.decode_shards(parts, lengths, layout, joined)
    buffer.assert_untouched()
    assert same_bits(messages, before)
    return means, reduced, lost, joined


@few
@given(guards, layouts, st.sampled_from(FORMATS), st.integers(1, 4), lengths, seeds)
def test_any_bytes_are_read_as_a_message_and_write_nothing_else(
    buffer, layout, new_format, ranks, count, seed
):
    case = layout, layout_of(new_format, layout.block_size, layout.rotate), ranks, count, seed
    with computed_by(torch_ops):
        means, reduced, lost, joined = read_messages(buffer, *case)
    for name, backend in BACKENDS:
        with computed_by(backend):
            ours = read_messages(Guarded(buffer.before // 4 - 16, buffer.after), *case)
        for mine, theirs in zip([*ours[0], ours[3]], [*means, joined], strict=True):
            # It is not specified which NaN a processor makes from two of them.
            assert torch.equal(mine.nan_to_num(1.5), theirs.nan_to_num(1.5)), name
            assert torch.equal(mine.isnan(), theirs.isnan()), name
        assert same_bits(ours[1], reduced), name
        assert same_bits(ours[2], lost), name


affine = st.builds(
    AffineLayout,
    st.integers(0, 3000),
    st.one_of(st.integers(1, 40), st.integers(1, 5000)),
    st.just(torch.float32),
)


@few
@given(guards, affine, dtypes, st.integers(1, 4), seeds, kinds)
def test_affine_messages_of_any_values_and_any_bytes(buffer, layout, dtype, ranks, seed, kind):
    generator, count = torch.Generator().manual_seed(seed), layout.values
    values = buffer(count, dtype).copy_(any_values(count, dtype, generator, kind))
    message = buffer(layout.message_bytes)
    kernels.affine_encode(values, message, layout)
    back = buffer(count, dtype, fill=1)
    kernels.affine_decode([message], layout, back)
    with pytest.raises(ValueError, match="values must be"):
        kernels.affine_encode(values, message, AffineLayout(count + 1, layout.channel, torch.float32))
    garbage = [
        buffer(layout.message_bytes).copy_(
            torch.randint(0, 256, message.shape, generator=generator, dtype=torch.uint8)
        )
        for _ in range(ranks)
    ]
    kernels.affine_decode(garbage, layout, buffer(count, dtype))
    buffer.assert_untouched()
    for start in range(0, count, layout.channel):
        channel, decoded = values[start : start + layout.channel], back[start : start + layout.channel]
        if not channel.isfinite().all():
            assert decoded.isnan().all()
        else:
            assert decoded.isfinite().all()


other = st.one_of(
    st.integers(-3, 3), st.integers(), st.none(), st.booleans(), st.floats(), st.text(max_size=3)
)


@few
@given(st.one_of(st.sampled_from(FORMATS), other), st.one_of(blocks, other), guards, seeds)
def test_what_is_no_layout_is_refused_by_type_or_value(kind, block, buffer, seed):
    try:
        layout = Layout(kind, block)
    except (TypeError, ValueError):
        assert kind not in FORMATS or not (type(block) is int and block in BLOCKS)
        return
    count = 1 + seed % 1000
    assert layout.message_bytes(count) == layout.payload_bytes(count) + 4 * layout.blocks(count)
    assert (layout.blocks(count) - 1) * block < count <= layout.blocks(count) * block
    # A byte too few or too many, or a start inside a number, is refused before anything is written.
    values = buffer(count, torch.float32)
    whole = buffer(layout.message_bytes(count) + 4)
    for wrong in (whole[:-3], whole[:-5], whole[2:-2]):
        with pytest.raises(ValueError, match="message must"):
            kernels.encode(values, wrong, layout)
        with pytest.raises(ValueError, match=r"messages\[0\] must"):
            kernels.decode([wrong], layout, values)
    buffer.assert_untouched()
    assert not whole.any()
