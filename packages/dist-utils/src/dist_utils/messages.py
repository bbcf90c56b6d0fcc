"""The old path of ``dist_utils.process_groups.Arrival`` and ``start_messages``, deprecated until 1.0."""

import warnings

from dist_utils.process_groups.messages import Arrival, start_messages

__all__ = ["Arrival", "start_messages"]

warnings.warn(
    "dist_utils.messages is deprecated: import Arrival and start_messages from dist_utils.process_groups",
    DeprecationWarning,
    stacklevel=2,
)
