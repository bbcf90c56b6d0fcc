"""The hooks in DDP's registration and log, in pickle and in the profiler; the options of their state."""

import copy
import inspect
import pickle
import warnings

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


def _register(rank):
    """The name of each hook on a model of several buckets, and the ranges of its buckets in the profiler."""
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


def test_ddp_logs_the_hooks_name_and_the_profiler_shows_a_range_for_every_bucket():
    for name, (logged, ranges) in run_ranks(_register, 2)[0].items():
        hook = HOOKS[name][0].__qualname__
        assert logged == hook
        buckets = [shown for shown in ranges if shown.startswith(f"{hook}:bucket_")]
        assert buckets == [f"{hook}:bucket_0", f"{hook}:bucket_1"]
        in_fp32 = name.endswith("/fp32") and not name.startswith("allreduce")  # its buckets are fp32 already
        averages = [shown.replace(":", ":average_") for shown in buckets]
        if every_thread() is not None:  # else this torch shows no thread but the caller's
            assert [shown for shown in ranges if ":average_" in shown] == (averages if in_fp32 else [])


def test_wrappers_are_named_after_what_they_wrap():
    assert fp16_compress_wrapper(allreduce_hook).__qualname__ == "fp16_compress_wrapper(allreduce_hook)"
    assert bf16_compress_wrapper(len).__qualname__ == "bf16_compress_wrapper(len)"
    with pytest.raises(TypeError, match="wraps a communication hook, got int"):
        fp16_compress_wrapper(3)


@pytest.mark.parametrize("hook", [allreduce_hook, bf16_compress_hook, compress_hook, fp16_compress_hook])
def test_hooks_have_pytorchs_signature_and_real_annotations_and_pickle_by_name(hook):
    signature = inspect.signature(hook)
    pytorchs = getattr(default_hooks, hook.__qualname__, default_hooks.allreduce_hook)
    assert list(signature.parameters) == list(inspect.signature(pytorchs).parameters)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert pickle.loads(pickle.dumps(hook)) is hook
    assert copy.deepcopy(hook) is hook


def _warnings_of(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for _ in range(4):
            ddp(torch.ones(2, 40)).sum().backward()
            optimizer.step()
    return [str(one.message) for one in caught]


def _users_hook(state, bucket):
    return allreduce_hook(state.process_group, bucket)


def _states(rank):
    """A state that is bound to a model is in use or not, and pickles without its group."""
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40))
    CompressState().bind(ddp)
    (unused,) = _warnings_of(ddp)
    state = CompressState(accumulate="fp32", wire_dtype=torch.bfloat16, saturate=True).bind(ddp)
    ddp.register_comm_hook(state, bf16_compress_hook)
    assert _warnings_of(ddp) == []
    wrapped = DistributedDataParallel(torch.nn.Linear(40, 40))
    wrapped.register_comm_hook(CompressState().bind(wrapped), bf16_compress_wrapper(_users_hook))
    assert _warnings_of(wrapped) == []
    with pytest.warns(UserWarning, match="a CompressState pickles without its process group"):
        copied = pickle.loads(pickle.dumps(state))
    return unused, (copied.wire_dtype, copied.accumulate, copied.saturate, copied.saturated)


def test_a_state_warns_if_its_hook_is_not_in_use_and_pickles_its_options():
    for unused, options in run_ranks(_states, 2):
        assert "CompressState that is bound to the model has got no bucket" in unused
        assert options == (torch.bfloat16, "fp32", True, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wire_dtype": torch.int8}, ValueError, "wire_dtype must be one of"),
        ({"wire_dtype": "float16"}, TypeError, "wire_dtype must be a torch.dtype"),
        ({"accumulate": "fp64"}, ValueError, "'wire' or 'fp32'"),
        ({"saturate": "no"}, TypeError, "saturate must be True or False, got 'no'"),
        ({"process_group": "world"}, TypeError, "got str"),
    ],
)
def test_a_state_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        CompressState(**options)
