"""Train with Transformers: gradients in 8 bits, and steps inside ``backward()``.

    torchrun --standalone --nproc-per-node 2 transformers_training.py

Copy the callbacks. Needs ddp-quant-hooks and ddp-optim-overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, Statistics, quantized_allreduce_hook

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
data = torch.utils.data.TensorDataset(torch.randn(48, 64), torch.randn(48, 64))


class QuantizedGradients(TrainerCallback):
    """Average gradients in few bits, and save the residuals of error feedback."""

    def __init__(
        self, trainer: Trainer, resumed: str | None = None, **options: Any
    ) -> None:
        self.trainer = trainer
        self.resumed = resumed  # the folder that train() resumes from
        self.quantized = QuantizedAllreduceState(**options)

    def on_train_begin(self, args, state, control, **kwargs):
        self.register(self.trainer.model_wrapped, self.trainer.optimizer)
        if state.global_step > 0:  # resumed
            self.quantized.load_state_dict(
                torch.load(self.path(self.resumed, args), weights_only=True)
            )

    def register(self, ddp, optimizer):
        ddp.register_comm_hook(self.quantized.bind(ddp), quantized_allreduce_hook)

    def on_save(self, args, state, control, **kwargs):  # on every rank
        checkpoint = f"{args.output_dir}/checkpoint-{state.global_step}"
        torch.save(self.quantized.state_dict(), self.path(checkpoint, args))

    def path(self, checkpoint, args):
        return f"{checkpoint}/residuals_{args.process_index}.pt"


def only_look_at_norms(accelerator: Any) -> None:
    """Leave gradients alone where Trainer only logs their norm, by clipping to infinity."""
    clip = accelerator.clip_grad_norm_

    def clip_grad_norm_(parameters, max_norm, norm_type=2):
        parameters = list(parameters)
        if max_norm < float("inf"):
            return clip(parameters, max_norm, norm_type)  # the overlap refuses this
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        return nn.utils.get_total_norm(gradients, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_


class Overlapped(TrainerCallback):
    """Step inside backward(), with the options of overlap_optimizer."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer = trainer
        self.options = options

    def on_train_begin(self, args, state, control, **kwargs):
        only_look_at_norms(self.trainer.accelerator)
        self.handle = overlap_optimizer(
            self.trainer.model_wrapped, self.trainer.optimizer, **self.options
        )


class QuantizedAndOverlapped(QuantizedGradients):
    """Both of these: the overlap calls the hook."""

    def register(self, ddp, optimizer):
        only_look_at_norms(self.trainer.accelerator)
        state, hook = self.quantized.bind(ddp), quantized_allreduce_hook
        self.handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)


class Regression(nn.Module):
    """Your model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def train(resumed: str | None = None) -> Statistics:
    """Train, from a checkpoint if one is given, and return how much was sent."""
    arguments = TrainingArguments(
        output_dir="output",
        use_cpu=True,
        max_steps=4,
        max_grad_norm=0,  # the default is 1.0, which the overlap refuses
        per_device_train_batch_size=4,
        save_steps=2,
        report_to="none",
    )
    trainer = Trainer(
        Regression(net), arguments, train_dataset=[{"x": x, "labels": y} for x, y in data]
    )
    quantized = QuantizedAndOverlapped(trainer, resumed, error_feedback="both")
    trainer.add_callback(quantized)
    trainer.train(resume_from_checkpoint=resumed)
    return quantized.quantized.statistics


def main() -> Statistics:
    """Train, and train again from the middle."""
    train()
    return train("output/checkpoint-2")


if __name__ == "__main__":
    sent = main()
    print(f"{sent.bytes_sent / sent.bytes_of_allreduce:.2f} of the bytes")
    dist.barrier()  # Gloo's threads finish meanwhile; otherwise the process may abort
    dist.destroy_process_group()
