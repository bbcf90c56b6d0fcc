"""Process groups: their devices and futures, errors that are kept, comparisons, plain data of all ranks.

More of them is in ``dist_utils`` itself.
"""

from dist_utils.process_groups.errors import drop_frames, error_text, same_error
from dist_utils.process_groups.groups import (
    collective_device,
    device_types,
    group_of_model,
    runs_on_host,
)
from dist_utils.process_groups.jobs import future_of_work, record_use
from dist_utils.process_groups.matching_tensors import TensorClaim, require_same_tensors
from dist_utils.process_groups.messages import Arrival, all_gather_plain

__all__ = [
    "Arrival",
    "TensorClaim",
    "all_gather_plain",
    "collective_device",
    "device_types",
    "drop_frames",
    "error_text",
    "future_of_work",
    "group_of_model",
    "record_use",
    "require_same_tensors",
    "runs_on_host",
    "same_error",
]
