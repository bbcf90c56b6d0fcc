"""Lightning, Accelerate and Transformers: each trains a small model in the ways of docs/frameworks.md."""

import contextlib
import importlib.util
import os
import re
import tempfile
from typing import Any, NamedTuple

import pages
import pytest
import torch

from ddp_optim_overlap import ByValue, overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils import require_same_on_all_ranks
from dist_utils.testing import run_ranks, same_on_all_ranks

PAGE = pages.DOCS / "frameworks.md"
STEPS = 6

ON_GPUS = {
    "Lightning": {'accelerator="cpu"': 'accelerator="gpu"', "devices=2": "devices=1, num_nodes=2"},
    "Accelerate": {"Accelerator(cpu=True, ": "Accelerator("},
    "Transformers": {"use_cpu=True,": ""},
}
"""What the programs say for CPUs, and for two nodes with a GPU each."""


def needs(name):
    """Skip a test if a framework is missing."""
    missing = importlib.util.find_spec(name.lower()) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}: nox -s frameworks")


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TORCHELASTIC_RUN_ID": "frameworks"}
ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}


def launch(fn, *args, environ=ON_CPUS):
    """Return what ``fn(*args)`` returns on each of two ranks, started as by ``torchrun``."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_start, 2, fn, folder, args, OFFLINE | environ, backend=None, timeout=240)


def _start(rank, fn, folder, args, environ):
    os.environ.update(environ)
    os.chdir(folder)
    return fn(*args)


def source(title, *, on_gpus=False):
    """Return the program of a framework, with the changes of ``ON_GPUS`` if ``on_gpus``."""
    text = (pages.DOCS / "examples" / f"{title.lower()}_training.py").read_text()
    for old, new in ON_GPUS[title].items() if on_gpus else ():
        before, after = text.split(old)  # it is there, once
        text = before + new + after
    return text


def program(title, *, on_gpus=False):
    """Return the names that a framework's program defines; its ``main()`` trains and returns statistics."""
    names: dict[str, Any] = {"__name__": f"{title.lower()}_training"}
    exec(compile(source(title, on_gpus=on_gpus), title, "exec"), names)
    return names


def recipe(names, base):
    """Return a class of the page with this base, which compares the ranks after every step.

    Args:
        names: The names that a framework's program defines.
        base: As the page writes it.
    """
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = (block for block in blocks if f"class SameOnAllRanks({base})" in block)
    assert "every=100" in text
    names = {**names, "require_same_on_all_ranks": require_same_on_all_ranks}
    exec(compile(text.replace("every=100", "every=1"), str(PAGE), "exec"), names)
    return names["SameOnAllRanks"]


class Outcome(NamedTuple):
    """The parameters, what was sent, and the norms of gradients that were logged."""

    parameters: list[torch.Tensor]
    statistics: Any
    norms: list[float]


def _outcome(net, state, handle, norms=()):
    parameters = [parameter.detach().clone() for parameter in net.parameters()]
    assert same_on_all_ranks(parameters)
    if handle is not None:
        assert len(handle.wait().stepped) > 1
    return Outcome(parameters, getattr(state, "statistics", None), list(norms))


def _layers():
    torch.manual_seed(0)
    return [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]


