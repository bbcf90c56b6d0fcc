"""Any torch optimizer, stepped bucket by bucket inside DistributedDataParallel's backward pass."""

from ddp_optim_overlap.clipping import ByValue, ClipPolicy, GlobalNorm, PerBucketNorm, PreviousStepNorm
from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    DoubleBackwardError,
    OverlapError,
    StepError,
    UnsupportedGradientError,
    UnsupportedOptimizerError,
    WeightReuseError,
)
from ddp_optim_overlap.overlap import OverlapHandle, OverlapMode, overlap_optimizer
from ddp_optim_overlap.report import StepReport

__all__ = [
    "ByValue",
    "ClipPolicy",
    "CommunicationError",
    "ConfigError",
    "DoubleBackwardError",
    "GlobalNorm",
    "OverlapError",
    "OverlapHandle",
    "OverlapMode",
    "PerBucketNorm",
    "PreviousStepNorm",
    "StepError",
    "StepReport",
    "UnsupportedGradientError",
    "UnsupportedOptimizerError",
    "WeightReuseError",
    "overlap_optimizer",
]

__version__ = "0.1.0"
