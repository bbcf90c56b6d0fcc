"""One rank's connection to the ranks that average together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_utils import start_messages
from dist_utils.process_groups import Arrival, runs_on_host

__all__ = ["Link", "Transport"]


class Transport:
    """Carries messages over the process group; simulations record them in a subclass instead."""

    def on_host(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether the host itself sends tensors of ``device``."""
        return runs_on_host(group, device)

    def start(
        self,
        group: dist.ProcessGroup,
        *,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> Sequence[Arrival]:
        """See :func:`dist_utils.start_messages`."""
        return start_messages(group, receives=receives, sends=sends, tag=tag)


class Link:
    """Messages among some ranks of a process group.

    Args:
        group: The group whose connections are used.
        ranks: Ranks in the group that take part, in the order in which they own shards; this rank too.
        name: Distinguishes several links of one group; identical on all ranks.
        label: What the messages are about; identical on all ranks. On Gloo, ranks with different labels wait
            for each other until the timeout.
        transport: Carries the messages.

    Attributes:
        size: How many ranks take part.
        index: This rank's place among them.
        bytes_sent: The bytes that were sent so far.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        name: int = 0,
        *,
        label: int = 0,
        transport: Transport | None = None,
    ) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._name = name
        self._label = label
        self._transport = transport or Transport()
        self.size = len(self._ranks)
        self.index = self._ranks.index(group.rank())
        # The next rank first, so that not all ranks send to the same one.
        self._peers = [(self.index + step) % self.size for step in range(1, self.size)]
        self.bytes_sent = 0

    def exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], *, tag: int
    ) -> Sequence[Arrival]:
        """Start to send ``outgoing[place]`` to, and to receive ``incoming[place]`` from, every peer."""
        self.bytes_sent += sum(outgoing[peer].nbytes for peer in self._peers)
        return self._transport.start(
            self._group,
            receives=[(self._ranks[peer], incoming[peer]) for peer in self._peers],
            sends=[(self._ranks[peer], outgoing[peer]) for peer in self._peers],
            tag=hash((2 * tag + self._name, self._label)) if self._label else 2 * tag + self._name,
        )
