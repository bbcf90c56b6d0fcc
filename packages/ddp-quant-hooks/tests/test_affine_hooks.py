"""PyTorch's 8-bit numbers: its results where they are correct, and correct results where they are not."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import rank_values, run_hook

from ddp_quant_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from dist_utils import require_same_on_all_ranks
from dist_utils.testing import grad_bucket, run_ranks

HOOKS = {
    "pertensor": (quantization_pertensor_hook, None),
    "perchannel": (quantization_perchannel_hook, 512),
    "perchannel 96": (lambda group, bucket: quantization_perchannel_hook(group, bucket, 96), 96),
}


def reference(inputs, channel):
    """Compute what torch 2.15's hooks give: observers of its min and max, eager formulas, in fp32."""
    total = torch.zeros(inputs[0].numel())
    for values in inputs:
        count = values.numel()
        width = channel or count
        rows = torch.nn.functional.pad(values.float(), (0, -count % width)).view(-1, width)
        low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / torch.full_like(low, 255.0)).clamp(min=torch.finfo(torch.float32).eps)
        zero_point = (-torch.round(low / scale)).clamp(0, 255)
        numbers = (torch.round(rows / scale) + zero_point).clamp(0, 255)
        total += (scale * (numbers - zero_point)).flatten()[:count]
    return total / len(inputs)


def _mean(inputs):
    return sum(values.double() for values in inputs) / len(inputs)


def _cases(noise, channel):
    """Yield every rank's values, the expected mean, and the error that is allowed for every value."""
    length, world_size = len(noise[0]), len(noise)
    largest = max(values.abs().max().item() for values in noise)
    # PyTorch's numbers, to the rounding of one sum and one division.
    yield noise, reference(noise, channel), 2 * world_size * 2.0**-24 * largest
    for dtype in (torch.bfloat16, torch.float16):
        cast, epsilon = [values.to(dtype) for values in noise], torch.finfo(dtype).eps
        expected = reference(cast, channel)
        yield cast, expected, epsilon * (expected.abs() + 2.0**-10)
    for power in (-120, -60, 60, 100):  # all scales are equivalent: powers of two change no number
        expected = reference(noise, channel) * 2.0**power
        yield [values * 2.0**power for values in noise], expected, largest * 2.0 ** (power - 20)
    constant = torch.full((length,), -3.0)
    yield [constant] * world_size, constant, 3e-6
    yield [torch.zeros(length)] * world_size, torch.zeros(length), 0.0
    # A step is at most the range (two signs: twice the largest) by 255, and an error half of it.
    for extreme in (1e-41, 2e38, 3.4e38):
        values = [part / part.abs().max() * extreme for part in noise]
        yield values, _mean(values), extreme / 255 * 1.01 + 2.0**-149
    double = [values.double() * 1e200 for values in noise]
    yield double, _mean(double), 1e200 * largest / 255 * 1.01
    for dtype in (torch.float16, torch.bfloat16):  # and the rounding of the result
        highest = torch.finfo(dtype).max
        values = [(part.sign() * highest).to(dtype) for part in noise]
        yield values, _mean(values), highest * (1.01 / 255 + torch.finfo(dtype).eps)


def _numbers(rank):
    world_size, bucket, results = dist.get_world_size(), grad_bucket([torch.ones(3)]), {}
    for name, (hook, channel) in HOOKS.items():
        for length in (1, 513, 20_003):
            noise = rank_values(length)
            for case, (inputs, expected, allowed) in enumerate(_cases(noise, channel)):
                result = run_hook(None, bucket, inputs[rank].clone(), hook)
                results[f"{name} {length} {case}"] = result
                error = (result.double() - expected).abs()
                assert (error <= allowed).all(), (name, length, case, error.max(), allowed)
            for special in (torch.nan, torch.inf):
                values = noise[rank].clone()
                if rank == world_size - 1:
                    values[length // 2] = special
                result = run_hook(None, bucket, values, hook)
                width = channel or length
                first = length // 2 // width * width
                in_channel = list(range(first, min(first + width, length)))
                assert result.isnan().nonzero().flatten().tolist() == in_channel, (name, length)
    require_same_on_all_ranks(results)


def _buckets(rank):
    bucket, empty = grad_bucket([torch.ones(3)]), torch.empty(0)
    assert run_hook(None, bucket, empty, quantization_pertensor_hook).numel() == 0
    bucket.set_buffer(torch.sparse_coo_tensor(torch.tensor([[0, 2 + rank]]), torch.ones(2), (10,)))
    assert quantization_perchannel_hook(None, bucket).wait().to_dense()[0] == 1
    with pytest.raises(ValueError, match="bucket_size must be a number of at least 1, got 0"):
        quantization_perchannel_hook(None, bucket, 0)
    with pytest.raises(TypeError, match="Python reducer"):
        quantization_pertensor_hook(None, (empty, empty))
    with pytest.raises(TypeError):
        quantization_pertensor_hook("all", bucket)
    bucket.set_buffer(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="floating-point"):
        quantization_pertensor_hook(None, bucket)


def _hooks(rank):
    _numbers(rank)
    _buckets(rank)


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_results_are_pytorchs_where_those_are_right(world_size):
    run_ranks(_hooks, world_size, timeout=100)


def _alone(_):
    bucket, values = grad_bucket([torch.ones(3)]), torch.arange(1000.0)
    return [run_hook(None, bucket, values.clone(), hook).equal(values) for hook, _ in HOOKS.values()]


def test_one_rank_alone_keeps_its_gradients():
    assert run_ranks(_alone, 1) == [[True] * 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_reference_is_what_pytorchs_observers_give():
    quantization = pytest.importorskip("torch.ao.quantization", reason="torch has no observers any more")
    values = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    observer = quantization.PerChannelMinMaxObserver()
    observer(values.view(-1, 512))
    scale, zero_point = observer.calculate_qparams()
    numbers = (torch.round(values.view(-1, 512) / scale[:, None]) + zero_point[:, None]).clamp(0, 255)
    expected = (scale[:, None] * (numbers - zero_point[:, None])).flatten()
    assert torch.equal(reference([values], 512), expected)
