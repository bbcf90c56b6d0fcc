"""Faults injected into real training, long runs and restarts: ``nox -s soak``.

One job is one training on two to four rank processes over Gloo, one fault at a random moment, and one
outcome: every rank's record is compared with that of the same training without a fault.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
