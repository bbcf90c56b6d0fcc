"""Any torch optimizer, stepped bucket by bucket inside DistributedDataParallel's backward pass."""

from ddp_optim_overlap.clipping import ByValue, ClipPolicy
from ddp_optim_overlap.drop_ins import (
    FunctionalOptimizer,
    OptimizerHookState,
    hook_then_optimizer,
    register_fused_optim,
)
from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    DoubleBackwardError,
    OverlapError,
    StepError,
    StepReport,
    UnsupportedGradientError,
    UnsupportedOptimizerError,
)
from ddp_optim_overlap.in_backward import (
    apply_optim_in_backward_hook,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)
from ddp_optim_overlap.optimizers.admission import declare_steps_per_parameter
from ddp_optim_overlap.overlap import OverlapHandle, overlap_optimizer

__all__ = [
    "ByValue",
    "ClipPolicy",
    "CommunicationError",
    "ConfigError",
    "DoubleBackwardError",
    "FunctionalOptimizer",
    "OptimizerHookState",
    "OverlapError",
    "OverlapHandle",
    "StepError",
    "StepReport",
    "UnsupportedGradientError",
    "UnsupportedOptimizerError",
    "apply_optim_in_backward_hook",
    "apply_optimizer_in_backward",
    "declare_steps_per_parameter",
    "get_in_backward_optimizers",
    "hook_then_optimizer",
    "overlap_optimizer",
    "register_fused_optim",
]

__version__ = "2.1.3"