class Lightning:
    """Trains with the callbacks of its program."""

    recipe_base = "L.Callback"
    end_of_step = "on_train_batch_end"

    def __init__(self):
        self.program = program("Lightning")

        class Model(self.program["L"].LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Sequential(*_layers())

            def training_step(self, batch, index):
                return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        self.model = Model

    def train(self, how="", options=(), ours=(), *, saves=None, resumes=None, strategy=(), callback=None):
        if how:
            callback = self.program[how](**dict(ours))
        model = self.model()
        trainer = self.program["L"].Trainer(
            accelerator="cpu",
            devices=2,
            strategy=self.program["DDPStrategy"](bucket_cap_mb=0.02, **dict(strategy)),
            max_epochs=1 if saves else 2,
            callbacks=[callback] if callback else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **dict(options),
        )
        batches = torch.utils.data.DataLoader(self.program["data"], batch_size=8)  # 3 per rank
        trainer.fit(model, batches, ckpt_path=resumes, weights_only=True)
        if saves:
            trainer.save_checkpoint(saves)
        return _outcome(model, getattr(callback, "state", None), getattr(callback, "handle", None))


class Accelerate:
    """Trains in a loop of its own, prepared by Accelerate."""

    def __init__(self):
        self.program = program("Accelerate")

    def train(self, how="", options=(), ours=(), *, saves=None, resumes=None):
        from accelerate import DistributedDataParallelKwargs  # noqa: PLC0415 - it may be missing

        options = dict(options)
        clip, limit = options.pop("clip", (None, None))
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=0.02)]
        accelerator = self.program["Accelerator"](cpu=True, kwargs_handlers=handlers, **options)
        net = torch.nn.Sequential(*_layers())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * STEPS)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        state, handle, of_overlap = None, None, dict(ours)
        if how.startswith("Quantized"):
            state = QuantizedAllreduceState(**dict(ours)).bind(model)
            self.program["keep_residuals"](accelerator, state)
            of_overlap = {"comm_hook": quantized_allreduce_hook, "comm_state": state}
        if how.endswith("Overlapped"):
            handle = overlap_optimizer(model, optimizer, **of_overlap)
        elif state is not None:
            model.register_comm_hook(state, quantized_allreduce_hook)
        if resumes:
            with contextlib.nullcontext() if handle is None else handle.pause():
                model(torch.ones(8, 64)).sum().backward()
            optimizer.zero_grad()
            accelerator.load_state(resumes)
        for number in range(STEPS // 2 if resumes else 0, STEPS):
            if saves and number == STEPS // 2:
                accelerator.save_state(saves)
            generator = torch.Generator().manual_seed(100 * number + accelerator.process_index)
            x, y = torch.randn(2, 8, 64, generator=generator)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                if clip and accelerator.sync_gradients:
                    getattr(accelerator, clip)(model.parameters(), limit)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return _outcome(model, state, handle)


class Transformers:
    """Trains a small BERT with the callbacks of its program."""

    recipe_base = "TrainerCallback"
    end_of_step = "on_step_end"

    def __init__(self):
        self.program = program("Transformers")

    def train(self, how="", options=(), ours=(), *, saves=None, resumes=None, callback=None):
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - may be missing

        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        of_text = {"vocab_size": 50, "max_position_embeddings": 16, "num_attention_heads": 2}
        net = BertForSequenceClassification(BertConfig(num_labels=3, **sizes, **of_text))
        words = torch.randint(50, (48, 8), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": one, "labels": int(one.sum()) % 3} for one in words]
        arguments = self.program["TrainingArguments"](
            output_dir=saves or "output",
            use_cpu=True,
            max_steps=STEPS,
            learning_rate=1e-2,
            warmup_steps=2,
            lr_scheduler_type="cosine",
            per_device_train_batch_size=4,
            save_strategy="steps" if saves else "no",
            save_steps=STEPS // 2,
            ddp_bucket_cap_mb=1,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **{"max_grad_norm": 0, **dict(options)},
        )
        trainer = self.program["Trainer"](net, arguments, train_dataset=data)
        checkpoint = f"{resumes}/checkpoint-{STEPS // 2}" if resumes else None
        if how:
            of_run = {"resumed": checkpoint} if checkpoint else {}
            callback = self.program[how](trainer, **of_run, **dict(ours))
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == STEPS
        norms = [step["grad_norm"] for step in trainer.state.log_history if "grad_norm" in step]
        assert len(norms) == STEPS
        return _outcome(net, getattr(callback, "quantized", None), getattr(callback, "handle", None), norms)


class Framework(NamedTuple):
    """What can be done with a framework.

    Attributes:
        make: Makes the object that trains.
        runs: Options whose results are compared, and those of ``overlap_optimizer`` that replace them.
        clips_by_norm: Options for that.
        resumes_bitwise: Whether a resumed run has the bits of an uninterrupted one.
    """

    make: type[Lightning | Accelerate | Transformers]
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    clips_by_norm: dict[str, Any]
    resumes_bitwise: bool = False


_by_value = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
_instead = {"clip": ByValue(1e-4)}
FRAMEWORKS = {
    "Lightning": Framework(
        Lightning,
        {
            "plain": ({}, {}),
            "clipping": (_by_value, _instead),
            "accumulation": ({"accumulate_grad_batches": 3}, {}),
            "bf16": ({"precision": "bf16-mixed"}, {}),
        },
        {"gradient_clip_val": 0.1},
    ),
    "Accelerate": Framework(
        Accelerate,
        {
            "plain": ({}, {}),
            "clipping": ({"clip": ("clip_grad_value_", 1e-4)}, _instead),
            "accumulation": ({"gradient_accumulation_steps": 3}, {}),
            "bf16": ({"mixed_precision": "bf16"}, {}),
        },
        {"clip": ("clip_grad_norm_", 0.1)},
        resumes_bitwise=True,
    ),
    "Transformers": Framework(
        Transformers,
        {
            "plain": ({}, {}),
            "accumulation": ({"gradient_accumulation_steps": 3}, {}),
            "bf16": ({"bf16": True}, {}),
        },
        {"max_grad_norm": 0.1},
    ),
}
