"""``torch.distributed.checkpoint`` of model, optimizer and residuals, in a job with an overlapped step."""

import io

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook


class _Job:
    def __init__(self, optimizer_class):
        rank, on_gpu = dist.get_rank(), dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(61, 61) for _ in range(4)])
        self.ddp = DistributedDataParallel(net.to(self.device), bucket_cap_mb=0.02)
        self.optimizer = optimizer_class(self.ddp.parameters())
        self.state = QuantizedAllreduceState(bits=4, min_bytes=0).bind(self.ddp)
        self.handle = overlap_optimizer(
            self.ddp, self.optimizer, comm_hook=quantized_allreduce_hook, comm_state=self.state
        )
        self.key = f"rank {rank}"  # each rank has its own residuals, which need their own names

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.ddp(torch.randn(8, 61, generator=generator).to(self.device)).square().mean().backward()
            self.optimizer.step()

    def save(self, folder):
        self.handle.wait()
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        residuals = io.BytesIO()
        torch.save(self.state.state_dict(), residuals)
        parts = {"model": model, "optimizer": optimizer, "residuals": {self.key: residuals.getvalue()}}
        dcp.save(parts, checkpoint_id=folder)

    def load(self, folder):
        with self.handle.pause():  # a pass, so that DDP makes its final buckets
            self.ddp(torch.ones(8, 61, device=self.device)).sum().backward()
        self.optimizer.zero_grad()
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        parts = {"model": model, "optimizer": optimizer, "residuals": {self.key: b""}}
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(
            self.ddp,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        self.state.load_state_dict(torch.load(io.BytesIO(parts["residuals"][self.key]), weights_only=True))

    def contents(self):
        state = self.optimizer.state
        return [
            tensor
            for parameter in self.ddp.parameters()
            for tensor in (parameter.detach(), *map(torch.as_tensor, state[parameter].values()))
        ]


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _resumes(rank, folder):
    del rank
    found = []
    for optimizer in (_adamw, _momentum):
        place = f"{folder}/{optimizer.__name__}"
        through = _Job(optimizer)
        through.train(range(3))
        through.save(place)
        through.train(range(3, 6))
        resumed = _Job(optimizer)
        resumed.load(place)
        resumed.train(range(3, 6))
        pairs = list(zip(through.contents(), resumed.contents(), strict=True))
        found.append((len(pairs), sum(not torch.equal(one, other) for one, other in pairs)))
    return found


def test_a_job_resumed_from_a_distributed_checkpoint_has_the_bits_of_the_uninterrupted_one(launch, tmp_path):
    for found in launch(_resumes, str(tmp_path), timeout=240):
        assert found == [(8 * 4, 0), (8 * 2, 0)]  # tensors, and how many of them differ
