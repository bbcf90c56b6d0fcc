"""The CUDA backend's logic without a GPU: its launches and its kernels, on an emulated GPU."""

import pytest
import torch
from emulated_gpu import EmulatedGpu, needs_compiler
from kernel_backends import computed_by
from test_kernel_bits import every_length, everything, inputs, inputs_of, some_lengths

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.spans import shard_lengths
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.job import Job
from dist_utils.testing import same_bits

pytestmark = needs_compiler
LAYOUTS = [
    *(Layout("int8", block) for block in (32, 128, 512, 1024)),
    *(Layout("int4", block) for block in (32, 256)),
    *(Layout("int8", block, rotate=True) for block in (32, 128, 1024)),
    Layout("int4", 32, rotate=True),
    Layout("fp16", 64),
]
QUICK_LAYOUTS = [Layout("int8", 128, rotate=True), Layout("int4", 32)]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return EmulatedGpu(tmp_path_factory.mktemp("emulated_gpu"))


def _name(layout):
    return f"{layout.format}-{layout.block_size}" + ("-rotate" if layout.rotate else "")


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        *(pytest.param(layout, some_lengths, id=_name(layout)) for layout in QUICK_LAYOUTS),
        *(
            pytest.param(
                layout,
                every_length,
                id=f"{_name(layout)}, exhaustive",
                marks=pytest.mark.exhaustive,
            )
            for layout in LAYOUTS
        ),
    ],
)
def test_the_kernels_text_gives_the_bits_of_torchs_operators(gpu, layout, lengths):
    dtypes = kernels.VALUE_DTYPES
    gpu.plan(lambda: [everything(gpu, layout, d, torch.ones(3, dtype=d)) for d in dtypes])
    for dtype in dtypes:
        for length in lengths(layout.block_size):
            for name, values in inputs_of(layout, dtype, length):
                ours = everything(gpu, layout, dtype, values)
                reference = everything(torch_ops, layout, dtype, values)
                for what, tensor in reference.items():
                    assert same_bits(ours[what], tensor), (length, name, what)


def _guarded(length, dtype, offset):
    """Return a tensor that starts ``offset`` elements into memory, and all that memory, of sevens."""
    memory = torch.full((length + 64,), 7, dtype=dtype)
    return memory[offset : offset + length], memory


