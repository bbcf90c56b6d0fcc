"""Run a function on several ranks, as real processes with a real process group, and get what they returned.

Made for tests of code that communicates: the results of all ranks come back, an error comes back with
its traceback, and a hang ends at a timeout with the place where each rank hung.
"""

from dist_utils.testing.comparisons import same_bits, same_on_all_ranks
from dist_utils.testing.launcher import (
    RankDied,
    RanksHung,
    RankTraceback,
    nccl_can_run,
    patience,
    run_ranks,
)
from dist_utils.testing.probes import call_in_backward, grad_bucket, tcp_bytes_sent
from dist_utils.testing.rank import stop_process

__all__ = [
    "RankDied",
    "RankTraceback",
    "RanksHung",
    "call_in_backward",
    "grad_bucket",
    "nccl_can_run",
    "patience",
    "run_ranks",
    "same_bits",
    "same_on_all_ranks",
    "stop_process",
    "tcp_bytes_sent",
]
