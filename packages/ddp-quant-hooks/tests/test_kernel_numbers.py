"""The kernels' promises about numbers, for every backend."""

from pathlib import Path

import pytest
import torch
from kernel_backends import computed_by, needs_library

from ddp_quant_hooks import QuantizedAllreduceState, kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout, dispatch, torch_ops
from ddp_quant_hooks.kernels.cpu import library_path
from dist_utils.testing import same_bits

INT8 = Layout("int8", 128)
LARGEST = torch.finfo(torch.float32).max


def encoded(values, layout=INT8, **residuals):
    message = torch.empty(layout.message_bytes(values.numel()), dtype=torch.uint8)
    kernels.encode(values, message, layout, **residuals)
    return message


def decoded(messages, count, layout=INT8, dtype=torch.float32):
    values = torch.empty(count, dtype=dtype)
    kernels.decode(messages, layout, values)
    return values


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 3e37])
def test_no_value_is_further_away_than_half_a_step(kind, levels, scale):
    layout = Layout(kind, 64)
    values = torch.randn(6400, generator=torch.Generator().manual_seed(0)) * scale
    error = (decoded([encoded(values, layout)], 6400, layout) - values).view(-1, 64).abs().double()
    largest = values.view(-1, 64).abs().amax(1, keepdim=True).double()
    # Half a step of the grid, and three roundings in fp32 of at most `levels` steps.
    step = largest / levels
    assert (error <= step * (0.5 + 3 * levels * 2.0**-24)).all()


def heavy_tails(count, scale=1.0):
    """Return Student's t with 3 degrees of freedom: a block's largest value is far above the others."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(3, count, generator=generator).square().sum(0)
    return torch.randn(count, generator=generator) / (squares / 3).sqrt() * scale


@pytest.mark.parametrize(
    ("kind", "block", "levels"), [("int8", 128, 127), ("int4", 32, 7), ("int8", 1024, 127)]
)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_no_value_of_a_rotated_block_is_further_away_than_half_a_rotated_step(kind, block, levels, scale):
    layout, values = Layout(kind, block, rotate=True), heavy_tails(8192, scale)
    message = encoded(values, layout)
    sent = layout.scales(message, 8192).view(-1, 1)
    error = (decoded([message], 8192, layout) - values).view(-1, block).abs().double()
    assert (sent < 0).float().mean() > 0.5, "most blocks are rotated"
    # A value is the mean of all rotated ones with signs: it is off by the mean of their errors at most, each
    # half a step. A number rounds three times, sums log2(block) times to rotate and to restore: each by 2^-24
    # of at most `levels` steps.
    step = sent.abs().double() / levels
    roundings = (3 + 2 * (block.bit_length() - 1)) * levels * 2.0**-24
    assert (error <= step * (0.5 + roundings)).all()


@pytest.mark.parametrize(("kind", "block", "better"), [("int8", 128, 1.7), ("int4", 32, 1.3)])
def test_the_error_on_heavy_tails_is_that_of_normal_values(kind, block, better):
    def error(values, layout):
        return (decoded([encoded(values, layout)], len(values), layout) - values).norm() / values.norm()

    plain, rotating, tails = Layout(kind, block), Layout(kind, block, rotate=True), heavy_tails(1 << 17)
    normal = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    assert error(normal, rotating) <= error(normal, plain)
    assert error(tails, rotating) <= error(normal, plain)
    assert error(tails, rotating) * better <= error(tails, plain)


def test_blocks_that_need_no_rotation_or_may_have_none_have_the_bits_of_none():
    peak = torch.where(
        torch.arange(128) == 17, 100.0, torch.randn(128, generator=torch.Generator().manual_seed(2))
    )
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
        assert same_bits(encoded(values, rotated), encoded(values, INT8))
    assert not same_bits(encoded(peak, rotated), encoded(peak, INT8))
    assert (decoded([encoded(with_a_zero, rotated)], 128, rotated)[5] == 0).all()


def test_a_mean_of_rotated_blocks_and_others_is_near_the_exact_one():
    layout = Layout("int8", 128, rotate=True)
    values = torch.stack(
        [heavy_tails(12800), torch.randn(12800), heavy_tails(12800).flip(0), torch.ones(12800)]
    )
    messages = [encoded(row, layout) for row in values]
    mean, alone = (
        decoded(messages, 12800, layout),
        [decoded([message], 12800, layout) for message in messages],
    )
    # For fp32 sums of four, each rounded a few times relative to the largest value.
    torch.testing.assert_close(
        mean, torch.stack(alone).double().mean(0).float(), rtol=0, atol=1e-6 * values.abs().max()
    )
    assert torch.equal(decoded(messages[:1] * 3, 12800, layout), alone[0])


def test_what_a_rotated_block_loses_is_what_is_missing():
    layout, values = Layout("int4", 32, rotate=True), heavy_tails(1000)
    lost = torch.empty(1000, dtype=torch.bfloat16)
    message = encoded(values, layout, new_residual=lost)
    assert torch.equal(lost, (values - decoded([message], 1000, layout)).bfloat16())


def test_what_cannot_be_rotated_is_refused():
    with pytest.raises(ValueError, match="rotate needs a format of integers, got 'fp16'"):
        Layout("fp16", 128, rotate=True)
    with pytest.raises(TypeError, match="rotate must be True or False"):
        Layout("int8", 128, rotate=1)
    with pytest.raises(TypeError, match="rotate must be None, True or False"):
        QuantizedAllreduceState(rotate="yes")
    state = QuantizedAllreduceState(gather="fp16")
    assert state.scatter.rotate
    assert not state.gather.rotate


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_16_bits_lose_no_range(scale):
    """Relative to the block's scale 1e37 fits fp16, which has steps of 2^-24 below 2^-14 of the scale."""
    layout, unit = Layout("fp16", 128), 2.0**-11
    values = torch.randn(1280, generator=torch.Generator().manual_seed(0)) * scale
    message, first = torch.empty(layout.message_bytes(1280), dtype=torch.uint8), encoded(values)
    kernels.reduce([first], INT8, 1280, message, layout)
    mean, restored = decoded([first], 1280), decoded([message], 1280, layout)
    largest = mean.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).flatten()
    assert ((restored - mean).abs() <= (unit + 4 * 2.0**-24) * mean.abs() + 2.0**-25 * largest).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 32, 100])
