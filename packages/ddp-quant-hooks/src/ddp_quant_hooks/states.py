"""The states that a user gives the hook: options, and everything kept between steps."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_quant_hooks.averaging import Average, Decided, is_captured
from ddp_quant_hooks.exchange.placement import link_inside_host
from ddp_quant_hooks.feedback.state import FeedbackState
from ddp_quant_hooks.few_bits import FewBits
from ddp_quant_hooks.kernels.layout import WIRE_VERSION, Format
from ddp_quant_hooks.options import ErrorFeedback, Options, check_options
from ddp_quant_hooks.statistics import BucketCounter, Statistics
from dist_utils import AgreementError, GroupLike, OrderedWorker, resolve_group
from dist_utils.comm_hooks import Bucket
from dist_utils.process_groups import device_types, runs_on_host

_KEPT = {"none": (), "shard": ("shard",), "both": ("own", "shard")}
"""The slots of residuals that ``error_feedback`` keeps."""


class AveragingState(FeedbackState):
    """The base of states that average buckets, plain tensors and gradients of FSDP2 in exchanges of ours.

    All go the same way, with every such state. They begin on the caller's thread: they are part of a step,
    and the ranks have agreed on them and on where they are. :attr:`average` prepares them there, and a job on
    the worker runs what it has prepared. A subclass sets :attr:`average`, :attr:`options` and
    :attr:`least_error`.

    Args:
        process_group: As for :class:`dist_utils.comm_hooks.HookState`.
        kept: The names of the slots of residuals that are kept.
    """

    average: Average
    """What is done with values."""
    options: Options
    """The options, with the defaults filled in. They do not change: the ranks have compared them."""
    least_error: float
    """The smallest relative error that an average of gradients is expected to have."""

    def __init__(self, process_group: GroupLike = None, *, kept: Collection[str]) -> None:
        super().__init__(process_group, kept=kept)
        self.counter = BucketCounter()
        self._placed_by: OrderedWorker | None = None

    @property
    def statistics(self) -> Statistics:
        """What was done in the backward passes that have ended."""
        return replace(self.counter.read(), seconds_waited=self.seconds_waited)

    def decide(self, bucket: Bucket) -> Decided | None:
        """Decide how a bucket is averaged in all passes; ``None``: without compression.

        Raises:
            AgreementError: The ranks of a node name different ones.
            ValueError: An option does not fit the ranks, or their hosts.
        """
        self._place()
        return self.average.decide(self.process_group, bucket.parameters(), [bucket.buffer()])

    def begin_call(self, title: str, terms: Mapping[str, object], tensors: Sequence[torch.Tensor]) -> None:
        """Begin a call on plain tensors, which all ranks make; see :meth:`require_same_call`.

        Raises:
            AgreementError: They do not; or the ranks of a node name different ones.
            ValueError: As :meth:`decide`.
        """
        self.require_same_call(title, terms, tensors)
        self._place()

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a state that averages like this one."""
        return self.options.arguments()

    def __getstate__(self) -> dict[str, Any]:
        if self.has_own_group or self.feedback.wanted:
            warnings.warn(
                f"a {type(self).__name__} pickles its options only: the copy uses WORLD and has no residuals",
                stacklevel=2,
            )
        return self.arguments()

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        self.__init__(None, **arguments)  # type: ignore[misc] # as copy and pickle make objects

    def note(self) -> str:
        """Return what joins this rank with others of its host, which these are if it was told, and its steps.

        For every type of device that the group serves: nobody knows yet where gradients will be.
        """
        group = self.process_group
        links = {
            kind: link_inside_host(kind, on_host=runs_on_host(group, torch.device(kind)))
            for kind in device_types(group)
        }
        return json.dumps([links, self._node(), self.feedback.steps])

    def close(self) -> None:
        """End the thread and the private group, free the scratch memory; a later bucket makes new ones.

        Otherwise they end with the state, or with ``destroy_process_group``. After an error in
        communication this is how every rank makes a fresh start; residuals stay.
        """
        super().close()
        self._placed_by = None
        self.average.start_over()
        self.feedback.drop_failed_step()

    def terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name."""
        return {**super().terms(), **vars(self.options), "wire format and plans": WIRE_VERSION}

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's decisions forever.

        Raises:
            RuntimeError: It is, and there is something to decide.
        """
        if (self.feedback.wanted or self.options.sample_every) and is_captured(buffer.device):
            raise RuntimeError(
                "a CUDA graph cannot hold what changes from step to step, as residuals, factors and samples "
                "do: use a QuantizedAllreduceState with error_feedback='none' and sample_every=0"
            )

    def _place(self) -> None:
        """Tell the average where the ranks are, by what they told each other when they agreed, once."""
        worker = self.worker
        if self._placed_by is worker:
            return
        links, nodes, steps = zip(*map(json.loads, worker.notes()), strict=True)
        hosts = worker.hosts() if nodes[0] is None else _node_numbers(nodes)
        rank = worker.process_group.rank()
        self.average.learn_hosts(hosts, links, type(self).__name__ if rank == 0 else None)
        self.feedback.skip_steps(max(steps) - steps[rank])
        self._placed_by = worker

    def _node(self) -> list[int] | None:
        """Return the ranks of this rank's node, in the group, if the user has said which."""
        return None


