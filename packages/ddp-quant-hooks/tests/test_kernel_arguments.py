"""Arguments that the kernels refuse, in the same way on every backend, before anything is written."""

import pytest
import torch
from kernel_backends import computed_by

from ddp_quant_hooks import QuantizedAllreduceState, kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops

INT8, INT4 = Layout("int8", 128), Layout("int4", 128)
COUNT = 1024
BYTES = INT8.message_bytes(COUNT)
AFFINE = AffineLayout(COUNT, 64, torch.float32)


@pytest.fixture(params=["best", "torch_ops"])
def backend(request):
    """The backend in use here, and the one that always exists."""
    if request.param == "torch_ops":
        with computed_by(torch_ops):
            yield
    else:
        yield


class _Memory:
    """Tensors in one piece of memory, by the byte where they start."""

    def __init__(self):
        self.bytes = torch.arange(32_768, dtype=torch.int64).to(torch.uint8)

    def floats(self, start, length=COUNT):
        return self.bytes[start : start + 4 * length].view(torch.float32)

    def halves(self, start, length=COUNT):
        return self.bytes[start : start + 2 * length].view(torch.bfloat16)

    def message(self, start, layout=INT8, values=COUNT):
        return self.bytes[start : start + layout.message_bytes(values)]

    def affine(self, start):
        return self.bytes[start : start + AFFINE.message_bytes]

    def encode(self, values=None, message=None, layout=INT8, **residuals):
        """Encode with arguments that are right if they are not given."""
        values, message = (
            right if given is None else given
            for given, right in ((values, self.floats(0)), (message, self.message(16_384)))
        )
        kernels.encode(values, message, layout, **residuals)

    def reduce(self, message, layout=INT8, values=COUNT, **residuals):
        """Reduce two messages to this one."""
        messages = [self.message(0), self.message(8192)]
        kernels.reduce(messages, INT8, values, message, layout, **residuals)

    def decode(self, *messages, values=None):
        kernels.decode(messages, INT8, self.floats(0) if values is None else values)

    def in_shards(self, lengths):
        """Encode to two shards."""
        messages = [self.message(start, values=512) for start in (16_384, 20_480)]
        kernels.encode_shards(self.floats(0), messages, lengths, INT8)


SHARE = "must not share memory"
START = "must start at a multiple of 4 bytes"
SHIFTED = torch.frombuffer(bytearray(4 * COUNT + 1), dtype=torch.float32, offset=1)
REFUSED = {
    "message over values": (f"values and message {SHARE}", lambda m: m.encode(message=m.message(4092))),
    "messages of two shards": (
        rf"messages\[0\] and messages\[1\] {SHARE}",
        lambda m: kernels.encode_shards(
            m.floats(0), [m.message(start, values=512) for start in (8192, 8256)], [512, 512], INT8
        ),
    ),
    "reduce: new_residual over a message": (
        rf"messages\[1\] and new_residual {SHARE}",
        lambda m: m.reduce(m.message(16_384), new_residual=m.halves(8196)),
    ),
    "reduce: in place in another layout": (SHARE, lambda m: m.reduce(m.message(0, INT4), INT4)),
    "decode over a message": (SHARE, lambda m: m.decode(m.message(4092))),
    "affine_decode": (SHARE, lambda m: kernels.affine_decode([m.affine(4000)], AFFINE, m.floats(0))),
    "a message starts at 1": (START, lambda m: m.encode(message=m.message(16_385))),
    "values start at 1": (START, lambda m: m.encode(SHIFTED)),
    "values of fp64": (
        "values must be of .*, got torch.float64",
        lambda m: m.encode(torch.zeros(COUNT).double()),
    ),
    "a message of int8": (
        "message must be of torch.uint8",
        lambda m: m.encode(message=m.message(16_384).view(torch.int8)),
    ),
    "residual of fp32": ("residual must be of torch.bfloat16", lambda m: m.encode(residual=m.floats(8192))),
    "a message on another device": (
        "must be on cpu, got meta",
        lambda m: m.encode(message=m.message(16_384).to("meta")),
    ),
    "a short message": (
        rf"message must be contiguous and of shape \({BYTES},\)",
        lambda m: m.encode(message=m.message(16_384)[:-1]),
    ),
    "affine values of another length": (
        "values must be 1024 long, as the layout says, got 1023",
        lambda m: kernels.affine_encode(m.floats(0, COUNT - 1), m.affine(16_384), AFFINE),
    ),
    "lengths of other values": ("sum to the number of values", lambda m: m.in_shards([512, 513])),
    "a negative length": ("at least 0", lambda m: m.in_shards([1152, -128])),
    "a length of 512.0": ("must be ints", lambda m: m.in_shards([512.0, 512])),
    "no messages": ("at least one message", lambda m: m.decode()),
    "shards with different numbers of messages": (
        "the same number of messages",
        lambda m: kernels.decode_shards(
            [[m.message(8192, values=512)], [m.message(8192, values=512)] * 2], [512, 512], INT8, m.floats(0)
        ),
    ),
    "reduce: other block sizes": (
        "block sizes must be equal",
        lambda m: m.reduce(m.message(16_384), Layout("int8", 64)),
    ),
    "reduce: -1 values": ("must be at least 0", lambda m: m.reduce(m.message(0), values=-1)),
}


