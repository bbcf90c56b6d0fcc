"""Step averaged buckets: lend their gradients to the parameters, clip, step, and report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

import torch

from ddp_optim_overlap.errors import StepError, UnsupportedOptimizerError, text_of
from ddp_optim_overlap.loop.gradient_watch import GradientWatch
from ddp_optim_overlap.passes.backward_pass import BackwardPass, PassKind
from ddp_optim_overlap.passes.bucket import Bucket, gradients_replaced
from dist_utils.torch_compat import profiler_range

__all__ = ["Stepper", "step_buckets"]


class Stepper:
    """Steps parameters for an engine.

    Attributes:
        norm: The norm of the last step's gradients before clipping, if it was computed on the way.
    """

    norm: torch.Tensor | None = None

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}

    def begin(self) -> None:
        """Prepare for a pass that hands over its first bucket, before any communication. May raise."""

    def require_averaged(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if a parameter would have to be stepped that DDP does not average.

        Args:
            averaged: The parameters that have been in a bucket.
        """

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Change the ``.grad`` of a whole bucket, to clip it, say."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped.

        Args:
            gradients: Is told which gradients were used.
        """


def step_buckets(stepper: Stepper, current: BackwardPass, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """Step buckets together, unless the pass does not step; return DDP's tensors for the averages.

    Args:
        stepper: Steps the parameters.
        current: The backward pass.
        buckets: Averaged buckets of the pass; a single one if the pass releases gradients.

    Raises:
        StepError, UnsupportedOptimizerError: The step failed.
    """
    if current.kind is PassKind.STEPS:
        with current.stepping:
            if not current.canceled:
                return _step(stepper, current, buckets)
    return [bucket.gradients.buffer for bucket in buckets]


def _step(stepper: Stepper, current: BackwardPass, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    indices = [bucket.index for bucket in buckets]
    device = buckets[0].gradients.buffer.device
    parameters = [one for bucket in buckets for one in bucket.gradients.parameters]
    averages = [one for bucket in buckets for one in bucket.averages()]
    results = [bucket.gradients.buffer for bucket in buckets]
    began = time.perf_counter()
    try:
        name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
        with _modes_of_step(device, name), gradients_replaced(parameters, averages):
            for bucket in buckets:
                stepper.prepare(bucket.gradients.parameters)
            if current.released is None:
                stepper.step(parameters)
            else:
                for part in current.released.parts(buckets[0].gradients):
                    stepper.step(part)
        if current.released is not None:
            results = [current.released.give_back(buckets[0].gradients, averages)]
    except BaseException as error:  # also sys.exit(), which would silently end the thread
        current.partial = tuple(indices)
        kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
        text = f"the step of bucket {', '.join(map(str, indices))} failed: {text_of(error)}"
        raise kind(text, current.report()) from error
    current.count_step(indices, time.perf_counter() - began, on_host=device.type == "cpu")
    if current.watch is not None:
        current.watch.stepped(parameters)
    return results


@contextlib.contextmanager
def _modes_of_step(device: torch.device, name: str) -> Iterator[None]:
    """Set torch's modes as around a loop's ``step()``: no autocast, for example, even if backward() has it.

    Autocast is off on the worker's thread, and turning it off costs as much as all the rest.
    """
    autocast = torch.is_autocast_enabled(device.type)
    without_autocast = torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext()
    with torch.no_grad(), without_autocast, profiler_range(name):
        yield
