"""Arguments that the kernels refuse, in the same way on every backend, before anything is written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_backends import computed_by

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import _Work
from ddp_quant_hooks.kernels.job import Shard
from ddp_quant_hooks.kernels.programs import AffineWork

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
    """Named tensors in 8 KiB of memory, for making cases."""

    def __init__(self):
        self.bytes = torch.arange(32_768, dtype=torch.int64).to(torch.uint8)
        self.before = self.bytes.clone()

    def floats(self, start, length=COUNT):
        return self.bytes[start : start + 4 * length].view(torch.float32)

    def halves(self, start, length=COUNT):
        return self.bytes[start : start + 2 * length].view(torch.bfloat16)

    def message(self, start, layout=INT8, values=COUNT):
        return self.bytes[start : start + layout.message_bytes(values)]

    def affine(self, start):
        return self.bytes[start : start + AFFINE.message_bytes]


def _overlaps(memory):
    values, message = memory.floats(0), memory.message(16_384)
    halves = [memory.message(start, values=512) for start in (16_384, 20_480)]
    yield "message over values", lambda: kernels.encode(values, memory.message(4092), INT8)
    yield (
        "two shards' messages",
        lambda: kernels.encode_shards(
            values, [halves[0], memory.message(16_512, values=512)], [512, 512], INT8
        ),
    )
    yield (
        "new_residual over values",
        lambda: kernels.encode(values, message, INT8, new_residual=memory.halves(4)),
    )
    in_bf16, kept = memory.halves(0), memory.halves(8192)
    yield "values are new_residual", lambda: kernels.encode(in_bf16, message, INT8, new_residual=in_bf16)
    for name, residual, new_residual in (
        ("residual is new_residual", kept, kept),
        ("residual overlaps new_residual", kept, memory.halves(8192 + 128)),
        ("message over residual", memory.halves(16_384), None),
        ("message over new_residual", None, memory.halves(16_384 + 4)),
    ):
        yield (
            name,
            lambda residual=residual, new_residual=new_residual: kernels.encode(
                values, message, INT8, residual=residual, new_residual=new_residual
            ),
        )
        yield (
            f"reduce: {name}",
            lambda residual=residual, new_residual=new_residual: kernels.reduce(
                [memory.message(0)], INT8, COUNT, message, INT8, residual=residual, new_residual=new_residual
            ),
        )
    yield (
        "reduce: message over a part of another",
        lambda: kernels.reduce([memory.message(0)], INT8, COUNT, memory.message(64), INT8),
    )
    yield (
        "reduce: one of messages, another layout",
        lambda: kernels.reduce([memory.message(0)], INT8, COUNT, memory.message(0, INT4), INT4),
    )
    yield "decode", lambda: kernels.decode([message], INT8, memory.floats(16_384 - 4))
    yield (
        "decode_shards",
        lambda: kernels.decode_shards([[half] for half in halves], [512, 512], INT8, memory.floats(20_480)),
    )
    yield "affine_encode", lambda: kernels.affine_encode(values, memory.affine(4000), AFFINE)
    yield "affine_decode", lambda: kernels.affine_decode([memory.affine(4000)], AFFINE, values)


def test_memory_that_is_written_is_used_for_nothing_else(backend):
    memory, names = _Memory(), []
    for name, call in _overlaps(memory):
        with pytest.raises(ValueError, match="must not share memory"):
            call()
        assert torch.equal(memory.bytes, memory.before), name
        names.append(name)
    assert len(names) == 18


def test_an_error_names_the_places_that_share_memory(backend):
    memory = _Memory()
    mean, others = memory.message(0), [memory.message(start) for start in (0, 8192)]
    with pytest.raises(ValueError, match=r"messages\[1\] and new_residual must not share memory"):
        kernels.reduce(others, INT8, COUNT, mean, INT8, new_residual=memory.halves(8192 + 4))
    with pytest.raises(ValueError, match="message and residual must not share memory"):
        kernels.encode(memory.floats(0), memory.message(8192), INT8, residual=memory.halves(8192 + 4))


def test_what_is_only_read_may_be_the_same(backend):
    values, messages = torch.randn(COUNT), [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    in_bf16 = values.bfloat16()
    kernels.encode(in_bf16, messages[0], INT8, residual=in_bf16)
    means = torch.zeros(COUNT), torch.zeros(COUNT)
    kernels.decode([messages[0]] * 3, INT8, means[0])
    # The message of the mean may be one of the messages.
    kernels.reduce([messages[0]] * 2, INT8, COUNT, messages[0], INT8)
    kernels.decode([messages[0]], INT8, means[1])
    assert torch.allclose(means[0], means[1], atol=4 * values.abs().max().item() / 127)
    # Neighbors in memory share none.
    memory = _Memory()
    kernels.encode(values, memory.message(0), INT8, new_residual=memory.halves(-(-BYTES // 16) * 16))


def _misaligned(bytes_wanted, shift):
    return torch.zeros(bytes_wanted + 16, dtype=torch.uint8)[shift : shift + bytes_wanted]


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_messages_start_at_whole_numbers(backend, shift):
    values, good = torch.zeros(COUNT), torch.zeros(BYTES, dtype=torch.uint8)
    bad = _misaligned(BYTES, shift)
    bad.fill_(9)
    calls = [
        lambda: kernels.encode(values, bad, INT8),
        lambda: kernels.reduce([bad], INT8, COUNT, good, INT8),
        lambda: kernels.reduce([good], INT8, COUNT, bad, INT8),
        lambda: kernels.decode([good, bad], INT8, values),
        lambda: kernels.decode_shards([[bad]], [COUNT], INT8, values),
        lambda: kernels.affine_encode(values, _misaligned(AFFINE.message_bytes, shift), AFFINE),
        lambda: kernels.affine_decode([_misaligned(AFFINE.message_bytes, shift)], AFFINE, values),
    ]
    # A valid address at an invalid offset in the storage.
    odd = np.zeros(BYTES + 16, dtype=np.uint8)
    first = (-odd.ctypes.data - shift) % 4
    storage = torch.from_numpy(odd[first:])
    calls.append(lambda: kernels.encode(values, storage[shift : shift + BYTES], INT8))
    for call in calls:
        with pytest.raises(ValueError, match="must start at a multiple of 4 bytes"):
            call()
    assert (bad == 9).all()
    assert not good.any()
    floats = torch.frombuffer(bytearray(4 * COUNT + shift), dtype=torch.float32, offset=shift)
    for call in (
        lambda: kernels.encode(floats, good, INT8),
        lambda: kernels.decode([good], INT8, floats),
    ):
        with pytest.raises(ValueError, match="must start at a multiple of 4 bytes"):
            call()


def test_residuals_are_bf16(backend):
    values, message = torch.randn(COUNT), torch.zeros(BYTES, dtype=torch.uint8)
    for other in (torch.zeros(COUNT), torch.zeros(COUNT).half()):
        for name in ("residual", "new_residual"):
            with pytest.raises(TypeError, match=rf"^{name} must be of torch\.bfloat16, got {other.dtype}"):
                kernels.encode(values, message, INT8, **{name: other})
    assert not message.any()


@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        ([512, 513], ValueError, "sum to the number of values"),
        ([1024 + 128, -128], ValueError, "at least 0"),
        ([512.0, 512], TypeError, "must be ints"),
        ([1024], ValueError, "each shard must have a length, got 1 for 2 shards"),
    ],
)
def test_lengths_of_shards_are_checked(backend, lengths, error, text):
    values, messages = torch.ones(COUNT), [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(error, match=text):
        kernels.encode_shards(values, messages, lengths, INT8)
    with pytest.raises(error, match=text):
        kernels.decode_shards([[message] for message in messages], lengths, INT8, values)
    assert not any(message.any() for message in messages)


def test_shards_have_the_same_number_of_messages(backend):
    values, message = torch.ones(COUNT), torch.zeros(INT8.message_bytes(512), dtype=torch.uint8)
    with pytest.raises(ValueError, match="the same number of messages"):
        kernels.decode_shards([[message], [message] * 2], [512, 512], INT8, values)
    for messages in ([[], []], []):
        with pytest.raises(ValueError, match="at least one message"):
            kernels.decode_shards(messages, [512, 512], INT8, values)
    with pytest.raises(ValueError, match="at least one message"):
        kernels.encode_shards(values, [], [], INT8)
    with pytest.raises(ValueError, match="at least one message"):
        kernels.not_finite([], [], INT8)
    assert (values == 1).all()


def test_shards_may_be_empty(backend):
    values, restored = torch.randn(700), torch.zeros(700)
    lengths = [0, 512, 0, 188, 0]
    messages = [torch.zeros(INT8.message_bytes(length), dtype=torch.uint8) for length in lengths]
    kernels.encode_shards(values, messages, lengths, INT8)
    kernels.decode_shards([[message] * 2 for message in messages], lengths, INT8, restored)
    assert (restored - values).abs().max() <= values.abs().max() / 100
    nothing = torch.zeros(0)
    kernels.encode_shards(nothing, messages[:1], [0], INT8)
    kernels.decode_shards([messages[:1]], [0], INT8, nothing)


def test_numbers_of_values_are_checked(backend):
    message = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="values must be at least 0, got -1"):
        kernels.reduce([message], INT8, -1, message.clone(), INT8)
    for values in (1.0, True, "1", None):
        with pytest.raises(TypeError, match="values must be an int"):
            kernels.reduce([message], INT8, values, message.clone(), INT8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("int8", 128.0), TypeError, "block_size must be an int, got 128.0"),
        (("int8", True), TypeError, "block_size must be an int, got True"),
        (("int8", "128"), TypeError, "block_size must be an int"),
        (("int8", None), TypeError, "block_size must be an int"),
        ((8, 128), TypeError, "format must be a str, got 8"),
        (([], 128), TypeError, "format must be a str"),
        (("int5", 128), ValueError, "format must be one of"),
        (("int8", 96), ValueError, "one of"),
        (("int8", 2048), ValueError, "one of"),
        (("bf16", 128), ValueError, "format must be one of int8, int4, fp16"),
    ],
)
def test_a_layout_checks_its_fields(arguments, error, text):
    with pytest.raises(error, match=text):
        Layout(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((10, 0, torch.float32), ValueError, "channel must be at least 1, got 0"),
        ((10, -3, torch.float32), ValueError, "channel must be at least 1"),
        ((-1, 4, torch.float32), ValueError, "values must be at least 0, got -1"),
        ((10.0, 4, torch.float32), TypeError, "values must be an int, got 10.0"),
        ((10, 4.0, torch.float32), TypeError, "channel must be an int, got 4.0"),
        ((10, True, torch.float32), TypeError, "channel must be an int, got True"),
        ((10, 4, "float32"), TypeError, "dtype must be a torch.dtype"),
        ((10, 4, torch.float16), ValueError, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_an_affine_layout_checks_its_fields(arguments, error, text):
    with pytest.raises(error, match=text):
        AffineLayout(*arguments)


@pytest.mark.parametrize("affine", [False, True])
def test_an_affine_layout_has_the_precision_of_its_values(backend, affine):
    values, layout = torch.zeros(COUNT, dtype=torch.float64), AFFINE
    if affine:
        values, layout = values.float(), AffineLayout(COUNT, 64, torch.float64)
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8)
    with pytest.raises(TypeError, match="values must be of"):
        kernels.affine_encode(values, message, layout)
    with pytest.raises(TypeError, match="values must be of"):
        kernels.affine_decode([message], layout, values)


# ---- autograd ----


def _writes():
    """Yield calls, each with what it writes."""
    values, messages = torch.randn(COUNT), [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    lost, affine = torch.zeros(COUNT).bfloat16(), torch.zeros(AFFINE.message_bytes, dtype=torch.uint8)
    yield lambda: kernels.encode(values, messages[0], INT8, new_residual=lost), [messages[0], lost]
    yield lambda: kernels.reduce(messages, INT8, COUNT, messages[1], INT8), messages[1:]
    yield lambda: kernels.decode(messages, INT8, values), [values]
    yield lambda: kernels.affine_encode(values, affine, AFFINE), [affine]
    yield lambda: kernels.affine_decode([affine], AFFINE, values), [values]


def test_autograd_sees_what_is_written(backend):
    for call, written in _writes():
        before = [tensor._version for tensor in written]
        call()
        assert all(tensor._version > old for tensor, old in zip(written, before, strict=True))


def test_what_requires_grad_is_not_written_while_gradients_are_recorded(backend):
    values, message = torch.ones(COUNT), torch.zeros(BYTES, dtype=torch.uint8)
    for written in (torch.ones(COUNT, requires_grad=True), torch.ones(COUNT, requires_grad=True) + 0.0):
        with pytest.raises(RuntimeError, match="values, which they would write, requires grad"):
            kernels.decode([message], INT8, written)
        assert torch.equal(written, values)
        with torch.no_grad():
            kernels.decode([message], INT8, written)
        assert not written.any()
    lost = torch.ones(COUNT).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match="new_residual, which they would write, requires grad"):
        kernels.encode(values, message, INT8, new_residual=lost)
    assert not message.any()
    lost = lost.detach()
    kernels.encode(values.requires_grad_(), message, INT8, new_residual=lost)  # is read
    assert not lost.requires_grad


def test_a_gradient_through_an_overwritten_result_is_an_error(backend):
    result = torch.randn(COUNT, requires_grad=True).exp()  # its gradient needs the result
    with torch.no_grad():
        kernels.decode([torch.zeros(BYTES, dtype=torch.uint8)], INT8, result)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_inference_tensors_can_be_written(backend):
    with torch.inference_mode():
        values = torch.ones(COUNT)
        kernels.decode([torch.zeros(BYTES, dtype=torch.uint8)], INT8, values)
        assert not values.any()


@pytest.mark.parametrize(
    ("file", "struct", "fields"),
    [
        ("cpu_kernels.cpp", "Work", [name for name, _ in _Work._fields_]),
        ("block_kernels.cu", "Shard", [*Shard._fields]),
        ("affine_kernels.cu", "Work", [*AffineWork._fields, "messages"]),
    ],
)
def test_the_kernels_have_the_members_that_python_writes(file, struct, fields):
    """In this order; GPU programs assert their size when they are compiled."""
    source = (Path(kernels.__file__).parents[1] / "csrc" / file).read_text()
    (body,) = re.findall(rf"struct {struct} \{{.*?\n(.*?)\n}};", source, re.DOTALL)
    members = re.sub(r"//.*|\[.*?\]", "", body).replace("*", " ").replace("const", "")
    declared = [name.split()[-1] for line in members.split(";") for name in line.split(",") if name.strip()]
    assert declared == fields
