"""Step single buckets while later ones are computed and averaged."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import gradients_replaced
from ddp_optim_overlap.errors import StepError, UnsupportedOptimizerError, text_of
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.handed_over import HandedOver
from ddp_optim_overlap.step_context import step_context
from ddp_optim_overlap.stepper import Stepper

__all__ = ["BucketSteps"]


class BucketSteps:
    """Steps the parameters of averaged buckets.

    Args:
        stepper: Steps the parameters.
        contents: Records the gradients that were used.
    """

    def __init__(self, stepper: Stepper, contents: GradientContents) -> None:
        self._stepper, self._contents = stepper, contents

    def step(self, current: BackwardPass, buckets: Sequence[HandedOver]) -> list[torch.Tensor]:
        """Step buckets together, unless the pass does not step; return DDP's tensors for the averages.

        Args:
            current: The backward pass.
            buckets: Averaged buckets of the pass; a single one if the pass releases gradients.

        Raises:
            StepError, UnsupportedOptimizerError: The step failed.
        """
        if current.steps:
            with current.stepping:
                if not current.canceled:
                    return self._step(current, buckets)
        return [bucket.gradients.buffer for bucket in buckets]

    def _step(self, current: BackwardPass, buckets: Sequence[HandedOver]) -> list[torch.Tensor]:
        indices = [bucket.index for bucket in buckets]
        device = buckets[0].gradients.buffer.device
        averages = [bucket.gradients.buffer for bucket in buckets]
        parameters: list[torch.Tensor] = []
        averaged: list[torch.Tensor | None] = []
        for bucket in buckets:
            parameters += bucket.gradients.parameters
            averaged += _averaged(bucket)
        name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
        began = time.perf_counter()
        try:
            with step_context(device, name), gradients_replaced(parameters, averaged) as own:
                for bucket in buckets:
                    self._stepper.prepare(bucket.gradients.parameters)
                if current.released is None:
                    self._stepper.step(parameters)
                    self._keep(buckets, own)
                else:
                    for part in current.released.parts(buckets[0].gradients):
                        self._stepper.step(part)
            if current.released is not None:
                averages = [current.released.give_back(buckets[0].gradients, averaged)]
        except BaseException as error:  # also sys.exit(), which would silently end the thread
            current.partial = tuple(indices)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {text_of(error)}"
            raise kind(text, current.report()) from error
        current.count_step(indices, time.perf_counter() - began, on_host=device.type == "cpu")
        if current.watch is not None:
            current.watch.stepped(parameters)
        return averages

    def _keep(self, buckets: Sequence[HandedOver], own: Sequence[torch.Tensor | None]) -> None:
        begin = 0
        for bucket in buckets:
            end = begin + len(bucket.gradients.parameters)
            self._contents.keep(bucket.gradients, bucket.used, own[begin:end])
            begin = end


def _averaged(bucket: HandedOver) -> Sequence[torch.Tensor | None]:
    views = bucket.gradients.views
    if bucket.used is None:
        return views
    return [
        # A parameter that no rank has used keeps its previous gradient: None, or zeros.
        view if is_used else parameter.grad
        for parameter, view, is_used in zip(bucket.gradients.parameters, views, bucket.used, strict=True)
    ]
