"""Summary of a job: medians and quartiles, exposed communication, share of the possible gain.

Ratios of two sides' steps and exposed times are within one turn, because whatever slows the machine for a
while slows both sides; what is possible and its shares are of medians. Times are of the slowest rank.

* *compute*: a step of plain DDP's model under ``no_sync()``, with the optimizer's step, on all ranks at once.
* *exposed*: how much longer a step takes than compute. That is the wait for the network, and the time that
  quantizing, sending and receiving take from the computation where they share its cores.
* *wire*: how long the busiest host's link needs for all bytes of a step, headers included, as its interface
  counts them.
* *last bucket*: the last bucket's share of the wire time. It is ready when ``backward()`` has
  computed everything, so no computation can hide it.
* *possible*: ``max(compute + last bucket, wire)``, for the same side's bytes. No step with these bytes is
  shorter, except with an overlapped optimizer, which can hide steps of other buckets behind the last one.
  *fraction*: possible / step. On loopback the wire takes no time.
* *gain of possible*: (plain - step) / (plain - possible), the share of what this side could save that it
  saves. It depends less on how fast a machine computes than the ratio of two steps does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness import in_pairs, load, of_slowest, spread
from whole_steps.sides import COMPUTE, PLAIN


def summarize(
    ranks: list[dict[str, Any]], bytes_a_second: float | None, ranks_per_host: int
) -> dict[str, Any]:
    """Return the entries of the result file for a job's sides, by name, and for the model.

    Args:
        ranks: The measurements of each rank.
        bytes_a_second: The rate of each host's link; ``None`` on loopback.
        ranks_per_host: Consecutive ranks that share a link.
    """
    steps = of_slowest([rank["seconds"] for rank in ranks])
    sides: dict[str, Any] = {}
    for name, own in steps.items():
        sent = max_median(ranks, "tcp_bytes", name)
        sides[name] = {**spread(own), "repeats": len(own), "load_1_5_15_min": load()}
        sides[name]["mib_sent"] = round(sent / 2**20, 3)
        wire = 0.0
        if bytes_a_second is not None:
            # Ranks of a host read the same counter.
            sent = max_median(ranks[::ranks_per_host], "wire_bytes", name)
            wire = 1e3 * sent / bytes_a_second
            sides[name] |= {"mib_on_wire": round(sent / 2**20, 3), "wire_ms": round(wire, 2)}
        if name != COMPUTE:
            buckets = ranks[0]["buckets"][name]
            sides[name] |= compare(name, steps, wire, wire * buckets[-1] / sum(buckets))
        if name in ranks[0]["chosen"]:
            sides[name]["chosen"] = ranks[0]["chosen"][name]
    return {
        "parameters": ranks[0]["parameters"],
        "bucket_mib": [round(size / 2**20, 2) for size in ranks[0]["buckets"][PLAIN]],
        "sides": sides,
    }


def compare(name: str, steps: dict[str, list[float]], wire: float, last: float) -> dict[str, Any]:
    """Compare one side's steps with the computation, with plain DDP and with what is possible."""
    own, compute = steps[name], statistics.median(steps[COMPUTE])
    plain, possible = statistics.median(steps[PLAIN]), max(compute + last, wire)
    exposed = [step - alone for step, alone in zip(own, steps[COMPUTE], strict=True)]
    found = {
        "exposed": spread(exposed),
        "faster_than_plain": ratios(steps[PLAIN], own),
        "plain_ms": round(plain, 2),
        "compute_ms": round(compute, 2),
        "last_bucket_ms": round(last, 2),
        "fraction_of_possible": round(possible / statistics.median(own), 3),
    }
    if name != PLAIN and plain > possible:
        found["gain_of_possible"] = round((plain - statistics.median(own)) / (plain - possible), 3)
    return found


def max_median(ranks: list[dict[str, Any]], kind: str, name: str) -> float:
    """Return the median over the turns of the most on any rank."""
    return statistics.median(max(turn) for turn in zip(*(rank[kind][name] for rank in ranks), strict=True))


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles of the ratios of each turn."""
    return spread(in_pairs(over, under), unit="", digits=3)
