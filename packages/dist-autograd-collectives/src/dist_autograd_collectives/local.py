"""Linear collectives that need no other rank: some in any group, and all in a group of one."""

from __future__ import annotations

import torch

from dist_autograd_collectives.calls import Call, Tensors, parts_of

__all__ = ["local_result", "needs_others"]


def needs_others(call: Call) -> bool:
    """Return whether there is anything to communicate."""
    return call.who.size > 1 and call.name not in ("copy", "own part", "own if root")


def local_result(tensors: Tensors, call: Call) -> Tensors:
    """Return the result of a call that needs no other rank, as new tensors."""
    if call.name == "own part":
        return (parts_of(tensors, call)[call.who.rank].clone(),)
    if call.name == "own if root" and call.who.rank != call.root:
        return tuple(torch.zeros_like(x) for x in tensors)
    return tuple(x.clone() for x in tensors)
