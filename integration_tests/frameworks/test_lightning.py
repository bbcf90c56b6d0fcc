"""Bitwise Lightning's own results with the step inside backward(); and gradients in 8 bits."""

import warnings

import pytest
import torch
import torch.distributed as dist
from page import run
from ranks import needs, run_as_torchrun

from ddp_optim_overlap import ByValue, ConfigError
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import same_bits, same_on_all_ranks

pytestmark = needs("lightning")

FEEDBACK = {"error_feedback": "both", "min_bytes": 0}
RUNS = {  # Lightning's options, and those of the overlap
    "plain": ({}, {}),
    "clipping": (
        {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
        {"clip": ByValue(1e-4)},
    ),
    "accumulation": ({"accumulate_grad_batches": 3}, {}),
    "bf16": ({"precision": "bf16-mixed"}, {}),
}
CLIPS = ("gradient_clip_val", "gradient_clip_algorithm")


class _Lightning:
    """Trains a small model; the callbacks come from the page."""

    def __init__(self):
        self.page = run("Lightning", definitions=True)

        class Model(self.page["L"].LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
                self.net = torch.nn.Sequential(*layers)

            def training_step(self, batch, index):
                return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        self.model = Model

    def fit(self, *callbacks, epochs=2, save=None, resume=None, strategy=None, **options):
        model = self.model()
        trainer = self.page["L"].Trainer(
            accelerator="cpu",
            devices=2,
            strategy=self.page["DDPStrategy"](bucket_cap_mb=0.02, **(strategy or {})),
            max_epochs=epochs,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        batches = torch.utils.data.DataLoader(self.page["data"], batch_size=8)  # 3 per rank
        trainer.fit(model, batches, ckpt_path=resume, weights_only=True)
        if save is not None:
            trainer.save_checkpoint(save)
        assert same_on_all_ranks(list(model.parameters()))
        return [parameter.detach() for parameter in model.parameters()]


def _overlapped(lightning):
    own, found = {}, {}
    for name, (options, of_overlap) in RUNS.items():
        overlap = lightning.page["Overlapped"](**of_overlap)
        kept = {key: value for key, value in options.items() if key not in CLIPS}
        own[name] = lightning.fit(**options)
        found[name] = same_bits(own[name], lightning.fit(overlap, **kept))
        assert len(overlap.handle.wait().stepped) > 1
        assert same_bits(own[name], own["plain"]) == (not options)
    return found


def _clipped(lightning):
    """Clip by the norm, as Lightning does, gradients that the hook has averaged in full precision."""
    own, unclipped = lightning.fit(gradient_clip_val=0.1), lightning.fit()
    hook = lightning.page["QuantizedGradients"](min_bytes=2**30)
    found = same_bits(own, lightning.fit(hook, gradient_clip_val=0.1))
    assert not same_bits(own, unclipped)
    assert hook.state.statistics.plain_buckets > 0
    return found


def _quantized(lightning):
    quantized = lightning.page["QuantizedGradients"](**FEEDBACK)
    whole = lightning.fit(quantized)
    found = {"sent": quantized.state.statistics}
    for name in ("QuantizedGradients", "QuantizedAndOverlapped"):
        callback = lightning.page[name]
        lightning.fit(callback(**FEEDBACK), epochs=1, save=f"{name}.ckpt")
        dist.barrier()
        resumed = lightning.fit(callback(**FEEDBACK), resume=f"{name}.ckpt")
        found[name] = same_bits(whole, lightning.fit(callback(**FEEDBACK))), same_on_all_ranks(resumed)
    return found


def _refused(lightning):
    with pytest.raises(ConfigError, match="pass clip= to overlap_optimizer"):
        lightning.fit(lightning.page["Overlapped"](), gradient_clip_val=0.1)


def _ignored(lightning):
    """Pass the hook to the strategy, which ignores it on CPUs; bind the state once there is a module."""
    state = QuantizedAllreduceState(min_bytes=0)

    class Bind(lightning.page["L"].Callback):
        def on_fit_start(self, trainer, pl_module):
            state.bind(trainer.strategy.model)

    strategy = {"ddp_comm_state": state, "ddp_comm_hook": quantized_allreduce_hook}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning.fit(Bind(), strategy=strategy)
    return state.statistics.bytes_sent, sum("has got no bucket" in str(one.message) for one in caught)


def _lightning():
    lightning = _Lightning()
    found = {"overlapped": _overlapped(lightning), "quantized": _quantized(lightning)}
    _refused(lightning)
    found["clipped"] = _clipped(lightning)
    return {**found, "ignored": _ignored(lightning)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_as_torchrun(_lightning, tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("name", RUNS)
def test_an_overlapped_run_has_the_bits_of_lightnings_own(found, name):
    assert [rank["overlapped"][name] for rank in found] == [True, True]


def test_quantized_gradients_take_a_quarter_of_the_bytes_and_resume(found):
    for rank in found:
        sent = rank["quantized"]["sent"]
        assert 4 * sent.bytes_sent < 1.1 * sent.bytes_of_allreduce
        for name in ("QuantizedGradients", "QuantizedAndOverlapped"):
            assert rank["quantized"][name] == (True, True)


def test_lightnings_own_clipping_works_beside_the_hook(found):
    assert [rank["clipped"] for rank in found] == [True, True]


def test_a_hook_that_lightning_ignores_warns(found):
    assert [rank["ignored"] for rank in found] == [(0, 1)] * 2
