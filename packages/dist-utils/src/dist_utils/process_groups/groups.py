"""One way to name a process group; its ranks and devices."""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

GroupLike: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""What every function here accepts as a group: ``None`` is the default group (WORLD)."""

_DESTROYED = (
    "the process group was destroyed: make a new hook state, a new model, or whatever was made for it"
)


def resolve_group(group: GroupLike = None) -> dist.ProcessGroup:
    """Return the process group that ``group`` stands for, which this rank belongs to.

    Args:
        group: ``None`` for the default group (WORLD), a process group, or a one-dimensional
            ``DeviceMesh``.

    Returns:
        The process group. No communication happens.

    Raises:
        RuntimeError: There is no default process group yet.
        TypeError: ``group`` is none of the three.
        ValueError: This rank is not a member of ``group``, the group was destroyed, or the mesh has several
            dimensions.

    Example:
        >>> resolve_group(None) is dist.group.WORLD  # doctest: +SKIP
        True
    """
    if group is None:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError(
                "there is no default process group: call torch.distributed.init_process_group first"
            )
        return world
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a group must be a one-dimensional DeviceMesh, got {group.ndim} dimensions "
                f"{group.mesh_dim_names or tuple(group.mesh.shape)}: pick one, as in mesh['dp']"
            )
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the mesh {group.mesh.tolist()}")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[unreachable]
            # What new_group returns on the ranks that it leaves out: it no longer knows its members.
            raise ValueError(f"rank {dist.get_rank()} is not a member of the process group {group!r}")
        raise TypeError(
            "a group must be None, a ProcessGroup or a one-dimensional DeviceMesh, "
            f"got {type(group).__name__}"
        )
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ValueError(_DESTROYED) from error
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group with ranks "
            f"{dist.get_process_group_ranks(group)}"
        )
    return group


def group_behind(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of something that does not keep it alive: torch's registry does, until its end.

    Raises:
        ValueError: The group was destroyed, and nothing else keeps it.
    """
    group = reference()
    if group is None:
        raise ValueError(_DESTROYED)
    return group


def group_rank(group: GroupLike, global_rank: int) -> int:
    """Return the rank inside ``group`` of the process whose rank in WORLD is ``global_rank``.

    Args:
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        global_rank: A rank in WORLD, the kind that ``src=`` and ``dst=`` take.

    Raises:
        ValueError: ``global_rank`` is not a member of ``group``; and as :func:`resolve_group`.
    """
    ranks = dist.get_process_group_ranks(resolve_group(group))
    if global_rank not in ranks:
        raise ValueError(f"rank {global_rank} is not a member of the process group with ranks {ranks}")
    return ranks.index(global_rank)


def global_rank(group: GroupLike, group_rank: int) -> int:
    """Return the rank in WORLD of the process whose rank inside ``group`` is ``group_rank``.

    Args:
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        group_rank: A rank inside the group, ``0 <= group_rank < group.size()``.

    Raises:
        ValueError: ``group_rank`` is out of range; and as :func:`resolve_group`.
    """
    ranks = dist.get_process_group_ranks(resolve_group(group))
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group rank {group_rank} is out of range for a group of {len(ranks)} ranks {ranks}")
    return ranks[group_rank]


def group_of_model(ddp: DistributedDataParallel, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the group of a model, or ``group`` if that has the same ranks.

    DDP does not tell a communication hook the group of its model. A hook that averages over other ranks is
    silently wrong, or hangs.

    Args:
        ddp: A ``DistributedDataParallel`` module.
        group: What a hook is about to use; ``None`` for the model's.

    Raises:
        TypeError: ``ddp`` is not a ``DistributedDataParallel`` module.
        ValueError: ``group`` has other ranks than the model's, or one of the two was destroyed.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"a model must be a DistributedDataParallel module, got {type(ddp).__name__}")
    if group is None:
        return ddp.process_group
    ranks, models = (dist.get_process_group_ranks(resolve_group(one)) for one in (group, ddp.process_group))
    if ranks != models:
        raise ValueError(f"the hook averages over ranks {ranks}, but the model over ranks {models}")
    return group


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of the devices whose tensors the backends of ``group`` can send, as in ``["cpu"]``."""
    return [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]


def runs_on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the host itself sends tensors of ``device``: of the CPU always, with Gloo of any device.

    Waiting for such a collective blocks the caller, even with tensors of an accelerator.
    """
    return device.type == "cpu" or f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Return a device for small tensors that the caller makes: the CPU if ``group`` serves it."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())
