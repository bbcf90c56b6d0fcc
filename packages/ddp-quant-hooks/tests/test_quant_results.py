"""The averaged bucket has the bits of the formula, in place, on 2 and 3 ranks."""

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from quant_buckets import STATES, assert_same, make_state, rank_values, run_hook, simulate

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.kernels import VALUE_DTYPES
from dist_utils.testing import grad_bucket, run_ranks, same_bits

pytestmark = pytest.mark.short

LENGTHS = (1, 127, 128, 129, 1009, 128 * 40 + 1)
CHUNKS = 1_400_001
"""Values of several chunks in flight."""


def _special_inputs():
    """Return every rank's values by name, and those of them that are their own mean."""
    noise, ranks, largest = rank_values(1009), dist.get_world_size(), torch.finfo(torch.float32).max
    same = {
        "zeros": [torch.zeros(1009)] * ranks,
        "constant": [torch.full((1009,), -0.3)] * ranks,
        "largest": [torch.full((1009,), largest)] * ranks,
    }
    return {
        **same,
        "different constants": [torch.full((1009,), float(rank + 1)) for rank in range(ranks)],
        "tiny": [values * 1e-30 for values in noise],
        "subnormal": [values * 1e-41 for values in noise],
        "huge": [values.sign() * 3e38 for values in noise],
        "one rank only": [noise[0]] + [torch.zeros(1009)] * (ranks - 1),
    }, same


def _bits(rank):
    """Return the cases whose bits are not those of the formula, and how many there are."""
    bucket, compared, bad = grad_bucket([torch.ones(3)]), 0, {}

    def compare(case, state, inputs):
        nonlocal compared
        compared += 1
        expected, result = simulate(state, inputs), run_hook(state, bucket, inputs[rank].clone())
        if not same_bits(result, expected):
            bad[case] = (result.double() - expected.double()).abs().max().item()
        return result

    dtypes = cycle(VALUE_DTYPES)
    for name in STATES:
        state = make_state(name)
        for length in LENGTHS if state.options.error_feedback == "none" else LENGTHS[-1:]:
            dtype = next(dtypes)
            compare((name, dtype, length), state, rank_values(length, dtype))
        next(dtypes)  # so that a length has another dtype in the next state
        state.close()
    state = make_state("int8")
    inputs, same = _special_inputs()
    for name, values in inputs.items():
        result = compare(name, state, values)
        assert name not in same or torch.equal(result, values[0]), name
        assert result.isfinite().all(), name
    for special in (torch.nan, torch.inf):
        values = rank_values(1009)
        values[-1][500] = special
        result = compare(special, state, values)
        # NaN in the block of the value, and in no other, on every rank.
        assert result.isnan().nonzero().flatten().tolist() == list(range(384, 512))
    compare("several chunks", state, rank_values(CHUNKS))
    return compared, bad


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_bucket_gets_the_bits_of_the_formula_on_every_rank(world_size):
    for compared, bad in run_ranks(_bits, world_size, timeout=150):
        assert compared == 5 * len(LENGTHS) + 2 + 11
        assert bad == {}


def _paths(rank):
    """Average buckets without compression, and a complex one; refuse what is no gradient."""
    bucket, world_size = grad_bucket([torch.ones(3)]), dist.get_world_size()
    state = QuantizedAllreduceState(min_bytes=1000)
    mean = run_hook(state, bucket, torch.arange(200.0) + rank)
    torch.testing.assert_close(mean, torch.arange(200.0) + 1.0, rtol=1e-6, atol=0)
    doubles = rank_values(500, torch.float64)
    exact = sum(doubles) / world_size
    torch.testing.assert_close(run_hook(state, bucket, doubles[rank]), exact, rtol=1e-15, atol=1e-15)
    assert run_hook(state, bucket, torch.empty(0)).numel() == 0
    bucket.set_buffer(torch.sparse_coo_tensor(torch.tensor([[0, 2 + rank]]), torch.ones(2), (10,)))
    before = state.statistics
    mean = quantized_allreduce_hook(state, bucket).wait().to_dense()
    counted = state.statistics - before
    assert (counted.plain_buckets, counted.bytes_sent, counted.bytes_of_allreduce) == (1, 0, 0)
    torch.testing.assert_close(mean, torch.tensor([1, 0, 1 / 3, 1 / 3, 1 / 3, *[0] * 5]))
    values = rank_values(1000)[rank]
    numbers = torch.view_as_complex(values.clone().view(-1, 2))
    as_reals = run_hook(state, bucket, values)
    assert torch.equal(torch.view_as_real(run_hook(state, bucket, numbers)).view(-1), as_reals)
    statistics = state.statistics
    assert (statistics.quantized_buckets, statistics.plain_buckets) == (2, 3)
    assert 0 < statistics.bytes_saved < statistics.bytes_of_allreduce
    bucket.set_buffer(torch.ones(3, dtype=torch.int32))
    for wrong_state, wrong, match in (
        (state, bucket, "floating-point"),
        (None, bucket, "needs a QuantizedAllreduceState"),
        (state, (torch.ones(1), torch.ones(1)), "Python reducer"),
    ):
        with pytest.raises(TypeError, match=match):
            quantized_allreduce_hook(wrong_state, wrong)


