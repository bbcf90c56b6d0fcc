"""Which ranks share a host, and how they average inside of it: chosen once, alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

_log = logging.getLogger(__name__)

IntraNode: TypeAlias = Literal["full", "quantized", "flat"]
"""How ranks of one host average with each other: in full precision, in few bits, or like all others."""

INTRA_NODE = ("auto", "full", "quantized", "flat")
"""What a user can ask for."""

_MEMORY, _NVLINK, _UNKNOWN = "the host's memory", "NVLink", "a link of unknown speed"


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group are, and how they average inside a host.

    Attributes:
        hosts: For each rank, the number of its host.
        inside: How ranks of a host average: ``"flat"`` if no host matters.
    """

    hosts: tuple[int, ...]
    inside: IntraNode

    def rows(self) -> list[list[int]]:
        """Return the ranks of each host."""
        rows: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            rows.setdefault(host, []).append(rank)
        return list(rows.values())


def choose_placement(
    name: str | None,
    hosts: Sequence[int],
    links: Sequence[str],
    wanted: Literal["auto", "full", "quantized", "flat"],
    bits: int,
) -> Placement:
    """Decide how the ranks of each host average, and log it.

    Args:
        name: Of the state, for the log; ``None``: another rank writes it.
        hosts: For each rank, the number of its host.
        links: For each rank, what :func:`link_inside_host` returned there.
        wanted: One of :data:`INTRA_NODE`.
        bits: Of a value between hosts.
    """
    several = len(set(hosts))
    if several in (1, len(hosts)):
        if several == 1 and set(links) == {_NVLINK} and name is not None:
            _log.info(
                "%s: NVLink joins all %d ranks; plain DistributedDataParallel, or 16 bits, is likely as fast",
                name,
                len(hosts),
            )
        return Placement(tuple(hosts), "flat")
    beside_others = {link for host, link in zip(hosts, links, strict=True) if hosts.count(host) > 1}
    inside: IntraNode = "quantized" if _UNKNOWN in beside_others else "full"
    why = " and ".join(sorted(beside_others))
    if wanted != "auto":
        inside, why = wanted, "as intra_node says"
    how = {
        "full": f"in full precision inside a host ({why}), in {bits} bits between hosts",
        "quantized": f"in {bits} bits inside a host ({why}), then between hosts",
        "flat": f"in {bits} bits, each with all others ({why})",
    }
    if name is not None:
        _log.info("%s: %d ranks on %d hosts average %s", name, len(hosts), several, how[inside])
    return Placement(tuple(hosts), inside)


def link_inside_host(device_type: str, *, on_host: bool) -> str:
    """Return what joins this rank's device with the others of its host.

    Args:
        device_type: The type of the devices where gradients are. It is this rank's current one.
        on_host: Whether the host itself sends them.
    """
    if on_host or device_type == "cpu":
        return _MEMORY
    return _NVLINK if device_type == "cuda" and _nvlink_joins() else _UNKNOWN


def _nvlink_joins() -> bool:
    """Return whether NVLink joins the current GPU with every other one of its host, as the driver says.

    NVML, through ``cuda-core`` (the extra ``cuda``), knows GPUs that this process cannot see, too.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # so no rank may have chosen its GPU
        return False
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        from cuda.core import system  # noqa: PLC0415 - an optional dependency, needed only with GPUs

        gpus = list(system.Device.get_all_devices())
        mine = next(gpu for gpu in gpus if gpu.uuid_without_prefix == uuid)
        others = [gpu for gpu in gpus if gpu.uuid_without_prefix != uuid]
        return bool(others) and all(system.get_p2p_status(mine, gpu, "nvlink") == "ok" for gpu in others)
    except Exception as error:  # noqa: BLE001 - no extra, no driver, a part of a GPU (MIG): unknown, so slow
        _log.info("whether NVLink joins the GPUs of this host is unknown: %r", error)
        return False
