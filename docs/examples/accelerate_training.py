"""Train with Accelerate: gradients in 8 bits, and steps inside ``backward()``.

    torchrun --standalone --nproc-per-node 2 accelerate_training.py

Needs ddp-quant-hooks and ddp-optim-overlap.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, Statistics, quantized_allreduce_hook

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
data = torch.utils.data.TensorDataset(torch.randn(48, 64), torch.randn(48, 64))


def keep_residuals(accelerator: Accelerator, state: QuantizedAllreduceState) -> None:
    """Let save_state and load_state include the residuals, in a file for each rank."""

    def path(folder):
        return f"{folder}/residuals_{accelerator.process_index}.pt"

    def save(models, weights, folder):
        torch.save(state.state_dict(), path(folder))

    def load(models, folder):
        state.load_state_dict(torch.load(path(folder), weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> Statistics:
    """Train, save and load, and return how much was sent."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        torch.utils.data.DataLoader(data, batch_size=4),
    )
    state = QuantizedAllreduceState(error_feedback="both").bind(model)
    keep_residuals(accelerator, state)
    handle = overlap_optimizer(
        model, optimizer, comm_hook=quantized_allreduce_hook, comm_state=state
    )
    # Or without the overlap: model.register_comm_hook(state, quantized_allreduce_hook)

    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    handle.wait()
    accelerator.save_state("checkpoint")
    accelerator.wait_for_everyone()  # the main process writes most of it
    accelerator.load_state("checkpoint")  # in a new run make a pass first
    return state.statistics


if __name__ == "__main__":
    sent = main()
    print(f"{sent.bytes_sent / sent.bytes_of_allreduce:.2f} of the bytes")
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()