@pytest.mark.parametrize("dtype", kernels.VALUE_DTYPES)
@pytest.mark.parametrize("layout", [Layout("int8", 128), Layout("int4", 32)], ids=["int8", "int4"])
def test_memory_may_start_anywhere_and_nothing_beside_it_is_touched(gpu, layout, dtype):
    length = 5 * layout.block_size - 3
    noise = torch.randn(length).to(dtype)
    message = torch.zeros(layout.message_bytes(length), dtype=torch.uint8)
    lost, restored = torch.empty(length, dtype=torch.bfloat16), torch.empty(length, dtype=dtype)
    with computed_by(torch_ops):
        kernels.encode(noise, message, layout, residual=torch.ones_like(lost), new_residual=lost)
        kernels.decode([message, message], layout, restored)
    for offset in (4, 6, 8):
        values, _ = _guarded(length, dtype, offset)
        values.copy_(noise)
        residual, _ = _guarded(length, torch.bfloat16, offset)
        residual.fill_(1)
        own_message, message_memory = _guarded(message.numel(), torch.uint8, offset // 4 * 4)
        own_lost, lost_memory = _guarded(length, torch.bfloat16, offset)
        own_restored, restored_memory = _guarded(length, dtype, offset)
        with computed_by(gpu):
            kernels.encode(values, own_message, layout, residual=residual, new_residual=own_lost)
            kernels.decode([own_message, own_message], layout, own_restored)
        for own, memory, expected in (
            (own_message, message_memory, message),
            (own_lost, lost_memory, lost),
            (own_restored, restored_memory, restored),
        ):
            assert same_bits(own, expected)
            before = own.storage_offset()
            assert (memory[:before] == 7).all()
            assert (memory[before + own.numel() :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, pytest.param(100, marks=pytest.mark.exhaustive), 200])
def test_shards_are_one_launch_each_hundred_or_so(gpu, count, dtype):
    layout, values = Layout("int8", 128), torch.randn(128 * 150 - 5).to(dtype)
    lengths = shard_lengths(len(values), count, 128)
    residual = (values / 3).bfloat16()
    gpu.launches.clear()
    results = []
    for backend in (gpu, torch_ops):
        messages = [torch.zeros(layout.message_bytes(length), dtype=torch.uint8) for length in lengths]
        restored, lost, mean = torch.zeros_like(values), torch.zeros_like(residual), torch.zeros(len(values))
        with computed_by(backend):
            kernels.encode_shards(values, messages, lengths, layout, residual=residual, new_residual=lost)
            kernels.decode_shards([[message] for message in messages], lengths, layout, restored)
            kernels.decode_shards([[message] * 3 for message in messages], lengths, layout, mean)
        results.append([*messages, lost, restored, mean])
    assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))
    not_empty = sum(length > 0 for length in lengths)
    assert sum(height for _, _, height in gpu.launches) == 3 * not_empty
    # 48 bytes a shard, or 64 with three messages, 4096 for a launch.
    assert len(gpu.launches) == 2 * -(-not_empty // 85) + -(-not_empty // 64)


@pytest.mark.parametrize("ranks", [9, pytest.param(100, marks=pytest.mark.exhaustive), 600])
def test_any_number_of_ranks(gpu, ranks):
    """About 500 messages fit into a launch; for more, torch's operators compute the mean."""
    layout, values = Layout("int8", 64), torch.randn(ranks, 150)
    messages = [torch.zeros(layout.message_bytes(150), dtype=torch.uint8) for _ in range(ranks)]
    for row, message in zip(values, messages, strict=True):
        kernels.encode(row, message, layout)
    gpu.launches.clear()
    results = []
    for backend in (gpu, torch_ops):
        mean, restored = torch.zeros_like(messages[0]), torch.zeros(150)
        with computed_by(backend):
            kernels.reduce(messages, layout, 150, mean, layout)
            kernels.decode(messages, layout, restored)
        results.append((mean, restored))
    assert all(same_bits(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert len(gpu.launches) == (2 if ranks < 500 else 0)


def test_a_tensor_of_more_elements_than_32_bits_count(gpu):
    """Only the last thread blocks run, and only their memory is ever there."""
    layout, length = Layout("int8", 128), 2**32 + 1000
    values = torch.empty(length, dtype=torch.bfloat16)
    message = torch.empty(layout.message_bytes(length), dtype=torch.uint8)
    restored = torch.empty(length, dtype=torch.bfloat16)
    tail = 2048 + 1000
    values[-tail:] = torch.randn(tail)
    last, message_of_last = values[-tail:], torch.empty(layout.message_bytes(tail), dtype=torch.uint8)
    expected = torch.empty_like(last)
    with computed_by(torch_ops):
        kernels.encode(last, message_of_last, layout)
        kernels.decode([message_of_last], layout, expected)
    blocks_per_launch = 128 // 8  # eight lanes have a block of 128 values of 16 bits
    gpu.first_thread_block = 2**32 // 128 // blocks_per_launch
    try:
        with computed_by(gpu):
            kernels.encode(values, message, layout)
            kernels.decode([message], layout, restored)
    finally:
        gpu.first_thread_block = 0
    assert same_bits(layout.scales(message, length)[-8:], layout.scales(message_of_last, tail)[-8:])
    assert same_bits(restored[-1000:], expected[-1000:])


def test_more_thread_blocks_than_a_gpu_launches_are_refused(gpu):
    layout, huge = Layout("int8", 32), torch.empty(2**31 * 256 * 8, device="meta")
    with pytest.raises(ValueError, match="a GPU launches at most 2147483647 thread blocks"):
        gpu.run(Job([huge.numel()], huge, (), layout, [huge], layout))


# ---- PyTorch's 8-bit numbers ----

CHANNELS = {1: 200, 3: 400, 512: 2000, 777: 2003, 8192: 9000, 8193: 9001, 20000: 9003}
"""Values per channel, and the total number of values."""


def _affine_inputs(dtype, length):
    yield from inputs(dtype, length)
    noise = torch.randn(length).to(dtype)
    yield "positive", noise.abs() + 1
    yield "negative", -noise.abs() - 1
    if dtype == torch.float32:
        yield "smallest", torch.randint(-3, 4, (length,)).float() * 2.0**-149


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(torch.float16, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "channels",
    [
        pytest.param((1, 777, 8193), id="some channels"),
        pytest.param(tuple(CHANNELS), id="all channels", marks=pytest.mark.exhaustive),
    ],
)
def test_affine_kernels_give_the_bits_of_torchs_operators(gpu, dtype, channels):
    for channel in channels:
        length = CHANNELS[channel]
        layout = AffineLayout(length, channel, torch.float32)
        for name, values in _affine_inputs(dtype, length):
            messages, theirs = (
                [torch.zeros(layout.message_bytes, dtype=torch.uint8) for _ in range(3)] for _ in "ab"
            )
            for factor, message, expected in zip((1.0, 0.5, -3.0), messages, theirs, strict=True):
                scaled = (values.float() * factor).to(dtype)
                gpu.affine_encode(scaled, message, layout)
                torch_ops.affine_encode(scaled, expected, layout)
                assert same_bits(message, expected), (channel, name, factor)
            for ranks in (1, 3):
                mean, expected = torch.zeros(length, dtype=dtype), torch.zeros(length, dtype=dtype)
                gpu.affine_decode(theirs[:ranks], layout, mean)
                torch_ops.affine_decode(theirs[:ranks], layout, expected)
                nan = expected.isnan()  # torch's arithmetic may turn a NaN into any other NaN
                assert torch.equal(mean.isnan(), nan), (channel, name, ranks)
                assert same_bits(mean[~nan], expected[~nan]), (channel, name, ranks)


def test_affine_messages_one_after_another_start_anywhere(gpu):
    layout = AffineLayout(1001, 7, torch.float32)
    values = torch.randn(1002)[1:]
    memory = torch.full((layout.message_bytes + 8,), 7, dtype=torch.uint8)
    message, expected = memory[4:-4], torch.zeros(layout.message_bytes, dtype=torch.uint8)
    message.zero_()
    gpu.affine_encode(values, message, layout)
    torch_ops.affine_encode(values, expected, layout)
    assert same_bits(message, expected)
    assert (memory[:4] == 7).all()
    assert (memory[-4:] == 7).all()
    restored, mean = torch.full((1005,), 7.0), torch.zeros(1001)
    gpu.affine_decode([message, message], layout, restored[1:-3])
    torch_ops.affine_decode([expected, expected], layout, mean)
    assert same_bits(restored[1:-3].clone(), mean)
    assert restored[0] == 7
    assert (restored[-3:] == 7).all()
