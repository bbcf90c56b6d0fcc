"""Every backend gives the same bits, on every kind of value, length and block."""

import pytest
import torch
from kernel_backends import SETS, computed_by, needs_library

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, rotation, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from dist_utils.testing import same_bits

LAYOUTS = [
    *(Layout("int8", block, rotate=True) for block in (64, 128, 512)),
    *(Layout("int4", block, rotate=True) for block in (32, 128)),
    *(Layout(kind, block) for kind in ("int8", "int4") for block in (32, 64, 128, 1024)),
    *(Layout("fp16", block) for block in (32, 128)),
]
FLOAT32 = torch.finfo(torch.float32)


def inputs(dtype, length):
    """Yield values of every magnitude, in blocks of their own and mixed."""
    generator = torch.Generator().manual_seed(length)
    noise = torch.randn(length, generator=generator)
    yield "noise", noise.to(dtype)
    yield "zeros", torch.zeros(length, dtype=dtype)
    yield "minus zeros", torch.full((length,), -0.0, dtype=dtype)
    yield "constant", torch.full((length,), -0.3, dtype=dtype)
    exponents = torch.randint(-149, 128, (length,), generator=generator).float()
    yield "every exponent", (noise.sign() * torch.exp2(exponents)).to(dtype)
    yield "tiny", (noise * torch.finfo(dtype).smallest_normal / 3).to(dtype)
    yield "subnormal", (noise * 3 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).to(dtype)
    yield "huge", (noise / noise.abs().max() * torch.finfo(dtype).max).to(dtype)
    yield "halfway", (torch.arange(length) % 255 - 127).div(2).to(dtype)
    for name, special in (("nan", torch.nan), ("infinity", torch.inf), ("minus infinity", -torch.inf)):
        values = noise.to(dtype)
        values[length // 2] = special
        yield name, values
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (length,), generator=generator, dtype=torch.int64)
        yield "any bits", bits.to(torch.int32).view(torch.float32)


def inputs_to_rotate(dtype, length):
    """Yield values with peaks, in blocks that are rotated and in blocks that must not be."""
    generator = torch.Generator().manual_seed(length)
    noise = torch.randn(length, generator=generator)
    yield "heavy tails", (noise / torch.rand(length, generator=generator)).to(dtype)
    peaks = noise * torch.where(torch.arange(length) % 40 == 7, 100, 1)
    yield "peaks", peaks.to(dtype)
    yield "peaks and zeros", (peaks * (torch.arange(length) % 1000 > 200)).to(dtype)
    yield "tiny peaks", (peaks * 2.0**-103).to(dtype)
    yield "huge peaks", (peaks * 2.0**95).to(dtype)
    with_nan = peaks.to(dtype)
    with_nan[length // 2] = torch.nan
    yield "peaks and nan", with_nan


def inputs_of(layout, dtype, length):
    """Yield inputs that show the bits of a layout."""
    yield from inputs(dtype, length)
    if layout.rotate:
        yield from inputs_to_rotate(dtype, length)


def everything(backend, layout, dtype, values):
    """Run all kernels and return all that they write."""
    with computed_by(backend):
        return _everything(layout, dtype, values)


def _everything(layout, dtype, values):
    length, device = values.numel(), values.device
    out = {}

    def message(kind):
        return torch.zeros(kind.message_bytes(length), dtype=torch.uint8, device=device)

    def sevens(dtype=torch.bfloat16):
        return torch.full((length,), 7, dtype=dtype, device=device)

    noise = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(device)
    residual = (noise * values.float().abs().nan_to_num(1, 1, 1).clamp(max=1e30)).bfloat16()
    out["plain"] = message(layout)
    kernels.encode(values, out["plain"], layout)
    out["with residual"], out["lost"] = message(layout), sevens()
    kernels.encode(values, out["with residual"], layout, residual=residual, new_residual=out["lost"])
    out["first step"], out["first loss"] = message(layout), sevens()
    kernels.encode(values, out["first step"], layout, new_residual=out["first loss"])
    others = [message(layout) for _ in range(2)]
    for factor, other in zip((0.5, -3.0), others, strict=True):
        kernels.encode((values.float() * factor).to(dtype), other, layout)
    for ranks in (1, 2, 3):
        gathered = [out["plain"], *others][:ranks]
        out[f"decoded {ranks}"] = sevens(dtype)
        kernels.decode(gathered, layout, out[f"decoded {ranks}"])
        for kind in {layout.format, "int8", "fp16"}:
            result = layout if kind == layout.format else Layout(kind, layout.block_size)
            reduced, lost = message(result), sevens()
            if kind == layout.format:  # written over one of them, as in the hook
                in_place = gathered[-1].clone()
                kernels.reduce([*gathered[:-1], in_place], layout, length, in_place, result)
                out[f"in place {ranks}"] = in_place
            kernels.reduce(gathered, layout, length, reduced, result, residual=residual, new_residual=lost)
            out[f"reduced {ranks} {kind}"], out[f"lost {ranks} {kind}"] = reduced, lost
    return out


def some_lengths(block):
    """Return lengths within, just above and far above a block."""
    return 1, block + 1, 1009


def every_length(block):
    """Return the lengths at which a kernel may differ."""
    return 1, block - 1, block, block + 1, 5 * block, 1009


def require_bits_of_torch(instruction_sets, dtype, lengths):
    """Compare compiled kernels with torch's operators, which are slow and run only once for all of them."""
    backends = {name: CpuKernels(name) for name in instruction_sets}
    for layout in LAYOUTS:
        for length in lengths(layout.block_size):
            for name, values in inputs_of(layout, dtype, length):
                reference = everything(torch_ops, layout, dtype, values)
                for instruction_set, backend in backends.items():
                    ours = everything(backend, layout, dtype, values)
                    for what, tensor in reference.items():
                        assert same_bits(ours[what], tensor), (instruction_set, layout, length, name, what)


@needs_library
@pytest.mark.parametrize(
    ("instruction_set", "dtype"),
    # Each instruction set once and each dtype once; all pairs and lengths are for the exhaustive check.
    [(one, kernels.VALUE_DTYPES[number % len(kernels.VALUE_DTYPES)]) for number, one in enumerate(SETS)],
)
def test_an_instruction_set_gives_the_bits_of_torchs_operators(instruction_set, dtype):
    require_bits_of_torch([instruction_set], dtype, some_lengths)


@needs_library
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", kernels.VALUE_DTYPES, ids=str)
def test_all_instruction_sets_give_the_bits_of_torchs_operators_at_every_length(dtype):
    require_bits_of_torch(SETS, dtype, every_length)


@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=str)
def test_the_default_device_changes_no_bits(layout):
    values = dict(inputs_to_rotate(torch.float32, 4000))["peaks"]
    rotation._signs.cache_clear()
    sent, received = [], []
    for device in ("meta", "cpu"):
        with torch.device(device):
            message = torch.zeros(layout.message_bytes(4000), dtype=torch.uint8, device="cpu")
            restored = torch.zeros(4000, device="cpu")
            with computed_by(torch_ops):
                kernels.encode(values, message, layout)
                kernels.decode([message], layout, restored)
        sent.append(message)
        received.append(restored)
    assert (layout.scales(sent[0], 4000) < 0).any(), "nothing was rotated"
    assert torch.equal(*sent)
    assert same_bits(*received)
