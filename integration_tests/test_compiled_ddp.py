"""DDP under ``torch.compile``, with both reducers: hooks and overlapped steps work, or say why not."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainings import rank_device

from ddp_compress_hooks import fp16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

HOOKS = {
    "quantized": lambda: (
        QuantizedAllreduceState(min_bytes=0, error_feedback="both"),
        quantized_allreduce_hook,
    ),
    "fp16": lambda: (None, fp16_compress_hook),
}


def _model(hook, *, overlapped):
    """Return a model with several buckets, its optimizer, and the overlap, if any."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(520, 520) for _ in range(3)]).to(rank_device())
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)  # the minimum for DDPOptimizer
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    state, function = HOOKS[hook]()
    if overlapped:
        return ddp, optimizer, overlap_optimizer(ddp, optimizer, comm_hook=function, comm_state=state)
    ddp.register_comm_hook(state, function)
    return ddp, optimizer, None


def _loss(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(4, 520, generator=generator).to(rank_device())).square().mean()


def _train(model, ddp, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    return _values(ddp)


def _values(ddp):
    return torch.cat([parameter.detach().flatten().cpu() for parameter in ddp.parameters()])


def _with_ddp_optimizer(rank):
    del rank
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    for hook in HOOKS:
        runs = []
        for compiled, overlapped in ((False, False), (True, False), (True, True)):
            torch._dynamo.reset()
            ddp, optimizer, handle = _model(hook, overlapped=overlapped)
            model = torch.compile(ddp, backend="aot_eager") if compiled else ddp
            runs.append(_train(model, ddp, optimizer))
        for run in runs[1:]:
            torch.testing.assert_close(run, runs[0], rtol=0, atol=0)
        report = handle.wait()
        assert report.buckets == len(report.stepped) > 1


def test_ddp_optimizer_hands_over_buckets(launch):
    launch(_with_ddp_optimizer, timeout=300)


def _with_python_reducer(rank):
    """Return the error of each combination."""
    del rank
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    raised = {}
    for hook, overlapped in (("quantized", False), ("fp16", True)):
        torch._dynamo.reset()
        ddp, optimizer, _ = _model(hook, overlapped=overlapped)
        before = _values(ddp)
        compiled = torch.compile(ddp, backend="aot_eager")
        error = None
        try:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                _train(compiled, ddp, optimizer, steps=2)
        except Exception as failure:  # noqa: BLE001 - the test shows any error
            error = f"{type(failure).__name__}: {failure}"
        raised[hook] = error, torch.equal(before, _values(ddp))
        dist.barrier()
    return raised


@pytest.mark.exhaustive
def test_hooks_that_need_buckets_refuse_the_python_reducer(launch):
    for raised in launch(_with_python_reducer, timeout=300):
        assert raised["quantized"][0].startswith("TypeError: quantized_allreduce_hook averages buckets")
        assert raised["fp16"][0].startswith("ConfigError: the overlapped step needs buckets")
        for error, unchanged in raised.values():
            assert "Python reducer has none: set torch._dynamo.config.optimize_ddp to True" in error
            assert unchanged
