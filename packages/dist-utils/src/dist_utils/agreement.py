"""Older names for parts of ``dist_utils.process_groups``, deprecated until 1.0.

They give no warning: only dist-autograd-collectives 0.1 imports them, and its users cannot change that.
"""

from dist_utils.process_groups import TensorClaim as Claim
from dist_utils.process_groups import TensorMismatchError, verify_param_shape_across_processes
from dist_utils.process_groups import require_same_tensors as require_agreement

__all__ = ["Claim", "TensorMismatchError", "require_agreement", "verify_param_shape_across_processes"]