_LEAST_ERROR = {16: 0.0008, 8: 0.0035, 4: 0.045}
"""Averages in so many bits are not expected to have smaller relative errors: half of those of Gaussian
gradients."""


class QuantizedAllreduceState(AveragingState):
    """Options of :func:`quantized_allreduce_hook`, and what it keeps between steps. One for each model.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD; looked up
            when used.
        bits: Bits of a value on the wire: 8, 4, or 16. With 16, values are sent as bfloat16 (those of fp16 as
            they are) and summed in fp32, in the order of ranks; each is rounded once, and so is what is sent
            on: sums of a host, and averages. Reduce-scatters send no averages. There are no blocks then, no
            rotation, and no error feedback; NaN and infinities stay where they are.
        block_size: Values that share a scale: a power of two from 32 to 1024. ``None``: 128 for 8 bits, 32
            for 4.
        gather: The format in which averages are sent back from the rank that computed them, with three or
            more ranks: ``"int8"``, ``"int4"`` (with ``bits=4``), or ``"fp16"`` (relative to the block's
            scale, so nothing overflows). ``None``: in ``bits`` bits. 16 bits avoid the second rounding and
            send 50 % more bytes.
        rotate: Spread the values of blocks with a few large ones over the block before they are quantized, so
            that the error does not depend on the largest (half of it on heavy tails). Values that are zero on
            all ranks stay zero, without error feedback. Numbers of ``gather="fp16"`` are not rotated.
        error_feedback: ``"none"``; ``"shard"``: add the rounding errors of the averages of a rank's shard to
            the next step's, 4 / W bytes of memory a value (with levels of a, b, ... ranks 4 / a + 4 / (a b) +
            ...), without effect between two ranks or two hosts, which make no shards; ``"both"``: also those
            of a rank's own gradients, 4 bytes a value, or 4 / L where the L ranks of a host sum them in full
            precision first. ``None``: ``"none"`` for 16 bits, and for 8, whose losses with and without it
            were the same within the spread of fp32's over three seeds; ``"both"`` for 4. It removes the bias
            over many steps and makes each step noisier, which AdamW's second moment accumulates. With such an
            optimizer ``"none"`` is the better choice.
        min_bytes: Smaller buckets are averaged without compression, by
            :func:`ddp_compress_hooks.allreduce_hook`. ``None``: 128 KiB for each rank, 1 MiB at most: on
            loopback the bytes that are saved do not make up for the cost of the messages. On a link of 1
            Gbit/s 65536 pays off.
        exact_1d: Average parameters (or plain tensors) of one dimension or none (biases, norms) without
            compression, in a small all-reduce of their own. Off by default: in the models that were
            measured their errors are no larger than those of other parameters, and losses the same. It is for
            models in which they are much smaller than their neighbors in the bucket.
        sample_every: Measure the error of one in n quantized buckets, with one exact all-reduce and a
            copy of the bucket in fp32. 0: never. Reduce-scatters are not sampled.
        intra_node: How ranks that share a host average with each other, if there are several hosts:
            ``"full"``: each host sums in full precision, and only the sums are sent to other hosts in few
            bits; ``"quantized"``: the same, in few bits inside hosts, too; ``"flat"``: like ranks of
            different hosts, which sends as many bytes to other hosts as the host has ranks. ``"auto"``:
            (the default, or ``"flat"`` if ``levels`` are given)
            in full precision where the link inside is fast (NVLink between all GPUs of the host, or ranks on
            CPUs), in few bits where it is not or nothing is known. The log says once what was chosen, and
            why. Ranks of a single host always average in few bits.
        levels: The sizes of the levels in which many ranks average; their product is the number of ranks, or
            with ``intra_node="full"`` or ``"quantized"`` of hosts. With ``(8, 16)``, 128 ranks average in
            rows of 8 consecutive ranks, then the 16 rows average their results. A rank sends 2 (7 + 15)
            messages for each chunk instead of 2 x 127, and the same number of bytes; the mean of a row is
            rounded once more, by half a step at most. ``None``: up to 16 hosts, each sends to every other
            one; beyond that, in levels if they take less time by the measured cost of messages. ``(W,)``: no
            levels. Shards are reduced without levels, and refused with several.

    Raises:
        TypeError: ``process_group`` is not a group, or an option is of another type.
        ValueError: This rank is not a member of the group, or an option has an unknown value. For levels
            whose product is not the number of ranks the first ``backward()`` raises a RuntimeError with its
            text, on every rank, except on a single one, which averages nothing.

    All ranks must have the same options: they are compared before the first bucket.

    A pickled state has only its options, and a warning is given if that loses something. Use
    :meth:`state_dict` for the residuals.

    Example:
        >>> state = QuantizedAllreduceState(error_feedback="shard")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        bits: Literal[16, 8, 4] = 8,
        block_size: int | None = None,
        gather: Format | None = None,
        rotate: bool | None = None,
        error_feedback: ErrorFeedback | None = None,
        min_bytes: int | None = None,
        exact_1d: bool = False,
        sample_every: int = 0,
        intra_node: Literal["auto", "full", "quantized", "flat"] | None = None,
        levels: Sequence[int] | None = None,
    ) -> None:
        options = check_options(
            bits=bits,
            block_size=block_size,
            gather=gather,
            rotate=rotate,
            error_feedback=error_feedback,
            min_bytes=min_bytes,
            exact_1d=exact_1d,
            sample_every=sample_every,
            intra_node=intra_node,
            levels=levels,
        )
        super().__init__(process_group, kept=_KEPT[options.error_feedback])
        self.options = options
        self.average = FewBits(options, self.feedback, self.counter)
        self.least_error = _LEAST_ERROR[options.bits]

    def identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""
        group, options = self.process_group, self.options
        return {
            "state": type(self).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "error_feedback": options.error_feedback,
            "scatter": (options.scatter_layout.format, options.block_size),
            "gather": (options.gather, options.block_size),
            "exact_1d": options.exact_1d,
            "min_bytes": options.least_bytes(group.size()),
            "levels": options.levels,
            "intra_node": options.intra_node,
        }


class HierarchicalAllreduceState(QuantizedAllreduceState):
    """A state that is told which ranks are a node, instead of asking the hosts.

    For nodes that are not hosts: racks, sites, or GPUs that NVLink joins. A :class:`QuantizedAllreduceState`
    does the same by itself for ranks that share a host. Nodes may be of unequal size.

    Args:
        process_group: All ranks; what DDP uses. ``None`` is WORLD.
        intra_group: This rank's node: a process group.
        mesh: Instead: a two-dimensional ``DeviceMesh``, nodes first, as for hybrid sharding.
        intra_node: As for :class:`QuantizedAllreduceState`, for nodes; by default ``"full"``.
        **options: Likewise. ``levels`` are of nodes.

    Raises:
        TypeError, ValueError: As :class:`QuantizedAllreduceState`; or ``intra_group`` has ranks that are not
            in ``process_group``. Errors that only all ranks together can see are raised before the first
            average, on all of them.

    Does not pickle: its groups belong to this job.

    Example:
        >>> mesh = init_device_mesh("cuda", (nodes, 8))  # doctest: +SKIP
        >>> state = HierarchicalAllreduceState(mesh=mesh)  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        intra_group: GroupLike = None,
        mesh: DeviceMesh | None = None,
        intra_node: Literal["auto", "full", "quantized"] = "full",
        **options: Any,
    ) -> None:
        if (mesh is None) == (intra_group is None):
            raise ValueError("a hierarchical state needs either mesh or intra_group")
        if mesh is not None:
            if mesh.ndim != 2:
                raise ValueError(f"mesh must have two dimensions, nodes and ranks in a node, got {mesh.ndim}")
            intra_group = mesh.get_group(1)
        group = resolve_group(process_group)
        everyone = dist.get_process_group_ranks(group)
        inside = dist.get_process_group_ranks(resolve_group(intra_group))
        if not {dist.get_rank()} <= set(inside) <= set(everyone):
            raise ValueError(
                f"intra_group has ranks {inside}, which must be rank {dist.get_rank()} and others of "
                f"process_group {everyone}"
            )
        self._inside = [everyone.index(rank) for rank in inside]
        super().__init__(group, intra_node=intra_node, **options)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""
        return {**super().identity(), "intra_group": self._inside}

    def _node(self) -> list[int]:
        return self._inside

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a HierarchicalAllreduceState does not pickle: its groups belong to this job")


def _node_numbers(nodes: Sequence[list[int]]) -> list[int]:
    """Return for each rank the number of its node, if the ranks of each node have named the same ones."""
    for rank, node in enumerate(nodes):
        other = next((peer for peer in node if nodes[peer] != node), rank)
        if rank not in node or other != rank:
            raise AgreementError(
                f"rank {rank} of the process group has intra_group {node}, and rank {other} {nodes[other]}"
            )
    numbers = {min(node): number for number, node in enumerate(nodes)}
    return [numbers[min(node)] for node in nodes]
