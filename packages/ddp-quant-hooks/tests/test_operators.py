"""The kernels as torch operators: right schemas, and kept whole by ``torch.compile``."""

import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.messages import Layout

LAYOUT = Layout("int8", 128)
OPERATORS = torch.ops.ddp_quant_hooks


def _message(values=1000, layout=LAYOUT):
    return torch.zeros(layout.message_bytes(values), dtype=torch.uint8)


def _arguments():
    values, messages = torch.randn(1000), [_message(512), _message(488)]
    shape = ("int8", 128)
    yield OPERATORS.encode, (values, messages, *shape, torch.randn(1000), torch.empty(1000))
    yield OPERATORS.encode, (values, [_message()], *shape)
    yield OPERATORS.reduce, ([_message(), _message()], "int8", 1000, _message(), "int8", 128)
    yield OPERATORS.decode, ([_message(), _message()], *shape, torch.empty(1000))
    yield OPERATORS.decode_shards, (messages, *shape, torch.empty(1000))
    affine = torch.zeros(AffineLayout(1000, 64, torch.float32).message_bytes, dtype=torch.uint8)
    yield OPERATORS.affine_encode, (values, affine, 64)
    yield OPERATORS.affine_decode, ([affine, affine], 64, torch.empty(1000))


@pytest.mark.parametrize("number", range(7))
def test_operators_do_what_their_schemas_say(number):
    operator, arguments = list(_arguments())[number]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.default, arguments, test_utils=tests)


def _there_and_back(values, residual):
    messages = [torch.zeros(LAYOUT.message_bytes(n), dtype=torch.uint8) for n in (512, values.numel() - 512)]
    lost, restored = torch.zeros_like(values), torch.zeros_like(values)
    kernels.encode_shards(values * 2, messages, LAYOUT, residual=residual, new_residual=lost)
    kernels.decode_shards(messages, LAYOUT, restored)
    whole, mean = (torch.zeros(LAYOUT.message_bytes(values.numel()), dtype=torch.uint8) for _ in range(2))
    kernels.encode(restored, whole, LAYOUT)
    kernels.reduce([whole, whole], LAYOUT, values.numel(), mean, LAYOUT)
    kernels.decode([mean], LAYOUT, restored)
    layout = AffineLayout(values.numel(), 100, torch.float32)
    affine, there = torch.zeros(layout.message_bytes, dtype=torch.uint8), torch.zeros_like(values)
    kernels.affine_encode(restored, affine, layout)
    kernels.affine_decode([affine, affine], layout, there)
    return restored + 1, lost, there


@pytest.mark.filterwarnings("ignore")  # inductor's own, different in every version
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_keeps_them_in_one_graph_with_the_same_bits(backend):
    torch.compiler.reset()
    values, residual = torch.randn(1000), torch.randn(1000)
    compiled = torch.compile(_there_and_back, backend=backend, fullgraph=True)
    for ours, eager in zip(compiled(values, residual), _there_and_back(values, residual), strict=True):
        assert torch.equal(ours, eager)
