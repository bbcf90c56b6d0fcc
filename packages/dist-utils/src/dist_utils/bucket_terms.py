"""The old path of ``dist_utils.comm_hooks.require_same_bucket``, deprecated until 1.0."""

import warnings

from dist_utils.comm_hooks import require_same_bucket

__all__ = ["require_same_bucket"]

warnings.warn(
    "dist_utils.bucket_terms is deprecated: import require_same_bucket from dist_utils.comm_hooks",
    DeprecationWarning,
    stacklevel=2,
)
