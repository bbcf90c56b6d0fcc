"""Older names of what ``dist_utils.process_groups`` has, deprecated until 1.0.

Without a warning: only dist-autograd-collectives 0.1 imports them, whose users can change nothing about it.
"""

from dist_utils.process_groups import TensorClaim as Claim
from dist_utils.process_groups import TensorMismatchError, verify_param_shape_across_processes
from dist_utils.process_groups import require_same_tensors as require_agreement

__all__ = ["Claim", "TensorMismatchError", "require_agreement", "verify_param_shape_across_processes"]
