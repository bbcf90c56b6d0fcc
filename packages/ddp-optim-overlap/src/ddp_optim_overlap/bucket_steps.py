"""Steps of single buckets, while later ones are computed and sent."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import lent
from ddp_optim_overlap.bucket_jobs import as_outside_of_backward, text_of
from ddp_optim_overlap.bucket_queue import HandedOver
from ddp_optim_overlap.errors import StepError, UnsupportedOptimizerError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_release import GradientRelease
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.weight_reuse import WeightWatch

__all__ = ["BucketSteps"]


class BucketSteps:
    """Steps the parameters of averaged buckets.

    Args:
        stepper: Steps.
        contents: Keeps what gradients were when they were used.
        watch: Told of stepped weights, if anybody is.
        release: Takes gradients away when they were used, if anybody does: then of one bucket at a time.
    """

    def __init__(
        self,
        stepper: Stepper,
        contents: GradientContents,
        watch: WeightWatch | None,
        release: GradientRelease | None,
    ) -> None:
        self._stepper, self._contents, self._watch, self._release = stepper, contents, watch, release

    def step(self, current: BackwardPass, buckets: Sequence[HandedOver]) -> list[torch.Tensor]:
        """Step buckets together, unless the pass does not step; return what DDP is to take for the averages.

        Raises:
            StepError, UnsupportedOptimizerError: The step failed.
        """
        if current.steps:
            with current.stepping:
                if not current.cancelled:
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
            with as_outside_of_backward(device, name), lent(parameters, averaged) as own:
                for bucket in buckets:
                    self._stepper.prepare(bucket.gradients.parameters)
                if self._release is None:
                    self._stepper.step(parameters)
                    self._keep(buckets, own)
                else:
                    for part in self._release.parts(buckets[0].gradients):
                        self._stepper.step(part)
            if self._release is not None:
                averages = [self._release.give_back(current, buckets[0].gradients, averaged)]
        except BaseException as error:  # sys.exit() too: it would end a thread, and nobody would know
            current.partial = tuple(indices)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {text_of(error)}"
            raise kind(text, current.report()) from error
        current.count_step(indices, time.perf_counter() - began, on_host=device.type == "cpu")
        if self._watch is not None:
            self._watch.stepped(parameters)
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
        # A parameter that no rank has used keeps what it had before: nothing, or zeros.
        view if is_used else parameter.grad
        for parameter, view, is_used in zip(bucket.gradients.parameters, views, bucket.used, strict=True)
    ]
