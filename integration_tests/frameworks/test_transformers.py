"""Bitwise the Trainer's own results with the step inside backward(); and gradients in 8 bits."""

import pytest
import torch
from page import run
from ranks import needs, run_as_torchrun

from ddp_optim_overlap import ConfigError
from dist_utils.testing import same_bits, same_on_all_ranks

pytestmark = needs("transformers")

FEEDBACK = {"error_feedback": "both", "min_bytes": 0}
RUNS = {  # options of the Trainer
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
}


class _Transformers:
    """Trains a small BERT; the callbacks come from the page."""

    def __init__(self):
        self.page = run("Transformers", definitions=True)

    def train(self, callback=None, of_callback=None, folder="output", resumed=None, **options):
        """Return the parameters, the callback, and the norms that the Trainer has logged."""
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - may be missing

        torch.manual_seed(0)
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
        }
        net = BertForSequenceClassification(
            BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **sizes)
        )
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(50, (48, 8), generator=generator)
        data = [{"input_ids": one, "labels": int(one.sum()) % 3} for one in words]
        arguments = self.page["TrainingArguments"](
            **{
                "output_dir": folder,
                "use_cpu": True,
                "max_steps": 6,
                "max_grad_norm": 0,
                "learning_rate": 1e-2,
                "warmup_steps": 2,
                "lr_scheduler_type": "cosine",
                "per_device_train_batch_size": 4,
                "save_strategy": "no",
                "ddp_bucket_cap_mb": 1,
                "logging_steps": 1,
                "report_to": "none",
                "disable_tqdm": True,
                **options,
            }
        )
        trainer = self.page["Trainer"](net, arguments, train_dataset=data)
        if callback is not None:
            of_run = {} if resumed is None else {"resumed": resumed}
            callback = self.page[callback](trainer, **of_run, **(of_callback or {}))
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == 6
        parameters = list(net.parameters())
        assert same_on_all_ranks(parameters)
        norms = [step["grad_norm"] for step in trainer.state.log_history if "grad_norm" in step]
        return [parameter.detach().clone() for parameter in parameters], callback, norms


def _overlapped(transformers):
    own, found = {}, {}
    for name, options in RUNS.items():
        overlapped, callback, norms = transformers.train("Overlapped", **options)
        own[name], _, own_norms = transformers.train(**options)
        found[name] = same_bits(own[name], overlapped), len(norms), norms == own_norms
        assert len(callback.handle.wait().stepped) > 1
        assert same_bits(own[name], own["plain"]) == (not options)
    return found


def _quantized(transformers):
    found = {}
    for name in ("QuantizedGradients", "QuantizedAndOverlapped"):
        saves = {"save_strategy": "steps", "save_steps": 3, "folder": name}
        whole, callback, _ = transformers.train(name, FEEDBACK, **saves)
        elsewhere = {"folder": f"{name} goes on", "resumed": f"{name}/checkpoint-3"}
        resumed, *_ = transformers.train(name, FEEDBACK, **elsewhere)
        found[name] = whole, same_on_all_ranks(resumed), callback.quantized.statistics
    return found


def _transformers():
    transformers = _Transformers()
    found = {"overlapped": _overlapped(transformers), "quantized": _quantized(transformers)}
    with pytest.raises(ConfigError, match="pass clip= to overlap_optimizer"):
        transformers.train("Overlapped", max_grad_norm=0.1)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_as_torchrun(_transformers, tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("name", RUNS)
def test_an_overlapped_run_has_the_bits_and_the_logged_norms_of_the_trainers_own(found, name):
    assert [rank["overlapped"][name] for rank in found] == [(True, 6, True)] * 2


def test_quantized_gradients_take_a_quarter_of_the_bytes_and_resume(found):
    for rank in found:
        hook, overlapped = map(rank["quantized"].get, ("QuantizedGradients", "QuantizedAndOverlapped"))
        assert same_bits(hook[0], overlapped[0])
        for _, resumed, sent in (hook, overlapped):
            assert resumed
            assert 4 * sent.bytes_sent < 1.1 * sent.bytes_of_allreduce
