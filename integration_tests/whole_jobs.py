"""Jobs that train a small model with several packages at once, on GPUs where the group's backend is NCCL."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

WIDTH = 61  # rows that ranks divide unevenly


def rank_device():
    """Return where this rank trains."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Job:
    """A model of several buckets in training with a hook.

    Args:
        state: Of the hook; one of 8 bits with error feedback if not given.
        hook: The hook.
        overlap: Options of ``overlap_optimizer``; ``None`` for an ordinary step.
        make_optimizer: Called with the parameters.
        **ddp_options: Of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        *,
        state=None,
        hook=quantized_allreduce_hook,
        overlap=None,
        make_optimizer=torch.optim.AdamW,
        **ddp_options,
    ):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(rank_device())
        self.ddp = DistributedDataParallel(net, bucket_cap_mb=0.02, **ddp_options)
        self.optimizer = make_optimizer(self.ddp.parameters(), lr=1e-2)
        self.state = state or QuantizedAllreduceState(min_bytes=0, error_feedback="both")
        self.state.bind(self.ddp)
        self.handle = None
        if overlap is None:
            self.ddp.register_comm_hook(self.state, hook)
        else:
            options = {**overlap, "comm_hook": hook, "comm_state": self.state}
            self.handle = overlap_optimizer(self.ddp, self.optimizer, **options)

    def backward(self, step):
        """Make a pass with a batch that depends on rank and step."""
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator).to(rank_device())
        self.ddp(x).square().mean().backward()

    def train(self, steps):
        """Make steps; return the job."""
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    def make_final_buckets(self, passes=1):
        """Make passes without a step before a checkpoint is loaded, as the guide says."""
        for step in range(passes):
            with contextlib.nullcontext() if self.handle is None else self.handle.pause():
                self.backward(step)
            self.optimizer.zero_grad()

    def values(self):
        """Return the parameters in one row."""
        return torch.cat([parameter.detach().flatten().cpu() for parameter in self.ddp.parameters()])