@pytest.mark.parametrize(("error", "call"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_before_anything_is_written(backend, error, call):
    memory = _Memory()
    with pytest.raises((TypeError, ValueError), match=error):
        call(memory)
    assert torch.equal(memory.bytes, _Memory().bytes)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Layout("int8", 128.0), TypeError, "block_size must be an int, got 128.0"),
        (
            lambda: Layout("int5", 128),
            ValueError,
            "format must be one of int8, int4, fp16, int1, bfloat16, float16, got 'int5'",
        ),
        (lambda: Layout("int8", 96), ValueError, "block_size must be one of"),
        (
            lambda: Layout("fp16", 128, rotate=True),
            ValueError,
            "rotate needs a format of integers, got 'fp16'",
        ),
        (lambda: AffineLayout(10, 0, torch.float32), ValueError, "channel must be at least 1, got 0"),
        (lambda: AffineLayout(-1, 4, torch.float32), ValueError, "values must be at least 0, got -1"),
        (lambda: AffineLayout(10, True, torch.float32), TypeError, "channel must be an int, got True"),
        (lambda: AffineLayout(10, 4, torch.float16), ValueError, "dtype must be torch.float32 or"),
    ],
)
def test_a_layout_checks_its_fields(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_means_in_16_bits_are_not_rotated():
    state = QuantizedAllreduceState(gather="fp16")
    assert (state.options.scatter_layout.rotate, state.options.gather_layout.rotate) == (True, False)


def test_what_is_only_read_may_be_the_same_and_shards_may_be_empty(backend):
    values, restored = torch.randn(700), torch.zeros(700)
    lengths = [0, 512, 0, 188, 0]
    messages = [torch.zeros(INT8.message_bytes(length), dtype=torch.uint8) for length in lengths]
    kernels.encode_shards(values.bfloat16(), messages, lengths, INT8, residual=torch.zeros(700).bfloat16())
    kernels.encode_shards(values, messages, lengths, INT8)
    kernels.decode_shards([[message] * 2 for message in messages], lengths, INT8, restored)
    assert (restored - values).abs().max() <= values.abs().max() / 100
    # The message of the mean may be one of the messages.
    kernels.reduce([messages[1]] * 2, INT8, 512, messages[1], INT8)
    again = torch.zeros(512)
    kernels.decode([messages[1]], INT8, again)
    assert (again - values[:512]).abs().max() <= values.abs().max() / 50
    in_bf16 = values.bfloat16()
    kernels.encode(in_bf16[:512], messages[1], INT8, residual=in_bf16[:512])
    nothing = torch.zeros(0)
    kernels.encode_shards(nothing, messages[:1], [0], INT8)
    kernels.decode_shards([messages[:1]], [0], INT8, nothing)


# ---- autograd ----


def test_what_requires_grad_is_not_written_while_gradients_are_recorded(backend):
    values, message = torch.ones(COUNT), torch.zeros(BYTES, dtype=torch.uint8)
    for written in (torch.ones(COUNT, requires_grad=True), torch.ones(COUNT, requires_grad=True) + 0.0):
        with pytest.raises(RuntimeError, match="values, which they would write, requires grad"):
            kernels.decode([message], INT8, written)
        assert torch.equal(written, values)
        with torch.no_grad():
            kernels.decode([message], INT8, written)
        assert written.count_nonzero() == 0
    lost = torch.ones(COUNT).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match="new_residual, which they would write, requires grad"):
        kernels.encode(values, message, INT8, new_residual=lost)
    assert message.count_nonzero() == 0
    kernels.encode(values.requires_grad_(), message, INT8)  # is read
    with torch.inference_mode():
        restored = torch.zeros(COUNT)
        kernels.decode([message], INT8, restored)
        assert torch.equal(restored, torch.ones(COUNT))


@pytest.mark.parametrize(
    ("dtype", "write"),
    [
        (torch.float32, lambda m, written: m.decode(m.message(8192), values=written)),
        (torch.float32, lambda m, written: kernels.affine_decode([m.affine(16_384)], AFFINE, written)),
        (torch.bfloat16, lambda m, written: m.encode(new_residual=written)),
        (torch.bfloat16, lambda m, written: m.reduce(m.message(16_384), new_residual=written)),
    ],
    ids=["decode", "affine_decode", "encode", "reduce"],
)
def test_a_gradient_through_an_overwritten_result_is_an_error(backend, dtype, write):
    result = torch.randn(COUNT, dtype=dtype, requires_grad=True).exp()  # its gradient needs the result
    with torch.no_grad():
        write(_Memory(), result)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
