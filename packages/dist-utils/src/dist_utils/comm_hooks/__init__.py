"""Building blocks for authors of ``DistributedDataParallel`` communication hooks."""

from dist_utils.comm_hooks.bucket_watch import BucketWatch, UnaveragedGradientsError
from dist_utils.comm_hooks.buckets import (
    CommHook,
    buckets_only,
    check_gradient_dtype,
    checked_operation,
    checked_tensors,
    clamp_mean,
    completed_future,
    failed_future,
    is_pair,
    joined_future,
    none_means_world,
    same_kind,
    world_by_default,
)
from dist_utils.comm_hooks.hook_state import (
    AgreedBucket,
    Bucket,
    HookState,
    require_same_bucket,
    require_same_call,
)
from dist_utils.comm_hooks.sparse import sparse_mean
from dist_utils.comm_hooks.wait_clock import Mark

__all__ = [
    "AgreedBucket",
    "Bucket",
    "BucketWatch",
    "CommHook",
    "HookState",
    "Mark",
    "UnaveragedGradientsError",
    "buckets_only",
    "check_gradient_dtype",
    "checked_operation",
    "checked_tensors",
    "clamp_mean",
    "completed_future",
    "failed_future",
    "is_pair",
    "joined_future",
    "none_means_world",
    "require_same_bucket",
    "require_same_call",
    "same_kind",
    "sparse_mean",
    "world_by_default",
]
