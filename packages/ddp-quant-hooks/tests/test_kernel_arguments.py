"""Arguments that the kernels refuse, in the same way on every backend, before anything is written."""

import importlib

import numpy as np
import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.wire_format import Layout

INT8, INT4 = Layout("int8", 128), Layout("int4", 128)
COUNT = 1024
BYTES = INT8.message_bytes(COUNT)
AFFINE = AffineLayout(COUNT, 64, torch.float32)


@pytest.fixture(params=["best", "torch_ops"])
def backend(request, monkeypatch):
    if request.param == "torch_ops":
        module = importlib.import_module("ddp_quant_hooks.kernels.operators")
        monkeypatch.setattr(module, "backend_for", lambda _: torch_ops)


class _Memory:
    """Named tensors in 8 KiB of memory, for making cases."""

    def __init__(self):
        self.bytes = torch.arange(32_768, dtype=torch.int64).to(torch.uint8)
        self.before = self.bytes.clone()

    def floats(self, start, length=COUNT):
        return self.bytes[start : start + 4 * length].view(torch.float32)

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
        lambda: kernels.encode_shards(values, [halves[0], memory.message(16_512, values=512)], INT8),
    )
    yield (
        "new_residual over values",
        lambda: kernels.encode(values, message, INT8, new_residual=memory.floats(4)),
    )
    yield "values are new_residual", lambda: kernels.encode(values, message, INT8, new_residual=values)
    kept = memory.floats(8192)
    for name, residual, new_residual in (
        ("residual is new_residual", kept, kept),
        ("residual overlaps new_residual", kept, memory.floats(8192 + 128)),
        ("message over residual", memory.floats(16_384), None),
        ("message over new_residual", None, memory.floats(16_384 + 4)),
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
    yield "decode_shards", lambda: kernels.decode_shards(halves, INT8, memory.floats(20_480))
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
        kernels.reduce(others, INT8, COUNT, mean, INT8, new_residual=memory.floats(8192 + 4))
    with pytest.raises(ValueError, match=r"messages\[0\] and residual must not share memory"):
        kernels.encode(memory.floats(0), memory.message(8192), INT8, residual=memory.floats(8192 + 4))


def test_what_is_only_read_may_be_the_same(backend):
    values, messages = torch.randn(COUNT), [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    kernels.encode(values, messages[0], INT8, residual=values)
    means = torch.zeros(COUNT), torch.zeros(COUNT)
    kernels.decode([messages[0]] * 3, INT8, means[0])
    # The message of the mean may be one of the messages.
    kernels.reduce([messages[0]] * 2, INT8, COUNT, messages[0], INT8)
    kernels.decode([messages[0]], INT8, means[1])
    assert torch.allclose(means[0], means[1], atol=2 * values.abs().max().item() / 127)
    # Neighbors in memory share none.
    memory = _Memory()
    kernels.encode(values, memory.message(0), INT8, new_residual=memory.floats(-(-BYTES // 16) * 16))


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
        lambda: kernels.decode_shards([bad], INT8, values),
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
        lambda: kernels.encode(values, good, INT8, residual=floats),
        lambda: kernels.decode([good], INT8, floats),
    ):
        with pytest.raises(ValueError, match="must start at a multiple of 4 bytes"):
            call()


def test_residuals_are_of_one_type_that_has_the_range(backend):
    values, message = torch.randn(COUNT), torch.zeros(BYTES, dtype=torch.uint8)
    halves = torch.zeros(COUNT, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="residual and new_residual must be of one dtype"):
        kernels.encode(values, message, INT8, residual=torch.zeros(COUNT), new_residual=halves)
    with pytest.raises(TypeError, match=r"new_residual must be of torch\.float32 or torch\.bfloat16, got"):
        kernels.encode(values, message, INT8, new_residual=halves.half())
    assert not message.any()
    assert not halves.any()


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
        (("int8", 100), ValueError, "multiple of 32"),
        (("int8", 0), ValueError, "multiple of 32"),
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
