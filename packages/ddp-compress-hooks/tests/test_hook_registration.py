"""The hooks in DDP's registration and log, in pickle and in the profiler."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from hook_buckets import HOOKS, state_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import every_thread

PUBLIC = {
    hook.__qualname__: hook
    for hook in (allreduce_hook, bf16_compress_hook, compress_hook, fp16_compress_hook)
}


def _register(rank):
    """Each hook on a model of several buckets, under the profiler."""
    seen = {}
    for name, (hook, _, _) in HOOKS.items():
        layers = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
        model = DistributedDataParallel(layers, bucket_cap_mb=1)
        model.register_comm_hook(state_of(name), hook)
        logged = model._get_ddp_logging_data()["comm_hook"]
        model(torch.ones(1, 300)).sum().backward()  # the first iteration uses another set of buckets
        config = every_thread()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            model(torch.ones(1, 300)).sum().backward()
        ranges = sorted({event.name for event in profiler.events() if "bucket_" in event.name})
        seen[name] = logged, ranges
    return seen


@pytest.fixture(scope="module")
def registered():
    return run_ranks(_register, 2, timeout=120)[0]


@pytest.mark.parametrize("name", HOOKS)
def test_ddp_takes_the_hook_and_logs_its_name(registered, name):
    logged, _ = registered[name]
    assert logged == HOOKS[name][0].__qualname__


@pytest.mark.parametrize("name", HOOKS)
def test_the_profiler_shows_a_range_for_every_bucket(registered, name):
    _, ranges = registered[name]
    hook = HOOKS[name][0].__qualname__
    mine = [shown for shown in ranges if shown.startswith(f"{hook}:bucket_")]
    assert mine == [f"{hook}:bucket_{index}" for index in range(len(mine))]
    assert len(mine) > 1


@pytest.mark.skipif(every_thread() is None, reason="this torch shows no thread but the caller's")
@pytest.mark.parametrize("name", HOOKS)
def test_the_profiler_shows_averages_on_the_workers_thread(registered, name):
    _, ranges = registered[name]
    handed_over = [shown for shown in ranges if ":bucket_" in shown]
    averaged = [shown for shown in ranges if ":average_bucket_" in shown]
    in_fp32 = name.endswith("/fp32") and not name.startswith("allreduce")  # its buckets are fp32 already
    assert averaged == [shown.replace(":", ":average_") for shown in handed_over if in_fp32]


def test_wrappers_are_named_after_what_they_wrap():
    assert fp16_compress_wrapper(allreduce_hook).__qualname__ == "fp16_compress_wrapper(allreduce_hook)"
    assert bf16_compress_wrapper(len).__qualname__ == "bf16_compress_wrapper(len)"
    with pytest.raises(TypeError, match="wraps a communication hook, got int"):
        fp16_compress_wrapper(3)


@pytest.mark.parametrize("name", PUBLIC)
def test_hooks_have_pytorchs_signature_and_real_annotations(name):
    signature = inspect.signature(PUBLIC[name])
    assert list(signature.parameters) == ["process_group", "bucket"]
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    if name != "compress_hook":
        assert list(inspect.signature(getattr(default_hooks, name)).parameters) == ["process_group", "bucket"]


@pytest.mark.parametrize("name", PUBLIC)
def test_hooks_pickle_by_name(name):
    assert pickle.loads(pickle.dumps(PUBLIC[name])) is PUBLIC[name]
    assert copy.deepcopy(PUBLIC[name]) is PUBLIC[name]


def _pickle_state(rank):
    group = dist.new_group([0, 1])
    state = CompressState(group, wire_dtype=torch.bfloat16, accumulate="fp32", saturate=True)
    with pytest.warns(UserWarning, match="without its process group"):
        copied = pickle.loads(pickle.dumps(state))
    same = (copied.wire_dtype, copied.accumulate, copied.saturate, copied.saturated)
    return same, copied.process_group is dist.group.WORLD


def test_a_state_pickles_without_its_group():
    same, world = run_ranks(_pickle_state, 2)[0]
    assert same == (torch.bfloat16, "fp32", True, 0)
    assert world


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wire_dtype": torch.int8}, ValueError, "wire_dtype must be one of"),
        ({"wire_dtype": "float16"}, TypeError, "wire_dtype must be a torch.dtype"),
        ({"accumulate": "fp64"}, ValueError, "'wire' or 'fp32'"),
        ({"process_group": "world"}, TypeError, "got str"),
    ],
)
def test_a_state_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        CompressState(**options)
