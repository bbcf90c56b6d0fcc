"""Bitwise Accelerate's own results with the step inside backward(); and gradients in 8 bits."""

import contextlib

import pytest
import torch
from page import run
from ranks import needs, run_as_torchrun

from ddp_optim_overlap import ByValue, ConfigError, overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import same_bits, same_on_all_ranks

pytestmark = needs("accelerate")

RUNS = {  # Accelerate's options, and those of the overlap
    "plain": ({}, {}),
    "clipping": ({"clip": ("clip_grad_value_", 1e-4)}, {"clip": ByValue(1e-4)}),
    "accumulation": ({"gradient_accumulation_steps": 3}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {}),
}
STEPS = 6


class _Job:
    """A model prepared by Accelerate, with or without the hook and the overlap."""

    def __init__(self, page, *, overlap=None, min_bytes=None, clip=None, handlers=(), **options):
        from accelerate import DistributedDataParallelKwargs  # noqa: PLC0415 - it may be missing

        if not any(isinstance(handler, DistributedDataParallelKwargs) for handler in handlers):
            handlers = [*handlers, DistributedDataParallelKwargs(bucket_cap_mb=0.02)]
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        net = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * STEPS)
        self.accelerator = page["Accelerator"](cpu=True, kwargs_handlers=handlers, **options)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)
        self.clip = clip
        self.handle = self.state = None
        if min_bytes is not None:
            self.state = QuantizedAllreduceState(error_feedback="both", min_bytes=min_bytes).bind(self.model)
            page["keep_residuals"](self.accelerator, self.state)
            if overlap is None:
                self.model.register_comm_hook(self.state, quantized_allreduce_hook)
            else:
                overlap = {**overlap, "comm_hook": quantized_allreduce_hook, "comm_state": self.state}
        if overlap is not None:
            self.handle = overlap_optimizer(self.model, self.optimizer, **overlap)

    def train(self, first=0, last=STEPS):
        rank = self.accelerator.process_index
        for number in range(first, last):
            x, y = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(100 * number + rank))
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    name, limit = self.clip
                    getattr(self.accelerator, name)(self.model.parameters(), limit)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        parameters = list(self.model.parameters())
        assert same_on_all_ranks(parameters)
        if self.handle is not None:
            assert len(self.handle.wait().stepped) > 1
        return [parameter.detach() for parameter in parameters]


def _overlapped(make):
    own, found = {}, {}
    for name, (options, of_overlap) in RUNS.items():
        kept = {key: value for key, value in options.items() if key != "clip"}
        own[name] = make(**options).train()
        found[name] = same_bits(own[name], make(overlap=of_overlap, **kept).train())
        assert same_bits(own[name], own["plain"]) == (not options)
    return found


def _quantized(make):
    job = make(min_bytes=0)
    whole = job.train()
    found = {"sent": job.state.statistics}
    for name, options in (("hook", {}), ("hook and overlap", {"overlap": {}})):
        job = make(min_bytes=0, **options)
        job.train(0, 3)
        job.accelerator.save_state(name)
        uninterrupted = job.train(3)
        job = make(min_bytes=0, **options)
        with contextlib.nullcontext() if job.handle is None else job.handle.pause():
            job.model(torch.ones(8, 64)).sum().backward()
        job.optimizer.zero_grad()
        job.accelerator.load_state(name)
        found[name] = same_bits(whole, uninterrupted), same_bits(whole, job.train(3))
    return found


def _refused(make):
    with pytest.raises(ConfigError, match="pass clip= to overlap_optimizer"):
        make(overlap={}, clip=("clip_grad_norm_", 0.1)).train()


def _accelerate():
    page = run("Accelerate", definitions=True)

    def make(**options):
        from accelerate.state import AcceleratorState  # noqa: PLC0415 - it may be missing

        AcceleratorState._reset_state()  # otherwise a process has only one precision
        return _Job(page, **options)

    found = {"overlapped": _overlapped(make), "quantized": _quantized(make)}
    _refused(make)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_as_torchrun(_accelerate, tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("name", RUNS)
def test_an_overlapped_run_has_the_bits_of_accelerates_own(found, name):
    assert [rank["overlapped"][name] for rank in found] == [True, True]


def test_quantized_gradients_take_a_quarter_of_the_bytes_and_resume_to_the_bit(found):
    for rank in found:
        sent = rank["quantized"]["sent"]
        assert 4 * sent.bytes_sent < 1.1 * sent.bytes_of_allreduce
        for name in ("hook", "hook and overlap"):
            assert rank["quantized"][name] == (True, True)
