"""Residuals: later steps make up for rounding errors; a skipped step leaves none; none is misapplied."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import flat_residuals, make_state, run_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import grad_bucket, run_ranks


def _adds_up(rank):
    """Average different values for many steps: the sum of the means is the mean of the sums."""
    bucket, steps, world_size = grad_bucket([torch.ones(3)]), 40, dist.get_world_size()
    errors = {}
    for name in ("int8", "feedback shard", "feedback both"):
        state = make_state(name)
        generator = torch.Generator().manual_seed(rank)
        sent, meant = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
        for _ in range(steps):
            values = torch.randn(5000, generator=generator)
            meant += values
            sent += run_hook(state, bucket, values)
        dist.all_reduce(meant)
        meant /= world_size
        errors[name] = ((sent - meant).abs().max()).item()
        state.close()
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_over_many_steps_nothing_is_lost_but_the_last_residual(world_size):
    for errors in run_ranks(_adds_up, world_size, timeout=100):
        # A block's largest of 128 normal values is below 5.5 here; with a residual, 5.6. Half a step of it
        # stays behind at the end, for the ranks' own values and for the mean; and 2^-8 of it in each of 40
        # steps, where bf16 rounds it.
        half_step = 5.6 / 254
        assert errors["feedback both"] < 2 * half_step * (1 + 40 * 2.0**-8)
        assert errors["int8"] > 2 * half_step


def _not_finite(rank):
    """A NaN in one bucket of a step on one rank: no bucket's residual changes, anywhere."""
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 60)), bucket_cap_mb=0.005
    )
    state = make_state("feedback both")
    model.register_comm_hook(state, quantized_allreduce_hook)

    def step(*, poison=False):
        x = torch.randn(3, 60, generator=torch.Generator().manual_seed(rank))
        output = model(x)
        if poison and rank == 1:
            with torch.no_grad():
                output[0, 0] = torch.nan  # in one row of the last layer's gradient only
        output.square().sum().backward()
        model.zero_grad()

    def kept():
        return list(flat_residuals(state.state_dict(model)).values())

    for _ in range(6):
        step()
    before = kept()
    assert len(before) >= 2
    assert any(residual.abs().max() > 0 for residual in before)
    step(poison=True)
    assert all(torch.equal(old, new) for old, new in zip(before, kept(), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(before, kept(), strict=True)), (
        "asking changes nothing"
    )
    step()
    assert not all(torch.equal(old, new) for old, new in zip(before, kept(), strict=True))


def test_a_step_that_is_not_finite_touches_no_residual():
    run_ranks(_not_finite, 3)


def _mixed(rank):
    """The NaN is in a bucket that is averaged without compression: the residuals of quantized ones stay."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    state = make_state("feedback both", min_bytes=3000)
    model.register_comm_hook(state, quantized_allreduce_hook)

    def step(scale):
        x = torch.randn(3, 60, generator=torch.Generator().manual_seed(rank))
        (model(x).sum() * scale).backward()
        model.zero_grad()

    for _ in range(8):
        step(1.0)
    assert state.statistics.plain_buckets >= 6
    assert state.statistics.quantized_buckets >= 6
    before = list(flat_residuals(state.state_dict(model)).values())
    hook = net[1].bias.register_hook(lambda gradient: gradient * torch.nan) if rank == 0 else None
    step(1.0)
    after = list(flat_residuals(state.state_dict(model)).values())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    if hook is not None:
        hook.remove()
    step(2.0)
    later = list(flat_residuals(state.state_dict(model)).values())
    assert not all(torch.equal(old, new) for old, new in zip(before, later, strict=True))


def test_a_plain_bucket_tells_that_a_step_is_not_finite():
    run_ranks(_mixed, 2)


def test_the_defaults_of_4_bits_feed_errors_back():
    state = QuantizedAllreduceState(bits=4)
    assert (state.error_feedback, state.scatter.block_size, state.gather.format) == ("both", 32, "int4")
    assert QuantizedAllreduceState().error_feedback == "none"