@pytest.mark.parametrize("value", [0.0, 0.1, -3e-39, 1e-45, 3e38, -LARGEST])
def test_the_mean_of_equal_constants_is_that_constant(ranks, value):
    values = torch.full((300,), value)
    message = encoded(values)
    assert torch.equal(decoded([message] * ranks, 300), values)
    mean = torch.empty_like(message)
    kernels.reduce([message] * ranks, INT8, 300, mean, INT8)
    assert torch.equal(decoded([mean], 300), values)


def test_a_mean_of_finite_values_is_finite():
    signs = torch.randn(1000, generator=torch.Generator().manual_seed(0)).sign()
    messages = [encoded(signs * LARGEST)] * 7 + [encoded(signs * -LARGEST)]
    mean = decoded(messages, 1000)
    torch.testing.assert_close(mean, signs * (LARGEST * 0.75), rtol=1e-6, atol=0)
    # With residuals that push beyond the range, too.
    residual, lost = (signs * 1e37).bfloat16(), torch.empty(1000, dtype=torch.bfloat16)
    message = encoded(signs * LARGEST, residual=residual, new_residual=lost)
    assert torch.equal(decoded([message], 1000), signs * LARGEST)
    assert not lost.any()


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan_and_touches_no_residual(special):
    values = torch.ones(300)
    values[130] = special
    residual, lost = (torch.full((300,), number, dtype=torch.bfloat16) for number in (0.25, 7.0))
    message = encoded(values, residual=residual, new_residual=lost)
    mean = decoded([encoded(torch.ones(300)), message], 300)
    assert mean.isnan().nonzero().flatten().tolist() == list(range(128, 256))
    assert torch.equal(lost[128:256], residual[128:256])
    assert not lost[:128].any()
    clean = encoded(torch.ones(300))
    assert kernels.not_finite([clean, message], [300, 300], INT8)
    assert not kernels.not_finite([clean, clean[:0]], [300, 0], INT8)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_values_and_residuals_add_up_over_many_steps(scale):
    """Rounding errors of one step are sent in a later one: nothing is lost but the last residual."""
    generator = torch.Generator().manual_seed(0)
    residual, lost = (torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2))
    sent, meant = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    rounded, squares = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    layout = Layout("int4", 32)
    for _ in range(200):
        values = torch.randn(1000, generator=generator) * scale
        message = encoded(values, layout, residual=residual, new_residual=lost)
        residual, lost = lost, residual
        sent += decoded([message], 1000, layout)
        meant += values
        # The residual is at most half a step, and bf16 rounds to 8 significant bits.
        half_step = layout.scales(message, 1000).double().repeat_interleave(32)[:1000] / 14
        assert (residual.double().abs() <= half_step * (1 + 2.0**-8)).all()
        rounded += half_step * 2.0**-9
        squares += (half_step * 2.0**-9).square()
    error = ((meant - sent) - residual.double()).abs()
    # The rounding of values + residual: 200 times 2^-24 of a value of at most about 8.
    in_fp32 = 200 * 8 * 2.0**-24 * scale
    assert (error <= rounded + in_fp32).all()
    # They point in all directions: they add up to far less than their sum, a few times the root of squares.
    assert (error <= 4 * squares.sqrt() + in_fp32).all()
    assert error.max() > in_fp32


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_no_bit(default):
    """For torch's operators, which compute PyTorch's numbers on every CPU."""
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [1e30], [3e37]]
    )
    affine = AffineLayout(500, 128, torch.float32)

    def compute():
        results = []
        for layout in (INT8, Layout("int4", 32)):
            messages = [torch.zeros(layout.message_bytes(500), dtype=torch.uint8) for _ in values]
            mean = torch.zeros(500, dtype=torch.float32)
            with computed_by(torch_ops):
                for row, message in zip(values, messages, strict=True):
                    kernels.encode(row, message, layout)
                kernels.decode(messages, layout, mean)
            results += [*messages, mean]
        messages = [torch.zeros(affine.message_bytes, dtype=torch.uint8) for _ in values]
        for row, message in zip(values, messages, strict=True):
            kernels.affine_encode(row, message, affine)
        mean = torch.zeros(500, dtype=torch.float32)
        kernels.affine_decode(messages, affine, mean)
        return [*results, *messages, mean]

    expected, before = compute(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = compute()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@needs_library
def test_neither_threads_nor_flushing_change_a_bit():
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 1e-38
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = encoded(values)
        restored = decoded([alone], values.numel())
        other = encoded(values.flip(0))
        mean, reduced = decoded([alone, other], values.numel()), torch.empty_like(alone)
        kernels.reduce([alone, other], INT8, values.numel(), reduced, INT8)
        torch.set_num_threads(3)
        assert torch.equal(encoded(values), alone)
        assert torch.equal(decoded([alone], values.numel()), restored)
        assert torch.equal(decoded([alone, other], values.numel()), mean)
        again = torch.empty_like(alone)
        kernels.reduce([alone, other], INT8, values.numel(), again, INT8)
        assert torch.equal(again, reduced)
        torch.set_num_threads(1)
        if torch.set_flush_denormal(True):
            assert torch.equal(encoded(values), alone)
            assert torch.equal(decoded([alone], values.numel()), restored)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test_wrong_tensors_are_refused_before_they_are_touched():
    values, message = torch.ones(300), torch.empty(INT8.message_bytes(300), dtype=torch.uint8)
    refused = [
        (TypeError, "values must be of", (values.double(), message, INT8), {}),
        (ValueError, "message must be flat, contiguous and 396 long", (values, message[:-1], INT8), {}),
        (ValueError, "values must be flat", (values.view(3, 100), message, INT8), {}),
        (ValueError, "values must be flat", (torch.ones(600)[::2], message, INT8), {}),
        (TypeError, "message must be of torch.uint8", (values, message.view(torch.int8), INT8), {}),
        (
            ValueError,
            "residual must be flat",
            (values, message, INT8),
            {"residual": torch.ones(1).bfloat16()},
        ),
        (
            TypeError,
            "new_residual must be of torch.bfloat16",
            (values, message, INT8),
            {"new_residual": values},
        ),
        (ValueError, "must be on cpu", (values, message.to("meta"), INT8), {}),
    ]
    for error, text, arguments, options in refused:
        with pytest.raises(error, match=text):
            kernels.encode(*arguments, **options)
    with pytest.raises(ValueError, match="at least one message"):
        kernels.decode([], INT8, values)
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        kernels.decode([message, message[:4]], INT8, values)
    with pytest.raises(ValueError, match="block sizes must be equal"):
        kernels.reduce([message], INT8, 300, message, Layout("int8", 64))


def test_a_library_of_other_sources_is_not_called(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_QUANT_HOOKS_LIBRARY", str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    dispatch._cpu_kernels.cache_clear()
    try:
        assert "was built from other sources" in kernels.describe()
        encoded(torch.ones(300))
        monkeypatch.setenv("DDP_QUANT_HOOKS_LIBRARY", str(tmp_path / "nowhere.so"))
        dispatch._cpu_kernels.cache_clear()
        assert "DDP_QUANT_HOOKS_LIBRARY names no file" in kernels.describe()
    finally:
        dispatch._cpu_kernels.cache_clear()


def test_describe_says_what_computes_here():
    text = kernels.describe()
    expected = (
        "compiled kernels with" if library_path().exists() else "torch operators, 20 to 40 times slower"
    )
    assert text.startswith(f"cpu: {expected}")
