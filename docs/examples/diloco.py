"""Train with DiLoCo: ranks step alone, and every so many steps average their changes in few bits.

    torchrun --standalone --nproc-per-node 2 docs/examples/diloco.py --bits 8
    torchrun --standalone --nproc-per-node 2 docs/examples/diloco.py --bits 4 --streaming

Needs ddp-quant-hooks. DiLoCo: https://arxiv.org/abs/2311.08105, streaming: https://arxiv.org/abs/2501.18512
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce


@dataclass
class DiLoCo:
    """The outer optimizer of some parameters: Nesterov SGD on the ranks' mean change."""

    parameters: list[nn.Parameter]  # a model, or a fragment of it; the same on all ranks
    state: QuantizedAllreduceState  # averages, with its bits and error feedback
    key: str  # the name of these parameters in the state
    every: int  # inner steps from one average to the next
    turn: int = 0  # the step among these at which to send
    delay: int = (
        0  # inner steps that an average may take in the background; fewer than every
    )

    def __post_init__(self) -> None:
        assert 0 <= self.delay < self.every, (
            "an average must have arrived when the next one is sent"
        )
        self.shared = [
            parameter.detach().clone() for parameter in self.parameters
        ]  # equal on all ranks
        self.optimizer = torch.optim.SGD(self.shared, lr=0.7, momentum=0.9, nesterov=True)
        self.average: torch.futures.Future[list[torch.Tensor]] | None = None
        self.steps = 0
        self.unshared = 0  # inner steps since the last outer one

    def step(self) -> None:
        """Send or receive if it is due. Call it after every step of the inner optimizer."""
        self.steps += 1
        self.unshared += 1
        since_turn = (self.steps - self.turn) % self.every
        if since_turn == 0:
            self.send()
        if since_turn == self.delay:
            self.receive()

    def finish(self) -> None:
        """Average what is not averaged yet: the ranks end with the same parameters."""
        self.receive()
        if self.unshared:
            self.send()
            self.receive()

    def send(self) -> None:
        """Begin to average the changes."""
        changes = [
            old - new.detach()
            for old, new in zip(self.shared, self.parameters, strict=True)
        ]
        self.average = all_reduce(
            changes, dist.ReduceOp.AVG, self.state, async_op=True, key=self.key
        )

    @torch.no_grad()
    def receive(self) -> None:
        """Take an outer step with the average, if one was begun."""
        if self.average is not None:
            for shared, change in zip(self.shared, self.average.wait(), strict=True):
                shared.grad = change
            self.optimizer.step()
            for parameter, shared in zip(self.parameters, self.shared, strict=True):
                parameter.copy_(shared)
            self.average = None
            self.unshared = 0


if __name__ == "__main__":  # every rank learns the same random network from its own data
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8)
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="average layers in turns, in the background",
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher, model = (
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(2)
    )
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = QuantizedAllreduceState(
        bits=options.bits, min_bytes=0
    )  # small tensors in few bits, too
    parts, delay = ([model[0], model[2]], 3) if options.streaming else ([model], 0)
    outer = [
        DiLoCo([*part.parameters()], state, f"{n}", 10, 5 * n, delay)
        for n, part in enumerate(parts)
    ]
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(200):
        data = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(data), teacher(data).detach())
        inner.zero_grad()
        loss.backward()
        inner.step()
        for fragment in outer:
            fragment.step()
    for fragment in outer:
        fragment.finish()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.broadcast(first := mine.clone(), src=0)
    assert torch.equal(mine, first), "the ranks ended with different parameters"
    if dist.get_rank() == 0:
        print(
            f"loss {loss:.4f}, {state.statistics.bytes_sent} bytes sent, the same parameters on all ranks"
        )
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()
