"""What happens to a number: how far a restored one can be away, and which ones are exact."""

import pytest
import torch
from kernel_backends import computed_by
from kernel_cases import INT8, decoded, differences, encoded, random_values, reduced

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, torch_ops
from dist_utils.testing import same_bits

LEVELS = {"int8": 127, "int4": 7}
LARGEST = torch.finfo(torch.float32).max


HALVES = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.49, -2.51]
TO_EVEN = [0, 2, 2, 0, -2, -2, 2, -3]


@pytest.mark.parametrize("kind", LEVELS)
def test_a_message_is_integers_rounded_to_even_and_a_scale_for_each_block(kind):
    layout, most = Layout(kind, 32), LEVELS[kind]
    # As large as the largest number: a step is 1. The second block has one value and is filled with zeros.
    values = torch.tensor([most, *HALVES, *[1] * 7, *HALVES, 0, -most, *[3] * 6, most]).float()
    first_halves = [most, *TO_EVEN, *[1] * 7, most, *[0] * 15]
    second_halves = [*TO_EVEN, 0, -most, *[3] * 6, *[0] * 16]
    if kind == "int8":
        payload = [*first_halves[:16], *second_halves[:16], *first_halves[16:], *second_halves[16:]]
        payload = [number & 255 for number in payload]
    else:  # two numbers in a byte, that of the first half of a block in the low bits
        payload = [low & 15 | (high & 15) << 4 for low, high in zip(first_halves, second_halves, strict=True)]
    scales = torch.tensor([most, most]).float().view(torch.uint8).tolist()
    expected = [
        *payload,
        *scales,
        *[0] * 8,
    ]  # up to a multiple of 16 bytes; not written
    assert encoded(values, layout).tolist() == expected
    with computed_by(torch_ops):
        assert encoded(values, layout).tolist() == expected


def heavy_tails(count):
    """Return Student's t with 3 degrees of freedom: a block's largest value is far above the others."""
    squares = random_values(3 * count, 0).view(3, count).square().sum(0)
    return random_values(count, 1) / (squares / 3).sqrt()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("kind", "block"), [("int8", 128), ("int4", 32), ("int8", 1024)])
def test_no_value_is_further_away_than_half_a_step(kind, block, rotate):
    layout, levels = Layout(kind, block, rotate), LEVELS[kind]
    for scale in (1e-38, 1e-20, 1.0, 1e20, 3e35):
        values = heavy_tails(8192) * scale
        message = encoded(values, layout)
        sent = layout.scales(message, 8192).double().view(-1, 1)
        if rotate and 1e-30 < scale < 1e30:
            assert (sent < 0).double().mean() > 0.5, "most are rotated"
        error = (decoded([message], 8192, layout) - values).double().view(-1, block).abs()
        # A number rounds three times, and if the block was rotated log2(block) sums do so, twice: each by
        # 2^-24 of at most `levels` steps. A value of a rotated block is off by the mean of such errors.
        roundings = (3 + 2 * (block.bit_length() - 1) * rotate) * levels * 2.0**-24
        assert (error / (sent.abs() / levels)).max() <= 0.5 + roundings


@pytest.mark.parametrize(("kind", "block", "better"), [("int8", 128, 1.7), ("int4", 32, 1.3)])
def test_the_error_on_heavy_tails_is_that_of_normal_values(kind, block, better):
    def error(values, layout):
        return (decoded([encoded(values, layout)], len(values), layout) - values).norm() / values.norm()

    plain, rotating, tails = Layout(kind, block), Layout(kind, block, rotate=True), heavy_tails(1 << 17)
    normal = random_values(1 << 17, 2)
    assert error(normal, rotating) <= error(normal, plain)
    assert error(tails, rotating) <= error(normal, plain)
    assert error(tails, rotating) * better <= error(tails, plain)


def test_blocks_that_need_no_rotation_or_may_have_none_have_the_bits_of_none():
    peak = torch.where(torch.arange(128) == 17, 100.0, random_values(128, 2))
    rotated, with_a_zero = Layout("int8", 128, rotate=True), peak.clone()
    with_a_zero[5] = 0
    for values in (
        torch.zeros(128),
        torch.full((128,), -0.3),
        torch.where(torch.arange(128) == 17, 100.0, torch.zeros(128)),
        with_a_zero,
        peak * 2.0**-108,  # the largest is between 2^-102 and 2^-101
        peak * 2.0**94,
        peak.masked_fill(peak == 100, torch.nan),
        peak[:127],  # the last block is filled with zeros
    ):
        assert encoded(values, rotated).tolist() == encoded(values).tolist()
    assert not same_bits(encoded(peak, rotated), encoded(peak))
    assert decoded([encoded(with_a_zero, rotated)], 128, rotated)[5] == 0


