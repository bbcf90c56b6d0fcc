"""Low rank among two to eight ranks on one host and several: the error, the bytes, and equal bits."""

import sys

import pytest
import torch
import torch.distributed as dist
from averaging_callers import LowRankBuckets, make_low_rank_state
from host_names import take_host_name
from quant_buckets import flat_residuals

from ddp_quant_hooks import all_reduce
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import run_ranks, same_on_all_ranks, tcp_bytes_sent

ROWS, COLUMNS, RANK, STEPS = 512, 640, 8, 8
INT4 = Layout("int4", 32, rotate=True)
NO_NAMES = "this user may not give processes host names of their own"
MANY = pytest.mark.exhaustive
PLACES = ["00", "0000", "0011", "0123", "00122", *(pytest.param(8 * "0", marks=MANY),)]
PLACES += [pytest.param(hosts, marks=MANY) for hosts in ("00001111", "01234567", "00011122")]


def _gradient(rank, number):
    """Return a matrix whose singular values fall: a part is the same on all ranks and in all steps."""

    def part(seed):
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(size, 40, generator=generator) for size in (ROWS, COLUMNS))
        return left * 0.7 ** torch.arange(40.0) @ right.T

    return part(0) + 0.5 * part(1 + 1000 * number + rank)


def _averages(rank, hosts, options):
    """Return how a state averages on these hosts; None without the right to names."""
    if len(set(hosts)) > 1 and not take_host_name(hosts[rank]):
        return None
    state = make_low_rank_state(rank=RANK, warm_up_steps=0, **options)
    total, sums, before = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS), 0
    of_means = []
    for number in range(STEPS):
        values = _gradient(rank, number)
        exact = values / len(hosts)
        dist.all_reduce(exact)
        dist.barrier()
        before = tcp_bytes_sent() if sys.platform == "linux" and number else before
        all_reduce(values, dist.ReduceOp.AVG, state, key="values")
        of_means += [tcp_bytes_sent() - before] if before else []
        total, sums = total + exact, sums + values
    left = flat_residuals(state.state_dict())["values"].double() / len(hosts)
    dist.all_reduce(left)
    rests = flat_residuals(state.state_dict(), "rest")
    missing, size = total - sums, total.norm()
    statistics = state.statistics
    state.close()
    return {
        "alike": same_on_all_ranks([sums, values]),
        "missing": (missing.norm() / size).item(),
        "not kept": ((missing.flatten() - left).norm() / size).item(),
        "between hosts": statistics.bytes_between_hosts / STEPS,
        "sent": statistics.bytes_sent / STEPS,
        "of means": sum(rest.norm().item() for rest in rests.values()),
        "on TCP": sorted(of_means)[len(of_means) // 2] if of_means else None,
    }


@pytest.mark.parametrize("hosts", PLACES)
def test_the_error_the_bytes_and_the_bits_of_low_rank(hosts):
    seen = run_ranks(_averages, len(hosts), hosts, {}, timeout=150)
    if None in seen:
        pytest.skip(NO_NAMES)
    for of_rank in seen:
        assert of_rank["alike"]
        assert of_rank["missing"] < 0.2
        # In each step residuals and what factors have lost are rounded to bf16, by 2^-9 at most.
        assert of_rank["not kept"] < STEPS * 2.0**-8 * of_rank["missing"]
        # And what Gloo sends besides: a header for each message to each rank, which are small here.
        if of_rank["on TCP"] is not None:
            assert 0 <= of_rank["on TCP"] - of_rank["sent"] <= 1500 + 500 * len(hosts)
    # Shards end at blocks of 32, so some are a little longer than others.
    names = sorted(set(hosts)) if len(set(hosts)) > 1 else hosts
    count = len(names)
    whole = INT4.message_bytes(RANK * ROWS) + INT4.message_bytes(RANK * COLUMNS)
    of_link = whole * (1 if count == 2 else 2 * (count - 1) / count)
    if len(set(hosts)) > 1:
        for name in names:
            sent = sum(one["between hosts"] for one, host in zip(seen, hosts, strict=True) if host == name)
            assert sent == pytest.approx(of_link, rel=0.1), name
    else:
        assert sum(one["sent"] for one in seen) / count == pytest.approx(of_link, rel=0.1)


@pytest.mark.parametrize("hosts", ["00", "000"])
def test_one_bit_of_the_rest_leaves_less_for_later(hosts):
    plain, one_bit = (
        run_ranks(_averages, len(hosts), hosts, options) for options in ({}, {"residual_bits": 1})
    )
    for less, more in zip(plain, one_bit, strict=True):
        assert more["alike"]
        assert more["missing"] < 0.6 * less["missing"]
        assert more["sent"] > less["sent"]
        if len(hosts) == 2:  # 2^-9 of a residual in bf16 is lost, in each step, twice
            assert more["not kept"] < STEPS * 2 * 2.0**-8 * more["missing"]
    # From three ranks on, means are rounded again, and that error is kept in a place of its own.
    assert any(more["of means"] for more in one_bit) == (len(hosts) > 2)


def _options(rank, hosts):
    """Return whether ranks on these hosts have the same bits with all options; None as above."""
    if len(set(hosts)) > 1 and not take_host_name(hosts[rank]):
        return None
    alike = []
    for options in ({}, {"residual_bits": 1, "rank": "auto"}, {"bits": 8, "intra_node": "flat"}):
        caller = LowRankBuckets(**options)
        alike.append(same_on_all_ranks([caller.mean(number) for number in range(4)]))
        caller.state.close()
    return alike


@pytest.mark.parametrize("hosts", ["0000", "0011", "0123", pytest.param("00001111", marks=MANY)])
def test_all_options_give_all_ranks_the_same_bits(hosts):
    seen = run_ranks(_options, len(hosts), hosts, timeout=150)
    if None in seen:
        pytest.skip(NO_NAMES)
    assert seen == [[True] * 3] * len(hosts)
