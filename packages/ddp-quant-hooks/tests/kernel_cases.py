"""Shared by the tests of all kernels: layouts, values, guarded memory, and one run of every function."""

import torch
from kernel_backends import computed_by

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.planner import shard_lengths
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import same_bits

LAYOUTS = [
    *(Layout("int8", block, rotate=True) for block in (64, 128, 512)),
    *(Layout("int4", block, rotate=True) for block in (32, 128)),
    *(Layout(kind, block) for kind in ("int8", "int4") for block in (32, 64, 128, 1024)),
    *(Layout("fp16", block) for block in (32, 128)),
    *(Layout("int1", block) for block in (32, 256, 1024)),
]


INT8 = Layout("int8", 128)


def encoded(values, layout=INT8, **residuals):
    message = torch.zeros(layout.message_bytes(values.numel()), dtype=torch.uint8)
    kernels.encode(values, message, layout, **residuals)
    return message


def reduced(messages, count, layout, new_layout):
    mean = torch.zeros(new_layout.message_bytes(count), dtype=torch.uint8)
    kernels.reduce(messages, layout, count, mean, new_layout)
    return mean


def decoded(messages, count, layout=INT8, dtype=torch.float32):
    values = torch.empty(count, dtype=dtype)
    kernels.decode(messages, layout, values)
    return values


def random_values(length, seed):
    """Return normal values, whatever torch's default dtype and device are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(length, generator=generator, dtype=torch.float32, device="cpu")


def inputs(dtype, length):
    """Yield values of every magnitude, in blocks of their own and mixed."""
    noise, generator = random_values(length, length), torch.Generator().manual_seed(length)
    limits = torch.finfo(dtype)
    yield "noise", noise.to(dtype)
    yield "zeros", torch.zeros(length, dtype=dtype)
    yield "minus zeros", torch.full((length,), -0.0, dtype=dtype)
    yield "constant", torch.full((length,), -0.3, dtype=dtype)
    exponents = torch.randint(-149, 128, (length,), generator=generator).float()
    yield "every exponent", (noise.sign() * torch.exp2(exponents)).to(dtype)
    yield "tiny", (noise * limits.smallest_normal / 3).to(dtype)
    yield "subnormal", (noise * 3 * limits.smallest_normal * limits.eps).to(dtype)
    yield "huge", (noise / noise.abs().max() * limits.max).to(dtype)
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
    noise = random_values(length, length)
    yield "heavy tails", (noise / torch.rand(length, generator=torch.Generator().manual_seed(1))).to(dtype)
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


class Memory:
    """Makes buffers between guard bytes, which show what is written beside them.

    Args:
        before: The number of guard bytes: a multiple of 4, where messages and fp32 values may start.
        after: The number of guard bytes. With 0, a buffer ends where a sanitizer sees overruns.
    """

    GUARD = 0xA5

    def __init__(self, before=64, after=64, device="cpu"):
        self.before, self.after, self.device = before, after, device
        self.guards = []

    def __call__(self, count, dtype=torch.uint8):
        """Return a buffer of sevens."""
        size = count * dtype.itemsize
        memory = torch.full(
            (self.before + size + self.after,), self.GUARD, dtype=torch.uint8, device=self.device
        )
        self.guards += memory[: self.before], memory[self.before + size :]
        return memory[self.before : self.before + size].fill_(7).view(dtype)

    def copy_of(self, values):
        """Return a buffer with these values."""
        return self(values.numel(), values.dtype).copy_(values)

    def assert_untouched(self):
        guards = torch.cat(self.guards)
        assert torch.equal(guards, torch.full_like(guards, self.GUARD))


def everything(backend, layout, values, memory=None):
    """Run all kernels for blocks on values; return all that they write, by name."""
    memory = memory or Memory(device=values.device)
    with computed_by(backend):
        written = _everything(layout, memory.copy_of(values), memory)
    memory.assert_untouched()
    return written


def _everything(layout, values, memory):
    count, before = values.numel(), values.clone()
    written = {}

    def message(name, kind=layout, length=count):
        return written.setdefault(name, memory(kind.message_bytes(length)))

    def numbers(name, dtype=torch.bfloat16):
        return written.setdefault(name, memory(count, dtype))

    sizes = values.float().abs().nan_to_num(1, 1, 1).clamp(max=1e30)
    residual = memory.copy_of((random_values(count, 1).to(values.device) * sizes).bfloat16())
    kernels.encode(values, message("plain"), layout)
    kernels.encode(values, message("later"), layout, residual=residual, new_residual=numbers("later loss"))
    kernels.encode(values, message("first"), layout, new_residual=numbers("first loss"))
    for factor in (0.5, -3.0):
        kernels.encode((values.float() * factor).to(values.dtype), message(f"times {factor}"), layout)
    all_messages = [written[name] for name in ("plain", "times 0.5", "times -3.0")]
    for ranks in (1, 2, 3):
        messages = all_messages[:ranks]
        kernels.decode(messages, layout, numbers(f"mean of {ranks}", values.dtype))
        for kind in {layout.format, "int8", "fp16"}:
            result = layout if kind == layout.format else Layout(kind, layout.block_size)
            name = f"mean of {ranks} as {kind}"
            lost = numbers(f"loss of {name}")
            kernels.reduce(
                messages, layout, count, message(name, result), result, residual=residual, new_residual=lost
            )
        # Written over one of them, as in the hook.
        in_place = message(f"mean of {ranks} in place").copy_(messages[-1])
        kernels.reduce([*messages[:-1], in_place], layout, count, in_place, layout)
    lengths = shard_lengths(count, 3, layout.block_size)
    parts = [message(f"shard {place}", length=length) for place, length in enumerate(lengths)]
    kernels.encode_shards(
        values, parts, lengths, layout, residual=residual, new_residual=numbers("loss of shards")
    )
    kernels.decode_shards([[part] * 2 for part in parts], lengths, layout, numbers("joined", values.dtype))
    written["not finite"] = kernels.not_finite(parts, lengths, layout).view(1)
    assert same_bits(values, before), "input was changed"
    return written


def affine_everything(encode, decode, layout, values, memory=None):
    """Do the same for PyTorch's 8-bit numbers, with a backend's two functions."""
    memory = memory or Memory(device=values.device)
    values = memory.copy_of(values)
    messages = [memory(layout.message_bytes) for _ in range(3)]
    for factor, message in zip((1.0, 0.5, -3.0), messages, strict=True):
        message.zero_()  # bytes between channels and parameters are not written
        encode(memory.copy_of((values.float() * factor).to(values.dtype)), message, layout)
    written = dict(enumerate(messages))
    for ranks in (1, 3):
        mean = memory(layout.values, values.dtype)
        decode(messages[:ranks], layout, mean)
        # Which NaN torch's arithmetic makes of another is not specified.
        written |= {f"mean of {ranks}": mean.nan_to_num(), f"NaN of {ranks}": mean.isnan()}
    memory.assert_untouched()
    return written


def differences(found, expected):
    """Return by name where results differ from the expected ones, bitwise."""
    wrong = {} if found.keys() == expected.keys() else {"names": (found.keys(), expected.keys())}
    for name, tensor in expected.items():
        ours, theirs = (one.cpu().contiguous().view(torch.uint8) for one in (found[name], tensor))
        if not torch.equal(ours, theirs):
            first = int((ours != theirs).nonzero()[0])
            wrong[name] = f"byte {first} is {ours[first]}, not {theirs[first]}"
    return wrong
