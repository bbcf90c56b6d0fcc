"""A model that Lightning shards with FSDP2: its parameters and gradients travel in few bits."""

import pytest
import torch
from frameworks import launch, needs
from torch.distributed import fsdp

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_gather, quantize_reduce_scatter

STEPS = 4
WAYS = ({}, {"keep_for_backward": True}, {"differences": True})
pytestmark = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather"),
    reason="this torch has no FSDPModule.set_custom_all_gather",
)


def _train(options):
    """Return the losses, and the handle of the gathers; with ``options`` None all is full precision."""
    import lightning  # noqa: PLC0415 - not always there
    from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: PLC0415 - not always there

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            self.handle, self.losses = None, []

        def configure_model(self):
            if isinstance(self.layers, fsdp.FSDPModule):
                return  # called before
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.layers, self.layers):
                fsdp.fully_shard(layer, mesh=mesh)
            if options is not None:
                quantize_reduce_scatter(self.layers, QuantizedAllreduceState(mesh, min_bytes=0))
                self.handle = quantize_all_gather(self.layers, min_bytes=0, **options)

        def training_step(self, batch):
            loss = (self.layers(*batch) - 0.1).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.layers.parameters())

    module, values = Module(), torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(values)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=False))
    return torch.stack(module.losses), module.handle


def _trains():
    """Losses are near those of full precision, and every layer was gathered in few bits."""
    exact, _ = _train(None)
    for options in WAYS:
        losses, handle = _train(options)
        torch.testing.assert_close(losses, exact, rtol=0.02, atol=1e-3)
        counted = handle.statistics
        assert counted.quantized_gathers >= 4 * (STEPS - 1), (options, counted)
        assert bool(counted.reused_gathers) == bool(options), (options, counted)


@needs("Lightning")
@pytest.mark.filterwarnings("ignore")  # of the framework
def test_lightning_trains_with_few_bits_of_parameters_and_gradients():
    launch(_trains)
