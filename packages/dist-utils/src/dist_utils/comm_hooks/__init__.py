"""What every communication hook of ``DistributedDataParallel`` needs: for authors of hooks."""

from dist_utils.comm_hooks.bucket_watch import BucketWatch
from dist_utils.comm_hooks.buckets import (
    CommHook,
    check_gradient_dtype,
    completed_future,
    failed_future,
    is_pair,
)
from dist_utils.comm_hooks.same_buckets import require_same_bucket

__all__ = [
    "BucketWatch",
    "CommHook",
    "check_gradient_dtype",
    "completed_future",
    "failed_future",
    "is_pair",
    "require_same_bucket",
]
