"""DDP under ``torch.compile``, with both reducers: hooks and overlapped steps work, or say why not."""

import itertools

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from trainings import HOOKS, WIDTH, rank_device, with_hook

from dist_utils import resolve_group


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


def _with_ddp_optimizer(_):
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    for hook in ("8 bits, feedback", "fp16"):
        expected = _begin(hook, compiled=False).train(range(4)).parameters()
        for overlap in (None, {}):
            training = _begin(hook, overlap).train(range(4))
            torch.testing.assert_close(training.parameters(), expected, rtol=0, atol=0)
        report = training.handle.wait()
        assert report.buckets == len(report.stepped) > 1


def test_ddp_optimizer_hands_over_buckets(launch):
    launch(_with_ddp_optimizer, timeout=300)


def _with_python_reducer(_):
    """Return the error of each combination."""
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    raised = {}
    for hook, overlap in (("8 bits, feedback", None), ("fp16", {})):
        training = _begin(hook, overlap)
        before = [parameter.clone() for parameter in training.parameters()]
        try:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                training.train(range(2))
        except Exception as failure:  # noqa: BLE001 - the test shows any error
            raised[hook] = f"{type(failure).__name__}: {failure}"
        torch.testing.assert_close(training.parameters(), before, rtol=0, atol=0)
        dist.barrier()
    return raised


@pytest.mark.exhaustive
def test_hooks_that_need_buckets_refuse_the_python_reducer(launch):
    for raised in launch(_with_python_reducer, timeout=300):
        assert raised["8 bits, feedback"].startswith("TypeError: quantized_allreduce_hook averages buckets")
        assert raised["fp16"].startswith("ConfigError: the overlapped step needs buckets")
        for error in raised.values():
            assert "Python reducer has none: set torch._dynamo.config.optimize_ddp to True" in error
