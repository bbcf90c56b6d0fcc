"""Train with Lightning: gradients in 8 bits, and steps inside ``backward()``.

    python lightning_training.py

Copy the callbacks. Needs ddp-quant-hooks and ddp-optim-overlap.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, Statistics, quantized_allreduce_hook

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
data = torch.utils.data.TensorDataset(torch.randn(48, 64), torch.randn(48, 64))


class QuantizedGradients(L.Callback):
    """Average gradients in few bits, and save the residuals of error feedback."""

    def __init__(self, **options: Any) -> None:
        self.state = QuantizedAllreduceState(**options)
        self.saved = None

    def on_fit_start(self, trainer, pl_module):
        self.register(trainer.strategy.model, trainer.optimizers)
        if self.saved is not None:
            self.state.scatter_state_dict(self.saved)
            self.saved = None

    def register(self, ddp, optimizers):
        ddp.register_comm_hook(self.state.bind(ddp), quantized_allreduce_hook)

    def on_save_checkpoint(
        self, trainer, pl_module, checkpoint
    ):  # on every rank; rank 0 writes
        checkpoint["residuals"] = self.state.gather_state_dict(pl_module)

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):  # no DDP module yet
        self.saved = checkpoint.get("residuals")


class Overlapped(L.Callback):
    """Step inside backward(), with the options of overlap_optimizer."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_fit_start(self, trainer, pl_module):
        self.handle = overlap_optimizer(
            trainer.strategy.model, trainer.optimizers, **self.options
        )


class QuantizedAndOverlapped(QuantizedGradients):
    """Both of these: the overlap calls the hook."""

    def register(self, ddp, optimizers):
        state, hook = self.state.bind(ddp), quantized_allreduce_hook
        self.handle = overlap_optimizer(ddp, optimizers, comm_hook=hook, comm_state=state)


class Regression(L.LightningModule):
    """Your module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> Statistics:
    """Train, and return how much was sent."""
    quantized = QuantizedAndOverlapped(error_feedback="both")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
        max_epochs=2,
        callbacks=[quantized],
        logger=False,
    )
    trainer.fit(Regression(net), torch.utils.data.DataLoader(data, batch_size=4))
    return quantized.state.statistics


if __name__ == "__main__":
    sent = main()
    print(f"{sent.bytes_sent / sent.bytes_of_allreduce:.2f} of the bytes")
