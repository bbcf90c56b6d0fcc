"""PyTorch's 8-bit numbers: its results where they are correct, and correct results where they are not."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import run_hook

from ddp_quant_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from dist_utils.testing import grad_bucket, run_ranks, same_on_all_ranks


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
    return torch.stack([values.double() for values in inputs]).mean(0)


HOOKS = {
    "pertensor": (quantization_pertensor_hook, None),
    "perchannel": (quantization_perchannel_hook, 512),
    "perchannel 96": (lambda group, bucket: quantization_perchannel_hook(group, bucket, 96), 96),
}


def _hooks(rank):
    world_size, bucket = dist.get_world_size(), grad_bucket([torch.ones(3)])
    for name, (hook, channel) in HOOKS.items():
        for length in (1, 5, 511, 512, 513, 1024, 200_003):
            noise = [
                torch.randn(length, generator=torch.Generator().manual_seed(length + peer))
                for peer in range(world_size)
            ]
            case = (name, length)

            def run(inputs, hook=hook):
                result = run_hook(None, bucket, inputs[rank].clone(), hook)
                assert same_on_all_ranks(result), case  # noqa: B023
                return result

            # PyTorch's numbers, to the rounding of one sum and one division.
            largest = max(values.abs().max().item() for values in noise)
            torch.testing.assert_close(
                run(noise), reference(noise, channel), rtol=0, atol=2 * world_size * 2.0**-24 * largest
            )
            for dtype in (torch.bfloat16, torch.float16):
                cast = [values.to(dtype) for values in noise]
                expected = reference(cast, channel).to(dtype)
                rounding = torch.finfo(dtype).eps
                torch.testing.assert_close(run(cast), expected, rtol=rounding, atol=rounding * 2.0**-10)
            # All scales are equivalent: powers of two change no number.
            for power in (-120, -60, 60, 100):
                scaled = run([values * 2.0**power for values in noise])
                torch.testing.assert_close(
                    scaled, run(noise) * 2.0**power, rtol=0, atol=largest * 2.0 ** (power - 20)
                )
            constant = [torch.full((length,), -3.0)] * world_size
            torch.testing.assert_close(run(constant), constant[0], rtol=1e-6, atol=0)
            zeros = [torch.zeros(length)] * world_size
            assert torch.equal(run(zeros), zeros[0]), case
            # A step is at most the range (two signs: twice the largest) by 255, and an error half of it.
            for extreme in (1e-41, 2e38, 3.4e38):
                values = [part / part.abs().max() * extreme for part in noise]
                result = run(values)
                assert result.isfinite().all(), (case, extreme)
                allowed = extreme / 255 * 1.01 + 2.0**-149
                assert (result - _mean(values)).abs().max() <= allowed, (case, extreme)
            for dtype in (torch.float16, torch.bfloat16):
                highest = torch.finfo(dtype).max
                values = [(part.sign() * highest).to(dtype) for part in noise]
                result = run(values)
                assert result.isfinite().all(), (case, dtype)
                # Half a step of twice the range, and the rounding of the result.
                allowed = highest * (1.01 / 255 + torch.finfo(dtype).eps)
                assert (result.double() - _mean(values)).abs().max() <= allowed, (case, dtype)
            double = [values.double() * 1e200 for values in noise]
            assert (run(double) - _mean(double)).abs().max() <= 1e200 * largest / 255 * 1.01
            for special in (torch.nan, torch.inf):
                broken = [values.clone() for values in noise]
                broken[-1][length // 2] = special
                result = run(broken)
                width = channel or length
                first = length // 2 // width * width
                assert result.isnan().nonzero().flatten().tolist() == list(
                    range(first, min(first + width, length))
                )
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2 + rank]]), torch.ones(2), (10,))
    bucket.set_buffer(sparse)
    assert quantization_perchannel_hook(None, bucket).wait().to_dense()[0] == 1
    empty = torch.empty(0)
    assert run_hook(None, bucket, empty, quantization_pertensor_hook).numel() == 0
    with pytest.raises(ValueError, match="bucket_size must be a number of at least 1, got 0"):
        quantization_perchannel_hook(None, bucket, 0)
    with pytest.raises(TypeError, match="Python reducer"):
        quantization_pertensor_hook(None, (empty, empty))
    with pytest.raises(TypeError):
        quantization_pertensor_hook("all", bucket)
    bucket.set_buffer(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="floating-point"):
        quantization_pertensor_hook(None, bucket)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_pytorchs_where_those_are_right(world_size):
    run_ranks(_hooks, world_size, timeout=100)


def _alone(rank):
    del rank
    bucket, values = grad_bucket([torch.ones(3)]), torch.randn(1000)
    for hook, _ in HOOKS.values():
        assert torch.equal(run_hook(None, bucket, values.clone(), hook), values)


def test_one_rank_alone_keeps_its_gradients():
    run_ranks(_alone, 1)


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
