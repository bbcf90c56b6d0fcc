"""The way of a bucket that is stepped by itself: averaged, written back, stepped, on the worker."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import BucketGradients, lent
from ddp_optim_overlap.bucket_jobs import as_outside_of_backward, not_averaged, text_of, used_anywhere
from ddp_optim_overlap.errors import StepError, UnsupportedOptimizerError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_release import GradientRelease
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.weight_reuse import WeightWatch

__all__ = ["BucketSteps"]


class BucketSteps:
    """Steps each bucket's parameters when it is averaged, while later ones are computed and sent.

    Args:
        stepper: Steps.
        contents: Keeps what gradients were when they were used.
        watch: Told of stepped weights, if anybody is.
        release: Takes gradients away when they were used, if anybody does.
    """

    def __init__(
        self,
        stepper: Stepper,
        contents: GradientContents,
        watch: WeightWatch | None,
        release: GradientRelease | None = None,
    ) -> None:
        self._stepper, self._contents, self._watch, self._release = stepper, contents, watch, release

    def job(
        self,
        current: BackwardPass,
        index: int,
        gradients: BucketGradients,
        used: list[bool] | None,
        reduced: torch.futures.Future[Any],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Wait for the average and step with it; on the worker or, on an accelerator, on its stream.

        Args:
            current: The backward pass.
            index: Of the bucket.
            gradients: The bucket.
            used: Which of its parameters got a gradient on this rank; ``None`` if all have, everywhere.
            reduced: What the communication hook has returned.
            group: The worker's.
        """
        try:
            if used is not None:
                used = used_anywhere(used, group, gradients.buffer.device)
            gradients.write(current.await_bucket(reduced))
        except Exception as error:
            raise not_averaged(index, error, current) from error
        if current.steps:
            with current.stepping:
                if not current.cancelled:
                    return self._step(current, index, gradients, used or [True] * len(gradients.parameters))
        return gradients.buffer

    def _step(
        self, current: BackwardPass, index: int, gradients: BucketGradients, used: list[bool]
    ) -> torch.Tensor:
        parameters, device = gradients.parameters, gradients.buffer.device
        averaged = [
            # A parameter that no rank has used keeps what it had before: nothing, or zeros.
            view if is_used else parameter.grad
            for parameter, view, is_used in zip(parameters, gradients.views, used, strict=True)
        ]
        name, value = f"overlapped step:bucket_{index}", gradients.buffer
        began = time.perf_counter()
        try:
            with as_outside_of_backward(device, name), lent(parameters, averaged) as own:
                self._stepper.prepare(parameters)
                if self._release is None:
                    self._stepper.step(parameters)
                    self._contents.keep(parameters, averaged, own, gradients.buffer)
                else:
                    for part in self._release.parts(gradients):
                        self._stepper.step(part)
            if self._release is not None:
                value = self._release.give_back(current, gradients, averaged)
        except BaseException as error:  # sys.exit() too: it would end a thread, and nobody would know
            current.partial = (index,)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            raise kind(f"the step of bucket {index} failed: {text_of(error)}", current.report()) from error
        current.count_step([index], time.perf_counter() - began, on_host=device.type == "cpu")
        if self._watch is not None:
            self._watch.stepped(parameters)
        return value
