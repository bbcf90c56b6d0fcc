"""Many ranks in levels: fewer messages, the same number of bytes, identical bits on all ranks."""

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from kernel_backends import computed_by
from kernel_cases import decoded, differences, encoded, reduced
from quant_buckets import make_state, rank_values, run_hook

from ddp_quant_hooks import all_reduce, reduce_scatter_tensor
from ddp_quant_hooks.kernels import torch_ops
from dist_utils.testing import grad_bucket, run_ranks

LENGTHS = (1, 130, 1000, 40_001)


def _mean_message(state, inputs, sizes):
    """Return the final message of ranks in levels. Chunks and shards end at block boundaries."""
    count, (size, *between), layout = inputs[0].numel(), sizes, state.options.scatter_layout
    messages = [encoded(values, layout) for values in inputs]
    if between:
        rows = [messages[first : first + size] for first in range(0, len(messages), size)]
        return _mean_message(state, [decoded(row, count, layout) for row in rows], between)
    return reduced(messages, count, layout, state.options.gather_layout)


def _expected(state, inputs, sizes):
    with computed_by(torch_ops):
        message = _mean_message(state, inputs, sizes)
        return decoded([message], inputs[0].numel(), state.options.gather_layout, inputs[0].dtype)


def _bits(rank, sizes):
    bucket, world_size = grad_bucket([torch.ones(3)]), dist.get_world_size()
    for name in ("int8", "int8/fp16", "int4"):
        state = make_state(name, levels=sizes)
        for length, dtype in zip(LENGTHS, cycle([torch.bfloat16, torch.float32]), strict=False):
            inputs = rank_values(length, dtype)
            found = {"mean": run_hook(state, bucket, inputs[rank].clone())}
            assert differences(found, {"mean": _expected(state, inputs, sizes)}) == {}, (sizes, name, length)
        state.close()
    state = make_state("int8", levels=sizes)
    values = 128 * 24 * world_size  # whole blocks for each shard of each level
    inputs = rank_values(values)
    mean = run_hook(state, bucket, inputs[rank].clone())
    # Half a step of the largest value: of a rank's own, of each row's mean, of the mean.
    largest = max(values.abs().max() for values in inputs)
    assert (mean - sum(inputs) / world_size).abs().max() <= (len(sizes) + 1) * largest / 254 * 1.0001
    assert state.statistics.bytes_sent == 2 * (world_size - 1) * values // world_size * (128 + 4) // 128
    parts = list(torch.split(inputs[rank].clone(), [1000, values - 1000]))
    all_reduce(parts, dist.ReduceOp.AVG, state)
    assert torch.equal(torch.cat(parts), mean)
    inputs[-1][500] = torch.nan
    result = run_hook(state, bucket, inputs[rank].clone())
    assert result.isnan().nonzero().flatten().tolist() == list(range(384, 512))
    state.close()


def _sums_over_steps(rank, sizes):
    """Return the error of the sum of many means, and of one mean. Small buckets: some shards are empty."""
    bucket, errors = grad_bucket([torch.ones(3)]), {}
    for length in (200, 5000):
        state = make_state("feedback both", levels=sizes)
        meant, got = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
        for step in range(30):
            inputs = rank_values(length, seed=99 * step)
            meant += sum(values.double() for values in inputs) / len(inputs)
            got += run_hook(state, bucket, inputs[rank])
        errors[length] = (got - meant).abs().max().item()
        state.close()
    return errors


def _six(rank):
    _bits(rank, (3, 2))
    wrong = make_state("int8", levels=(2, 2))
    with pytest.raises(RuntimeError, match=r"product of levels \(2, 2\) is not 6, the number of ranks"):
        run_hook(wrong, grad_bucket([torch.ones(3)]), torch.ones(1000))
    if rank == 0:  # before any communication
        with pytest.raises(ValueError, match=r"levels=\(3, 2\) do not work"):
            reduce_scatter_tensor(torch.empty(10), torch.ones(60), group=make_state("int8", levels=(3, 2)))
    state = make_state("int8", levels=(6,))
    mean = torch.empty(10)
    reduce_scatter_tensor(mean, torch.ones(60), dist.ReduceOp.AVG, state)
    assert torch.equal(mean, torch.ones(10))
    state.close()
    return _sums_over_steps(rank, (3, 2))


def test_every_rank_gets_the_bits_of_the_formula_and_the_errors_of_levels_are_fed_back():
    for errors in run_ranks(_six, 6, timeout=200):
        # Half a step of the last residuals stays behind: of the ranks' own, of a row's mean, of the mean.
        # A block's largest of 128 normal values is below 5 here; with a residual, 5.1.
        assert max(errors.values()) < 3 * 5.1 / 254
