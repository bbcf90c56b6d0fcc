"""The CUDA backend's logic without a GPU: its launches and its kernels, on an emulated GPU."""

from itertools import cycle

import pytest
import torch
from emulated_gpu import EmulatedGpu, needs_compiler
from kernel_backends import computed_by
from kernel_cases import Memory, affine_everything, differences, everything, inputs, inputs_of, random_values

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.planner import shard_lengths
from ddp_quant_hooks.kernels import VALUE_DTYPES, AffineLayout, Layout, torch_ops

pytestmark = needs_compiler
INT8 = Layout("int8", 128)
LAYOUTS = (
    Layout("int8", 128, rotate=True),
    Layout("int4", 32),
    Layout("fp16", 64),
    Layout("int1", 256),
    Layout("int4", 32, rotate=True),
)
SOME = [*zip(LAYOUTS, cycle(VALUE_DTYPES), cycle([64, 68]), strict=False)]
"""Layouts, each with a dtype, and with memory that starts at a multiple of 16 bytes or not."""
RARE = [pytest.param(*some, marks=pytest.mark.exhaustive) for some in SOME[:2]]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return EmulatedGpu(tmp_path_factory.mktemp("emulated_gpu"))


@pytest.mark.parametrize(("layout", "dtype", "start"), [*SOME[2:], *RARE], ids=str)
def test_the_kernels_text_gives_the_bits_of_torchs_operators(gpu, layout, dtype, start):
    lengths = layout.block_size + 1, 1009
    gpu.plan(lambda: [everything(gpu, layout, torch.ones(n, dtype=dtype), Memory(start)) for n in lengths])
    for length in lengths:
        for name, values in inputs_of(layout, dtype, length):
            found = everything(gpu, layout, values, Memory(start))
            assert differences(found, everything(torch_ops, layout, values)) == {}, (length, name)


def test_shards_are_one_launch_each_hundred_or_so(gpu):
    values = random_values(128 * 150 - 5, 0)
    lengths = shard_lengths(len(values), 100, 128)

    def computed(backend):
        messages = [torch.zeros(INT8.message_bytes(length), dtype=torch.uint8) for length in lengths]
        mean = torch.zeros(len(values))
        with computed_by(backend):
            kernels.encode_shards(values, messages, lengths, INT8)
            kernels.decode_shards([[message] * 3 for message in messages], lengths, INT8, mean)
        return {"messages": torch.cat(messages), "mean": mean}

    gpu.plan(lambda: computed(gpu))
    gpu.launches.clear()
    assert differences(computed(gpu), computed(torch_ops)) == {}
    # 48 bytes a shard, or 64 with three messages, of 4096 for a launch.
    assert [height for _, _, height in gpu.launches] == [85, 15, 64, 36]


@pytest.mark.parametrize(("ranks", "launches"), [(9, 2), (600, 0)])
def test_any_number_of_ranks(gpu, ranks, launches):
    """About 500 messages fit into a launch; for more, torch's operators compute the mean."""
    layout = Layout("int8", 64)
    messages = [torch.zeros(layout.message_bytes(150), dtype=torch.uint8) for _ in range(ranks)]
    for rank, message in enumerate(messages):
        kernels.encode(random_values(150, rank), message, layout)
    gpu.launches.clear()
    results = []
    for backend in (gpu, torch_ops):
        results.append({"message": torch.zeros_like(messages[0]), "mean": torch.zeros(150)})
        with computed_by(backend):
            kernels.reduce(messages, layout, 150, results[-1]["message"], layout)
            kernels.decode(messages, layout, results[-1]["mean"])
    assert differences(*results) == {}
    assert len(gpu.launches) == launches


def test_a_tensor_of_more_elements_than_32_bits_count(gpu):
    """Only the last thread blocks run, and only their memory is ever there."""
    length, tail = 2**32 + 1000, 2048 + 1000
    values, restored = (torch.empty(length, dtype=torch.bfloat16) for _ in range(2))
    message = torch.empty(INT8.message_bytes(length), dtype=torch.uint8)
    values[-tail:] = random_values(tail, 0)
    last, expected = values[-tail:], torch.empty(tail, dtype=torch.bfloat16)
    message_of_last = torch.empty(INT8.message_bytes(tail), dtype=torch.uint8)
    with computed_by(torch_ops):
        kernels.encode(last, message_of_last, INT8)
        kernels.decode([message_of_last], INT8, expected)
    blocks_per_launch = 128 // 8  # eight lanes have a block of 128 values of 16 bits
    gpu.first_thread_block = 2**32 // 128 // blocks_per_launch
    try:
        with computed_by(gpu):
            kernels.encode(values, message, INT8)
            kernels.decode([message], INT8, restored)
    finally:
        gpu.first_thread_block = 0
    found = {"scales": INT8.scales(message, length)[-8:], "values": restored[-1000:]}
    expected = {"scales": INT8.scales(message_of_last, tail)[-8:], "values": expected[-1000:]}
    assert differences(found, expected) == {}


def _affine_inputs(dtype, length):
    yield from inputs(dtype, length)
    noise = random_values(length, 1).to(dtype)
    yield "positive", noise.abs() + 1
    yield "negative", -noise.abs() - 1
    if dtype == torch.float32:
        yield "smallest", torch.randint(-3, 4, (length,)).float() * 2.0**-149


@pytest.mark.parametrize(
    ("channel", "length", "dtype", "start"),
    [
        pytest.param(1, 200, torch.float32, 68, marks=pytest.mark.exhaustive),
        (512, 2000, torch.bfloat16, 64),
        (8193, 9001, torch.float32, 68),
    ],
)
def test_affine_kernels_give_the_bits_of_torchs_operators(gpu, channel, length, dtype, start):
    layout = AffineLayout(length, channel, torch.float32)

    def computed(values):
        return affine_everything(gpu.affine_encode, gpu.affine_decode, layout, values, Memory(start))

    gpu.plan(lambda: computed(torch.ones(length, dtype=dtype)))
    for name, values in _affine_inputs(dtype, length):
        expected = affine_everything(torch_ops.affine_encode, torch_ops.affine_decode, layout, values)
        assert differences(computed(values), expected) == {}, name
