"""The device of a rank's buckets: its own GPU where every rank has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_utils.process_groups import all_gather_plain

__all__ = ["Claim", "choose_device", "uses_gpus"]


class Claim(NamedTuple):
    """What a rank could compute on.

    Attributes:
        node: A name that the ranks of a node share.
        gpu: What identifies its GPU within the node; empty: it has none.
        nccl: Whether it has joined with NCCL.
    """

    node: str
    gpu: str
    nccl: bool


def choose_device(node: str, *, wanted: str, nccl: bool) -> torch.device:
    """Return the device of this rank's buckets, and make a GPU the current one.

    Args:
        node: A name that the ranks of a node share.
        wanted: ``"cpu"``, ``"cuda"``, or ``"auto"``: GPUs where each rank has one for itself and NCCL.
        nccl: Whether this rank has joined with NCCL.

    Raises:
        ValueError: GPUs are wanted, and a rank has none, or NCCL would have to share one; on every rank.

    Cost:
        Collective: the ranks exchange what they have.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    nodes = list(map(str, all_gather_plain(None, node)))
    gpus = torch.cuda.device_count()
    index = nodes[: dist.get_rank()].count(node) % gpus if gpus else 0
    identity = str(getattr(torch.cuda.get_device_properties(index), "uuid", index)) if gpus else ""
    claims = [Claim(*sent) for sent in all_gather_plain(None, Claim(node, identity, nccl))]
    if not uses_gpus(claims, wanted):
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def uses_gpus(claims: Sequence[Claim], wanted: str) -> bool:
    """Return whether the ranks' buckets are on GPUs.

    Args:
        claims: The claims of all ranks.
        wanted: ``"cuda"`` or ``"auto"``.

    Raises:
        ValueError: As :func:`choose_device`.
    """
    without = [rank for rank, claim in enumerate(claims) if not claim.gpu]
    with_nccl = all(claim.nccl for claim in claims)
    shared = len({(claim.node, claim.gpu) for claim in claims}) < len(claims)
    if wanted == "cuda":
        if without:
            raise ValueError(f"device is 'cuda', but ranks {without} have no GPU")
        if with_nccl and shared:
            raise ValueError("NCCL needs a GPU for each rank, and some share one: choose --backend gloo")
        return True
    return with_nccl and not without and not shared
