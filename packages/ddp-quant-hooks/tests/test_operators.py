"""The kernels as torch operators: correct schemas, and kept whole by ``torch.compile``."""

import importlib

import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.wire_format import Layout

LAYOUT = Layout("int8", 128)
OPERATORS = torch.ops.ddp_quant_hooks


@pytest.fixture(params=["best", "torch_ops"])
def backend(request, monkeypatch):
    """The backend in use here, and the one that always exists."""
    if request.param == "torch_ops":
        module = importlib.import_module("ddp_quant_hooks.kernels.operators")
        monkeypatch.setattr(module, "backend_for", lambda _: torch_ops)


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
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_torch_compile_keeps_them_in_one_graph_with_the_same_bits(backend):
    torch.compiler.reset()
    values, residual = torch.randn(1000), torch.randn(1000)
    compiled = torch.compile(_there_and_back, backend=backend, fullgraph=True)
    for ours, eager in zip(compiled(values, residual), _there_and_back(values, residual), strict=True):
        assert torch.equal(ours, eager)


# The positions of the arguments of :func:`_arguments` that each operator writes.
WRITTEN = [(1, 5), (1,), (3,), (3,), (3,), (1,), (2,)]


def _tensors(argument):
    return argument if isinstance(argument, list) else [argument]


@pytest.mark.parametrize("number", range(7))
def test_autograd_sees_what_they_write(number, backend):
    operator, arguments = list(_arguments())[number]
    arguments = list(arguments)
    written = [tensor for place in WRITTEN[number] for tensor in _tensors(arguments[place])]
    before = [tensor._version for tensor in written]
    operator(*arguments)
    assert all(tensor._version > old for tensor, old in zip(written, before, strict=True))
    for place in WRITTEN[number]:
        if isinstance(arguments[place], list) or not arguments[place].is_floating_point():
            continue  # bytes never require grad
        untouched = torch.full_like(arguments[place], 7.0)
        for needs_grad in (untouched.clone().requires_grad_(), untouched.clone().requires_grad_() + 0.0):
            arguments[place] = needs_grad
            with pytest.raises(RuntimeError, match="requires grad"):
                operator(*arguments)
            assert torch.equal(needs_grad, untouched)
            with torch.no_grad():
                operator(*arguments)
            assert not torch.equal(needs_grad, untouched)
        arguments[place] = untouched


def test_a_gradient_through_an_overwritten_result_is_an_error(backend):
    leaf = torch.randn(1000, requires_grad=True)
    result = leaf.exp()  # its gradient needs the result
    with torch.no_grad():
        kernels.decode([_message()], LAYOUT, result)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_may_not_write_a_leaf_either():
    torch.compiler.reset()
    leaf = torch.zeros(1000, requires_grad=True)
    compiled = torch.compile(
        lambda message, values: kernels.decode([message], LAYOUT, values), backend="eager"
    )
    with pytest.raises(RuntimeError, match="requires grad"):
        compiled(_message(), leaf)


def test_inference_tensors_can_be_written(backend):
    with torch.inference_mode():
        values = torch.ones(1000)
        kernels.decode([_message()], LAYOUT, values)
        assert torch.equal(values, torch.zeros(1000))
