"""DDP under ``torch.compile``, with both reducers: hooks and overlapped steps work, or say why not."""

import itertools

import pytest
import torch
import torch.distributed as dist
from trainings import HOOKS, WIDTH, assert_same_bits, rank_device, with_hook

from ddp_optim_overlap import ConfigError
from dist_utils import resolve_group

NO_BUCKETS = r"Python reducer has none: set torch\._dynamo\.config\.optimize_ddp to True"


def _begin(hook, overlap=None, *, compiled=True):
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = itertools.pairwise([WIDTH, 600, 600, WIDTH])
    net = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes]).to(rank_device())
    # The minimum for DDPOptimizer.
    training = with_hook(resolve_group(), HOOKS[hook], overlap, net=net, bucket_cap_mb=1)
    if compiled:
        training.model = torch.compile(training.model, backend="aot_eager")
    return training


def _with_ddp_optimizer(_, hook):
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    expected = _begin(hook, compiled=False).train(range(4)).parameters()
    for overlap in (None, {}):
        training = _begin(hook, overlap).train(range(4))
        assert_same_bits(training.parameters(), expected)
    report = training.handle.wait()
    assert report.buckets == len(report.stepped) > 1


@pytest.mark.parametrize("hook", ["8 bits, feedback", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_ddp_optimizer_hands_over_buckets(hook, launch):
    launch(_with_ddp_optimizer, hook, timeout=300)


def _with_python_reducer(_):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    for hook, overlap, error, text in (
        ("8 bits, feedback", None, TypeError, "^quantized_allreduce_hook averages buckets"),
        ("fp16", {}, ConfigError, "^the overlapped step needs buckets"),
    ):
        training = _begin(hook, overlap)
        before = [parameter.clone() for parameter in training.parameters()]
        compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
        with pytest.raises(error, match=f"{text}.*{NO_BUCKETS}"), compiled:
            training.train(range(2))
        assert_same_bits(training.parameters(), before)
        dist.barrier()


@pytest.mark.exhaustive
def test_hooks_that_need_buckets_refuse_the_python_reducer(launch):
    launch(_with_python_reducer, timeout=300)
