"""Ranks with different hooks or options: an error on every rank before anything is sent."""

import sys

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state, run_hook
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    quantized_allreduce_hook,
)
from dist_utils import torch_compat
from dist_utils.testing import grad_bucket, run_ranks, tcp_bytes_sent

OPTIONS = {  # what the last rank has, and what the message must say of it and of the others
    "bits is 8, 4": {"bits": 4, "error_feedback": "none"},
    "block_size is 128, 256": {"block_size": 256},
    "gather is 'int8', 'fp16'": {"gather": "fp16"},
    "error_feedback is 'none', 'both'": {"error_feedback": "both"},
    "rotate is True, False": {"rotate": False},
    "exact_1d is False, True": {"exact_1d": True},
    "sample_every is 0, 2": {"sample_every": 2},
    "min_bytes is 0, 1073741824": {"min_bytes": 1 << 30},
}


def _error(hook, state, bucket, values):
    """Return the text of the error in the hook's future; the values must be unchanged."""
    before = values.clone()
    bucket.set_buffer(values)
    with pytest.raises(RuntimeError) as caught:
        hook(state, bucket).wait()
    assert torch.equal(values, before), "nothing was averaged"
    return str(caught.value).partition("\n")[0]  # without the traceback


def _different_options(rank):
    """Every option in turn; then the same for all, on the same group."""
    bucket, values, texts = grad_bucket([torch.ones(3)]), torch.arange(3000.0) + rank, []
    for options in OPTIONS.values():
        state = QuantizedAllreduceState(**{"min_bytes": 0, **(options if rank == 2 else {})})
        texts.append(_error(quantized_allreduce_hook, state, bucket, values))
        state.close()
    mean = run_hook(make_state("int8"), bucket, torch.full((3000,), float(rank)))
    return texts, mean.unique().tolist()


def _bytes_of_averages(rank):
    """Return how many bytes a rank sends for each of three averages of one bucket, without compression."""
    state, bucket, sent = QuantizedAllreduceState(), grad_bucket([torch.ones(30)]), []
    for _ in range(3):
        dist.barrier()
        before = tcp_bytes_sent()
        quantized_allreduce_hook(state, bucket).wait()
        sent.append(tcp_bytes_sent() - before)
    return sent


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a process's bytes")
def test_a_bucket_that_is_too_small_for_few_bits_is_compared_once():
    for first, second, third in run_ranks(_bytes_of_averages, 2):
        assert first > second == third


def test_a_different_option_raises_on_every_rank_and_is_named():
    for texts, mean in run_ranks(_different_options, 3, timeout=60):
        for text, expected in zip(texts, OPTIONS, strict=True):
            assert "AgreementError: QuantizedAllreduceState differs between ranks: " in text
            assert expected.replace(", ", " on ranks 0, 1, ") + " on rank 2" in text
        assert mean == [1.0], "after that all go on"


def _different_buckets(rank):
    """A different number of values or bucket dtype, and flat versus hierarchical."""
    bucket, values = grad_bucket([torch.ones(3)]), torch.arange(3000.0) + rank
    mesh, texts = init_device_mesh("cpu", (2, 2)), []
    for state, different in (
        (make_state("int8") if rank else HierarchicalAllreduceState(mesh=mesh), values),
        (make_state("int8"), torch.ones(3000 + 100 * (rank == 3))),
        (make_state("int8"), torch.ones(3000, dtype=torch.float16 if rank == 3 else torch.float32)),
    ):
        texts.append(_error(quantized_allreduce_hook, state, bucket, different))
        # Kept until close(), even where the next bucket is alike on all ranks.
        assert texts[-1] == _error(quantized_allreduce_hook, state, bucket, values)
    return texts


def test_different_states_or_buckets_raise_on_every_rank():
    """Different hooks are in integration_tests/test_peers.py."""
    expected = [
        "HierarchicalAllreduceState on rank 0, QuantizedAllreduceState on ranks",
        "values in the bucket is 3000 on ranks 0, 1, 2, 3100 on rank 3",
        "bucket is torch.float32 on ranks 0, 1, 2, torch.float16 on rank 3",
    ]
    for texts in run_ranks(_different_buckets, 4, timeout=60):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("bits", 8.0, TypeError),
        ("bits", True, TypeError),
        ("bits", 2, ValueError),
        ("block_size", "128", TypeError),
        ("block_size", 96, ValueError),
        ("block_size", 2048, ValueError),
        ("gather", [], TypeError),
        ("gather", "fp8", ValueError),
        ("gather", "int4", ValueError),  # needs 4 bits
        ("error_feedback", ["both"], TypeError),
        ("error_feedback", "all", ValueError),
        ("min_bytes", float("nan"), TypeError),
        ("min_bytes", -1, ValueError),
        ("sample_every", 1.5, TypeError),
        ("sample_every", -2, ValueError),
        ("exact_1d", 1, TypeError),
        ("rotate", "yes", TypeError),
        ("levels", 4, TypeError),
        ("levels", "22", TypeError),
        ("levels", (2.0, 2), TypeError),
        ("levels", (), ValueError),
        ("levels", (4, 1), ValueError),
    ],
)
def test_an_option_of_another_type_or_value_is_refused_when_the_state_is_made(option, value, error):
    with pytest.raises(error, match=option):
        QuantizedAllreduceState(**{option: value})


def test_options_do_not_change_after_ranks_have_compared_them():
    state = QuantizedAllreduceState(sample_every=3)
    assert state.options.sample_every == 3
    for name in ("min_bytes", "exact_1d", "sample_every", "error_feedback"):
        with pytest.raises(AttributeError):
            setattr(state.options, name, 1)


def _without_a_backend(rank):
    """A group that was made without naming a backend has one for GPUs too, where torch has none."""
    store = torch_compat.default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    mean = run_hook(make_state("int8"), grad_bucket([torch.ones(3)]), torch.full((1000,), float(rank)))
    dist.destroy_process_group()
    return mean.unique().tolist()


def test_a_group_without_a_named_backend_averages():
    assert run_ranks(_without_a_backend, 2) == [[0.5]] * 2
