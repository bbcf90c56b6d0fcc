"""What a profiler and the statistics tell about the hooks."""

import itertools
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    Statistics,
    quantization_perchannel_hook,
    quantized_allreduce_hook,
)
from ddp_quant_hooks.averaging import is_sampled
from ddp_quant_hooks.statistics import bytes_around_ring
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread


def _sends_small_buckets_as_they_are():
    """Make passes in which the hook quantizes nothing: it is in use nevertheless."""
    ddp = DistributedDataParallel(torch.nn.Linear(100, 100))
    state = QuantizedAllreduceState(min_bytes=1 << 30)
    ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)
    for _ in range(4):
        ddp(torch.randn(4, 100)).sum().backward()
    assert (state.statistics.quantized_buckets, state.statistics.plain_buckets) == (0, 4)


def _watch(rank):
    """Return the counts of a backward pass with several buckets, and its ranges: names and threads."""
    torch.manual_seed(rank)
    warnings.simplefilter("error")  # a bound state would give one if its hook got no bucket
    _sends_small_buckets_as_they_are()
    quantized = QuantizedAllreduceState(min_bytes=0, sample_every=1)
    found = []
    for state, hook in ((quantized, quantized_allreduce_hook), (None, quantization_perchannel_hook)):
        net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(3)])
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.03)
        ddp.register_comm_hook(state and state.bind(ddp), hook)
        ddp(torch.randn(4, 100)).sum().backward()  # after this one DDP forms its final buckets
        before = quantized.statistics
        with profile(experimental_config=every_thread()) as profiler:
            ddp(torch.randn(4, 100)).sum().backward()
        shown = {event.name: event.thread for event in profiler.events() if "_hook:" in event.name}
        found.append(((quantized.statistics - before).as_dict(), shown))
    return found


def test_one_in_n_buckets_is_sampled_and_none_is_always_left_out():
    for every, buckets in itertools.product((1, 2, 5, 20, 100), range(1, 41)):
        sampled = [number for number in range(400 * every) if is_sampled(number, every)]
        assert sampled[0] == 0
        assert [number // every for number in sampled] == list(range(400))
        assert {number % buckets for number in sampled} == set(range(buckets)), (every, buckets)
    assert not any(is_sampled(number, 0) for number in range(100))


def test_every_bucket_has_ranges_in_a_profile_and_is_counted():
    for (counted, quantized), (nothing, plain) in run_ranks(_watch, 2):
        handed_over = [f"quantized_allreduce_hook:bucket_{index}" for index in range(3)]
        averaged = [f"quantized_allreduce_hook:average_bucket_{index}" for index in range(3)]
        assert sorted(plain) == [f"quantization_perchannel_hook:bucket_{index}" for index in range(3)]
        if every_thread() is None:  # torch 2.6 shows no thread but the caller's
            assert sorted(quantized) == handed_over
        else:
            assert sorted(quantized) == averaged + handed_over
            (callers,) = {quantized[name] for name in handed_over}
            (workers,) = {quantized[name] for name in averaged}
            assert callers != workers
        assert (counted["quantized_buckets"], counted["plain_buckets"]) == (3, 0)
        assert counted["bytes_of_allreduce"] == 3 * 10100 * 4
        assert counted["bytes_saved"] == counted["bytes_of_allreduce"] - counted["bytes_sent"]
        relative_error = counted["relative_error"]
        assert 0 < relative_error < 2e-2
        assert nothing == {**Statistics().as_dict(), "bytes_saved": 0, "relative_error": relative_error}


def test_statistics_as_plain_numbers():
    later, earlier = Statistics(5, 2, 300, 60, 1200, 0.25, 0.75), Statistics(3, 1, 100, 20, 400, None, 0.5)
    assert later.as_dict() == {
        "quantized_buckets": 5,
        "plain_buckets": 2,
        "bytes_sent": 300,
        "bytes_between_hosts": 60,
        "bytes_of_allreduce": 1200,
        "relative_error": 0.25,
        "seconds_waited": 0.75,
        "bytes_saved": 900,
        "bytes_ratio": 0.25,
    }
    assert later - earlier == Statistics(2, 1, 200, 40, 800, 0.25, 0.25)
    assert "bytes_ratio" not in (later - later).as_dict()
    assert (later - later).bytes_ratio is None
    with pytest.raises(TypeError, match="unsupported operand"):
        later - 1


@pytest.mark.parametrize(
    ("ring", "to_hosts"), [([0, 1, 2, 3], [1.5, 1.5, 1.5, 1.5]), ([0, 2, 1, 3], [0, 0, 1.5, 1.5])]
)
def test_what_a_ring_sends_to_other_hosts_depends_on_its_order(ring, to_hosts):
    """The hosts are interleaved, 0101; each of four ranks sends 1.5 times what is averaged."""
    found = [bytes_around_ring(1000, ring, (0, 1, 0, 1), rank) for rank in range(4)]
    assert found == [(1500, 1000 * times) for times in to_hosts]
