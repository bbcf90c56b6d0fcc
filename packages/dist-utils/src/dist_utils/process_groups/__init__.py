"""Process groups: their ranks, agreement between ranks, messages between two of them, work in order."""

from dist_utils.process_groups.agreement import AgreementError, require_same_terms
from dist_utils.process_groups.errors import drop_frames, error_text, same_error
from dist_utils.process_groups.groups import (
    GroupLike,
    collective_device,
    device_types,
    future_of_work,
    global_rank,
    group_of_model,
    group_rank,
    resolve_group,
    runs_on_host,
)
from dist_utils.process_groups.jobs import record_use
from dist_utils.process_groups.matching_tensors import (
    TensorClaim,
    TensorMismatchError,
    require_same_tensors,
    verify_param_shape_across_processes,
)
from dist_utils.process_groups.messages import Arrival, all_gather_plain, start_messages
from dist_utils.process_groups.ordered_worker import OrderedWorker

__all__ = [
    "AgreementError",
    "Arrival",
    "GroupLike",
    "OrderedWorker",
    "TensorClaim",
    "TensorMismatchError",
    "all_gather_plain",
    "collective_device",
    "device_types",
    "drop_frames",
    "error_text",
    "future_of_work",
    "global_rank",
    "group_of_model",
    "group_rank",
    "record_use",
    "require_same_tensors",
    "require_same_terms",
    "resolve_group",
    "runs_on_host",
    "same_error",
    "start_messages",
    "verify_param_shape_across_processes",
]
