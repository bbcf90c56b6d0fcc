"""Error feedback: the rounding errors of a step that counts are added to the values of the next one.

``step`` says which buckets or calls are one step, and how it ended; ``store`` keeps residuals by parameter;
``checkpoint`` saves and loads them.
"""

from ddp_quant_hooks.feedback.checkpoint import FeedbackState
from ddp_quant_hooks.feedback.names import ModelNames
from ddp_quant_hooks.feedback.step import Kind, Outcome, Step, value_count
from ddp_quant_hooks.feedback.store import (
    RESIDUAL_DTYPE,
    BucketResiduals,
    Feedback,
    Key,
    Owner,
    Residual,
    owner_length,
)

__all__ = [
    "RESIDUAL_DTYPE",
    "BucketResiduals",
    "Feedback",
    "FeedbackState",
    "Key",
    "Kind",
    "ModelNames",
    "Outcome",
    "Owner",
    "Residual",
    "Step",
    "owner_length",
    "value_count",
]
