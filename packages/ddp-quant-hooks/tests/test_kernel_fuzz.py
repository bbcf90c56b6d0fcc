"""The kernels on any input: all backends on the CPU give the same bits, and write nothing but results."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import SETS, computed_by, needs_library
from kernel_cases import Memory, affine_everything, differences, everything

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.planner import shard_lengths
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from dist_utils.testing import same_bits

BACKENDS = [(name, CpuKernels(name)) for name in SETS]
FORMATS = ("int8", "int4", "fp16", "int1")

few = settings(deadline=None, max_examples=60)


def layout_of(numbers, block_size, rotate):
    """Return a layout whose blocks are rotated if requested and possible."""
    return Layout(numbers, block_size, rotate and numbers in {"int8", "int4"})


blocks = st.sampled_from([32, 64, 128, 256, 512, 1024])
layouts = st.builds(layout_of, st.sampled_from(FORMATS), blocks, st.booleans())
guards = st.tuples(st.integers(16, 23).map(lambda words: 4 * words), st.sampled_from([0, 4, 64]))
dtypes = st.sampled_from(kernels.VALUE_DTYPES)
seeds = st.integers(0, 2**48)
lengths = st.one_of(st.integers(0, 300), st.integers(0, 9000))
kinds = st.sampled_from(["bits", "halves", "magnitudes"])


def any_values(count, dtype, seed, kind):
    """Return values of any bits, of any magnitude, or some that are halfway between two numbers."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "halves":
        return (torch.randint(-400, 400, (count,), generator=generator) / 2).to(dtype)
    if kind == "bits":
        width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(width).view(dtype)
    exponents = torch.randint(-149, 127, (1,), generator=generator).float()
    spread = torch.randn(count, generator=generator) * torch.exp2(exponents)
    return spread.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@needs_library
@few
@given(guards, layouts, dtypes, lengths, seeds, kinds)
def test_all_that_compute_on_the_cpu_write_the_same(guard, layout, dtype, count, seed, kind):
    values = any_values(count, dtype, seed, kind)
    expected = everything(torch_ops, layout, values, Memory(*guard))
    for name, backend in BACKENDS:
        assert differences(everything(backend, layout, values, Memory(*guard)), expected) == {}, name


def read_messages(backend, memory, layout, new_layout, ranks, count, seed):
    """Read bytes that no kernel would write as messages; return what is made of them."""
    generator = torch.Generator().manual_seed(seed)

    def any_message(length):
        message = memory(layout.message_bytes(length))
        message.copy_(torch.randint(0, 256, message.shape, generator=generator, dtype=torch.uint8))
        scales = layout.scales(message, length)  # some are of any bits
        return message, scales.normal_(generator=generator) if seed % 3 else scales

    messages = [any_message(count)[0] for _ in range(ranks)]
    lengths = shard_lengths(count, ranks, layout.block_size)
    parts = [[any_message(length)[0] for _ in range(2)] for length in lengths]
    before = [message.clone() for message in messages]
    means = {str(dtype): memory(count, dtype) for dtype in [*kernels.VALUE_DTYPES]}
    means["joined"] = memory(count, torch.float32)
    written = {"mean": memory(new_layout.message_bytes(count)), "lost": memory(count, torch.bfloat16)}
    with computed_by(backend):
        for dtype in kernels.VALUE_DTYPES:
            kernels.decode(messages, layout, means[str(dtype)])
        kernels.decode_shards(parts, lengths, layout, means["joined"])
        kernels.reduce(messages, layout, count, written["mean"], new_layout, new_residual=written["lost"])
    memory.assert_untouched()
    assert same_bits(messages, before)
    assert written["lost"].isfinite().all()
    # It is not specified which NaN a processor makes from two of them.
    for name, mean in means.items():
        written |= {name: mean.nan_to_num(), f"NaN of {name}": mean.isnan()}
    return written


@needs_library
@few
@given(guards, layouts, st.sampled_from(FORMATS), st.integers(1, 4), lengths, seeds)
def test_any_bytes_are_read_as_a_message_and_write_nothing_else(
    guard, layout, new_format, ranks, count, seed
):
    case = layout, layout_of(new_format, layout.block_size, layout.rotate), ranks, count, seed
    expected = read_messages(torch_ops, Memory(*guard), *case)
    for name, backend in BACKENDS:
        assert differences(read_messages(backend, Memory(*guard), *case), expected) == {}, name


affine = st.builds(
    AffineLayout,
    st.integers(0, 3000),
    st.one_of(st.integers(1, 40), st.integers(1, 5000)),
    st.just(torch.float32),
)


@few
@given(guards, affine, dtypes, seeds, kinds)
def test_affine_messages_of_any_values_and_any_bytes(guard, layout, dtype, seed, kind):
    values, memory = any_values(layout.values, dtype, seed, kind), Memory(*guard)
    written = affine_everything(kernels.affine_encode, kernels.affine_decode, layout, values, memory)
    channels = zip(values.split(layout.channel), written["NaN of 1"].split(layout.channel), strict=True)
    for channel, is_nan in channels:
        assert is_nan.tolist() == [not channel.isfinite().all()] * len(channel)
    garbage = memory(layout.message_bytes)
    garbage.copy_(torch.randint(0, 256, garbage.shape, generator=torch.Generator().manual_seed(seed)))
    kernels.affine_decode([garbage, written[0]], layout, memory(layout.values, dtype))
    memory.assert_untouched()