def _exact_parameters(rank):
    """Average weights in 8 bits and biases exactly; the bias is a million times larger."""
    shapes = [(20, 30), (20,), (10, 20), ()]
    everyone = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(peer)) * (1 if len(shape) > 1 else 1e6)
            for shape in shapes
        ]
        for peer in range(3)
    ]
    state = QuantizedAllreduceState(min_bytes=0, exact_1d=True, sample_every=1)
    result = quantized_allreduce_hook(state, grad_bucket(everyone[rank])).wait()
    exact = [sum(gradients) / 3 for gradients in zip(*everyone, strict=True)]
    for part, expected in zip(result.split([one.numel() for one in exact]), exact, strict=True):
        if expected.dim() > 1:
            assert (part - expected.flatten()).norm() < 2e-2 * expected.norm(), "disturbed by its neighbor"
        else:
            torch.testing.assert_close(part, expected.flatten(), rtol=1e-6, atol=0)
    assert 0 < state.statistics.relative_error < 2e-2
    only_biases = grad_bucket([torch.full((500,), float(rank))])
    mean = quantized_allreduce_hook(state, only_biases).wait()
    assert_same([mean], [torch.ones(500)])
    assert state.statistics.plain_buckets == 1
    with_empty_matrix = grad_bucket([torch.empty(0, 3), torch.full((500,), float(rank))])
    mean = quantized_allreduce_hook(state, with_empty_matrix).wait()
    assert_same([mean], [torch.ones(500)])
    assert state.statistics.plain_buckets == 2


def _other_paths(rank):
    _paths(rank)
    _exact_parameters(rank)


def test_buckets_that_are_not_quantized_and_parameters_that_are_exact_if_asked_for():
    run_ranks(_other_paths, 3)


class _Ordered:
    """A bucket of parameters in an order, and their gradients."""

    def __init__(self, parameters, gradients):
        self._parameters = parameters
        self._values = torch.cat([gradients[one].flatten() for one in parameters])

    def index(self):
        return 0

    def buffer(self):
        return self._values

    def parameters(self):
        return self._parameters


def _reordered(rank):
    """Return whether a state that knows a bucket averages another one like a new state does.

    Both buckets have the same first parameter and length; others have changed places, of which one is exact.
    """
    first, bias, last = (torch.nn.Parameter(torch.ones(shape)) for shape in ((40, 50), (600,), (20, 30)))
    generator = torch.Generator().manual_seed(rank)
    gradients = {one: torch.randn(one.shape, generator=generator) for one in (first, bias, last)}
    known, means = make_state("int8", exact_1d=True), []
    for order in ([first, bias, last], [first, last, bias]):
        buckets = [_Ordered(order, gradients) for _ in range(3)]
        states = [known, known, make_state("int8", exact_1d=True)]
        means.append([quantized_allreduce_hook(*pair).wait() for pair in zip(states, buckets, strict=True)])
    return [same_bits(one, of_order[-1]) for of_order in means for one in of_order]


def test_a_bucket_of_the_same_length_and_other_parameters_is_not_taken_for_the_known_one():
    assert run_ranks(_reordered, 2) == [[True] * 6] * 2