def test_a_mean_of_rotated_blocks_and_others_is_near_the_exact_one():
    layout = Layout("int8", 128, rotate=True)
    rows = heavy_tails(12800), random_values(12800, 3), heavy_tails(12800).flip(0), torch.ones(12800)
    messages = [encoded(row, layout) for row in rows]
    alone = torch.stack([decoded([message], 12800, layout) for message in messages])
    # For fp32 sums of four, each rounded a few times relative to the largest value.
    torch.testing.assert_close(
        decoded(messages, 12800, layout),
        alone.double().mean(0).float(),
        rtol=0,
        atol=1e-6 * alone.abs().max().item(),
    )
    assert torch.equal(decoded(messages[:1] * 3, 12800, layout), alone[0])


def test_one_bit_keeps_signs_and_the_mean_magnitude_of_a_block():
    layout, values = Layout("int1", 64), random_values(640, 0)
    values[64:128] = 0.0
    restored = decoded([encoded(values, layout)], 640, layout)
    blocks, sent = values.view(-1, 64), restored.view(-1, 64)
    assert torch.equal(sent.sign()[blocks != 0], blocks.sign()[blocks != 0])
    # Six sums, each of positive numbers, and a product.
    torch.testing.assert_close(sent.abs().mean(1), blocks.abs().mean(1), rtol=7 * 2.0**-24, atol=0)
    assert (sent.abs().amax(1) == sent.abs().amin(1)).all()
    assert not sent[1].any()
    assert layout.message_bytes(640) == 640 // 8 + 4 * 10 + 8  # rounded up to 16


@pytest.mark.parametrize("layout", [INT8, Layout("int4", 32, rotate=True), Layout("int1", 64)], ids=str)
def test_a_residual_is_what_is_missing(layout):
    values, lost = heavy_tails(1000), torch.empty(1000, dtype=torch.bfloat16)
    message = encoded(values, layout, new_residual=lost)
    missing = (values - decoded([message], 1000, layout)).bfloat16()
    assert differences({"lost": lost}, {"lost": missing}) == {}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_16_bits_lose_no_range(scale):
    """Relative to the block's scale 1e37 fits fp16, which has steps of 2^-24 below 2^-14 of the scale."""
    layout, unit = Layout("fp16", 128), 2.0**-11
    first = encoded(random_values(1280, 0) * scale)
    message = reduced([first], 1280, INT8, layout)
    mean, restored = decoded([first], 1280), decoded([message], 1280, layout)
    largest = mean.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).flatten()
    bound = (unit + 4 * 2.0**-24) * mean.abs() + 2.0**-25 * largest
    assert ((restored - mean).abs() / bound).max() <= 1


@pytest.mark.parametrize("value", [0.0, 0.1, -3e-39, 1e-45, 3e38, -LARGEST])
def test_the_mean_of_equal_constants_is_that_constant(value):
    values = torch.full((300,), value)
    for layout in (INT8, Layout("int4", 32, rotate=True)):
        message = encoded(values, layout)
        for ranks in (1, 2, 3, 8, 100):
            assert decoded([message] * ranks, 300, layout).tolist() == values.tolist()
            mean = reduced([message] * ranks, 300, layout, layout)
            assert decoded([mean], 300, layout).tolist() == values.tolist()


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan_and_touches_no_residual(special):
    values = torch.ones(300)
    values[130] = special
    residual, lost = (torch.full((300,), number, dtype=torch.bfloat16) for number in (0.25, 7.0))
    message, clean = encoded(values, residual=residual, new_residual=lost), encoded(torch.ones(300))
    mean = decoded([clean, message], 300)
    assert mean.isnan().nonzero().flatten().tolist() == list(range(128, 256))
    assert torch.equal(lost[128:256], residual[128:256])
    assert lost[:128].count_nonzero() == 0
    assert kernels.not_finite([clean, message], [300, 300], INT8)
    assert not kernels.not_finite([clean, clean[:0]], [300, 0], INT8)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_values_and_residuals_add_up_over_many_steps(scale):
    """Rounding errors of one step are sent in a later one: nothing is lost but the last residual."""
    residual, lost = (torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2))
    missing, rounded, squares = (torch.zeros(1000, dtype=torch.float64) for _ in range(3))
    layout = Layout("int4", 32)
    for step in range(200):
        values = random_values(1000, step) * scale
        message = encoded(values, layout, residual=residual, new_residual=lost)
        residual, lost = lost, residual
        missing += values.double() - decoded([message], 1000, layout)
        # The residual is at most half a step, and bf16 rounds to 8 significant bits.
        half_step = layout.scales(message, 1000).double().repeat_interleave(32)[:1000] / 14
        assert (residual.double().abs() / half_step).max() <= 1 + 2.0**-8
        rounded += half_step * 2.0**-9
        squares += (half_step * 2.0**-9).square()
    error = (missing - residual.double()).abs()
    # The rounding of values + residual: 200 times 2^-24 of a value of at most about 8.
    in_fp32 = 200 * 8 * 2.0**-24 * scale
    # Errors point in all directions: they add up to far less than their sum, a few times the root of squares.
    assert (error / (rounded + in_fp32)).max() <= 1
    assert (error / (4 * squares.sqrt() + in_fp32)).max() <= 1
    assert error.max() > in_fp32
