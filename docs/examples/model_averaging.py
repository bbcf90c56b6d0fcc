"""Average models now and then, with torch's PostLocalSGDOptimizer, in 8 bits.

    torchrun --standalone --nproc-per-node 2 docs/examples/model_averaging.py

Needs ddp-quant-hooks.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce


class ChangeAverager(PeriodicModelAverager):
    """Average changes since the last average: few bits cost them less than parameters.

    Make it with all parameters to average, while they are equal on all ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        state: QuantizedAllreduceState,
        period: int,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(period, warmup_steps, state.process_group)
        self.state = state
        self.shared = {parameter: parameter.detach().clone() for parameter in parameters}

    @torch.no_grad()
    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count a step, and average if it is time; PostLocalSGDOptimizer calls this."""
        del params  # always all: which have gradients may differ between steps and ranks
        steps_since_warmup = self.step - self.warmup_steps
        self.step += 1
        if steps_since_warmup >= 0 and steps_since_warmup % self.period == 0:
            changes = [parameter - shared for parameter, shared in self.shared.items()]
            all_reduce(changes, dist.ReduceOp.AVG, self.state, key="changes")
            for (parameter, shared), change in zip(
                self.shared.items(), changes, strict=True
            ):
                parameter.copy_(shared.add_(change))


if __name__ == "__main__":  # every rank learns the same random network from its own data
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher, model = (
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(2)
    )
    state = QuantizedAllreduceState(min_bytes=0)  # small tensors in few bits, too
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    averager = ChangeAverager(model.parameters(), state, period=10, warmup_steps=9)
    optimizer = PostLocalSGDOptimizer(
        inner, averager
    )  # steps 10, 20, ... end with an average
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(200):
        data = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(data), teacher(data).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.broadcast(first := mine.clone(), src=0)
    assert torch.equal(mine, first), "the ranks ended with different parameters"
    if dist.get_rank() == 0:
        print(
            f"loss {loss:.4f}, {state.statistics.bytes_sent} bytes sent, the same parameters on all ranks"
        )
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()
