"""Gather FSDP's parameters in few bits."""

from __future__ import annotations

import logging
import math
import operator
import warnings
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange.placement import link_inside_host
from ddp_quant_hooks.fsdp.gather_statistics import GatherCounter, GatherStatistics
from ddp_quant_hooks.fsdp.kept import ForwardPasses
from ddp_quant_hooks.fsdp.module_gather import GatherOptions, ModuleGather
from ddp_quant_hooks.fsdp.replacement import Replacement
from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.kernels.layout import WIRE_VERSION, Layout
from dist_utils import OrderedWorker, resolve_group
from dist_utils.process_groups import runs_on_host
from dist_utils.torch_compat import private

_log = logging.getLogger(__name__)

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

_LEAST_BYTES = 1 << 17
"""Below it the number of messages counts, not their bytes. On loopback a gather of 32 KiB to 1 MiB took 0.3
to 1.1 ms longer than FSDP's own on two ranks, and as long on four (benchmarks/results/fsdp_gather.json). The
bytes that 8 bits save of 128 KiB take 0.4 ms at 1 Gbit/s, and 2 ms at 0.2."""


def quantize_all_gather(
    model: torch.nn.Module,
    *,
    bits: Literal[8, 4] | None = None,
    block_size: int | None = None,
    rotate: bool = True,
    exact_1d: bool = True,
    min_bytes: int | None = None,
    intra_node: Literal["auto", "quantized", "flat"] = "auto",
    keep_for_backward: bool = False,
    differences: bool = False,
) -> GatherHandle:
    """Gather FSDP's parameters with 8 bits a value, or 4 of what has changed.

    Every module that ``fully_shard`` was applied to gathers its parameters in few bits, before its forward
    and its backward pass (``FSDPModule.set_custom_all_gather``). Each rank rounds its shard, and all ranks
    restore all shards from the same messages, their own, too: the gathered weights are bitwise equal on all
    ranks, and in the forward and the backward pass. Shards, and with them optimizers and checkpoints, stay
    exact. (This is ZeRO++'s quantized weights, qwZ.)

    Exact are: parameters of one dimension (biases, norms), those of fp64, modules with parameters of several
    dtypes, modules below ``min_bytes``, and what ``reshard_after_forward=<a number of ranks>`` gathers in the
    backward pass, which are the rounded values of the forward pass (ZeRO++'s hpZ). With a single rank FSDP
    gathers nothing.

    All ranks must gather the same modules in the same order. If they do not, they get an error with Gloo and
    with ``differences``; with NCCL nothing tells them, as with FSDP's own gathers.

    Args:
        model: An FSDP module, or a module that contains some, after ``fully_shard`` has been applied to all
            of them, on meshes with shards; for HSDP and with tensor parallelism, too.
        bits: Bits of a value on the wire: 8, or with ``differences`` 4, which ``None`` chooses. Not 4 of the
            weights themselves: they cost loss in every fine-tuning run that was measured, and training adapts
            to the rounded weights, so that the exact ones in the checkpoint can be worse than those that were
            trained with.
        block_size: Values that share a scale: a power of two from 32 to 1024. ``None``: 128 for 8 bits, 32
            for 4. No block has values of two parameters.
        rotate: As for :class:`QuantizedAllreduceState`.
        exact_1d: Gather parameters of one dimension as they are.
        min_bytes: Modules whose gathered parameters are smaller are gathered in full precision. ``None``:
            128 KiB.
        intra_node: ``"auto"`` or ``"quantized"``: among hosts with several ranks each message enters a host
            once, and is then handed on inside; ``"flat"``: every rank sends to every other one.
        keep_for_backward: Keep what was received in the forward pass for the backward pass, which then
            gathers nothing: a byte a value of the whole model on every rank, from the forward to the backward
            pass of each module. Modules that stay gathered, or are resharded to a number of ranks, are not
            kept; a checkpoint over several modules gathers them again where it repeats them.
        differences: Send between hosts how the shard differs from what was gathered last, in 4 bits, and
            inside hosts weights as they are: those of the forward pass differ by the rounding of a change,
            and not of a value. What it loses is in the next difference. What has not changed keeps its bits.
            A backward pass gathers what the last forward pass has gathered, inside hosts. Each rank keeps
            copies of a host's share of the model (model / ranks of a host, in ``param_dtype``); with one rank
            a host, on a single host, and with ``"flat"``, of the whole model; and its own shard once more. In
            the first gather, and where the error of a parameter's shard would be above 0.5 %, the values of
            these parameters are sent, too: so what is loaded or changed in place needs no call. Copies are no
            part of a checkpoint: see :meth:`GatherHandle.start_over`.

    Returns:
        A handle, with ``statistics``, to end it with ``remove()``.

    Raises:
        TypeError, ValueError: The model is not a module, or has no FSDP module; a module is not sharded, has
            several groups of parameters, an all-gather that is not torch's default, or parameters with an
            ``fsdp_pre_all_gather`` of their own; or an option is of another type or value. The other ranks
            get an AgreementError.
        AgreementError: The ranks of a mesh, also of replicas and of tensor parallelism, have different models
            or options.
        RuntimeError: This torch has no ``FSDPModule.set_custom_all_gather`` (2.8 and older). A forward pass
            raises it if ``fully_shard`` was applied to more modules afterwards, and any pass if a peer fails.

    Cost:
        Collective, over the store, in every group of the parameters' meshes. A gather sends 1.03 bytes a
        value instead of two or four, in FSDP's own process group and on its stream, and waits where FSDP's
        own does. While it runs it needs memory for as many bytes as the module has values. Decoding takes
        about a nanosecond a value on one core. With ``differences`` 0.63 bytes a value, in the forward pass
        only, go to other hosts; on GPUs the host waits for each gather of a forward pass; and the memory is
        for fp32 copies of a shard, for messages, and for what the other ranks of the host send, in
        ``param_dtype``.

    Example:
        >>> fully_shard(model, reshard_after_forward=ranks_per_host)  # doctest: +SKIP
        >>> quantize_all_gather(model)  # doctest: +SKIP
        >>> quantize_reduce_scatter(model, QuantizedAllreduceState())  # doctest: +SKIP
    """
    return GatherHandle(
        model,
        bits=bits,
        block_size=block_size,
        rotate=rotate,
        exact_1d=exact_1d,
        min_bytes=min_bytes,
        intra_node=intra_node,
        keep_for_backward=keep_for_backward,
        differences=differences,
    )


class GatherHandle(Replacement):
    """The changes that :func:`quantize_all_gather` made to a model."""

    _function, _method, _record = "quantize_all_gather", "set_custom_all_gather", "_all_gather_comm"
    _purpose = "parameters"

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self._given = options
        self._agreements: dict[dist.ProcessGroup, OrderedWorker] = {}
        self._counter = GatherCounter()
        super().__init__(model)
        keepers = self._modules if self._options.keep_for_backward else []
        self._forwards = ForwardPasses(keepers, self._drop_kept)
        self._gathers = {module: self._gather_of(module) for module in self._modules}
        self._warn_if_nothing_is_quantized()
        self._replace()

    @property
    def statistics(self) -> GatherStatistics:
        """What was gathered so far."""
        return self._counter.statistics

    def relative_error(self) -> float | None:
        """Return the error of this rank's shards, as they are now, when they are gathered in few bits.

        With ``differences``: of what was gathered last.

        Returns:
            Relative to their values, in the L2 norm. ``None`` if this rank has none that are rounded.

        Cost:
            Encodes and decodes this rank's shards, and waits for an accelerator. Nothing is sent.
        """
        squares = [gather.squares() for gather in self._gathers.values() if not gather.why_always_plain()]
        error, values = (sum(column) for column in zip((0.0, 0.0), *squares, strict=True))
        return math.sqrt(error / values) if values else None

    def start_over(self) -> None:
        """Forget what was gathered, on every rank: with ``differences`` the next gathers send values.

        Call it where a checkpoint is saved, and the job that goes on and the one that resumes have the same
        bits. Frees the copies until then.
        """
        for gather in self._gathers.values():
            gather.start_over()

    def remove(self) -> None:
        """Restore what FSDP did before. A second call does nothing."""
        super().remove()
        self._forwards.stop()
        self.start_over()

    def _drop_kept(self, module: ShardedModule) -> None:
        self._gathers[module].drop_kept()

    def _refuse(self) -> None:
        """Raise unless all modules can be gathered, with these options."""
        self._options = _check_options(**self._given)
        default = private(_COLLECTIVES, "DefaultAllGather", self._function)
        for module in self._modules:
            name, present = repr(module.name), module.collective(self._record)
            if module.shard_group is None:
                raise ValueError(f"module {name} is not sharded, so FSDP does not gather it")
            if isinstance(present, ModuleGather):
                raise ValueError(f"module {name} is gathered in few bits: remove() the other handle")  # noqa: TRY004
            if type(present) is not default:
                raise ValueError(f"module {name} has an all-gather of its own, a {type(present).__name__}")
            for parameter in module.group.fsdp_params:
                shard = private(parameter, "_sharded_local_tensor", self._function)
                if hasattr(shard, "fsdp_pre_all_gather"):
                    raise ValueError(
                        f"module {name} has parameters of class {type(shard).__name__}, which decides itself "
                        "what is gathered (fsdp_pre_all_gather)"
                    )
                # bitsandbytes leaves it to layers when FSDP makes parameters of its own.
                if hasattr(private(parameter, "_module_info", self._function).module, "quant_state"):
                    raise ValueError(
                        f"module {name} has numbers of few bits packed into other values (quant_state), "
                        "which rounding would spoil: gather only modules without them in few bits"
                    )

    def _shard_groups(self) -> list[dist.ProcessGroup]:
        return [module.shard_group for module in self._modules if module.shard_group]

    def _groups(self) -> list[dist.ProcessGroup]:
        """Return every group of the model: those of replicas and of tensor parallelism, too.

        A rank that has found no module does not know these groups. It tells WORLD, which is the group of
        every model without a mesh; ranks of a smaller mesh wait for it until their timeout.
        """
        others = [group for module in self._modules for group in module.mesh_groups]
        return [*self._shard_groups(), *others] or [resolve_group(None)]

    def _agree(self, problem: Exception | None) -> None:
        super()._agree(problem)
        for group in dict.fromkeys(self._shard_groups()):
            if group.rank() == 0:
                one = self._agreements[group]
                _log.info("%s: %s", self._function, _describe(one.hosts(), one.notes(), self._options))

    def _agree_in(self, group: dist.ProcessGroup, problem: Exception | None) -> None:
        """Compare modules and options, and learn the hosts and the links of a group."""
        modules = [one for one in self._modules if group in (one.shard_group, *one.mesh_groups)]

        def terms() -> dict[str, object]:
            if problem is not None:
                raise problem
            # Few bits of other dtypes have the same size, and would be taken for each other.
            parameters = {
                f"module {one.name!r}": [*zip(one.shapes, map(str, one.gathered_dtypes), strict=True)]
                for one in modules
            }
            return {**self._options._asdict(), "wire format and plans": WIRE_VERSION, **parameters}

        def link() -> str:
            device = modules[0].group.device
            return link_inside_host(device.type, on_host=runs_on_host(group, device))

        agreement = OrderedWorker(group, name=self._function, terms=terms, note=link)
        agreement.agree()
        self._agreements[group] = agreement

    def _gather_of(self, module: ShardedModule) -> ModuleGather:
        assert module.shard_group is not None, "such modules are refused"
        return ModuleGather(
            module,
            self._options,
            self._agreements[module.shard_group],
            self._counter,
            partial(self._require_no_later_module, module),
            self._forwards,
        )

    def _substitute(self, module: ShardedModule) -> ModuleGather:
        return self._gathers[module]

    def _warn_if_nothing_is_quantized(self) -> None:
        reasons = {gather.name: gather.why_always_plain() for gather in self._gathers.values()}
        if all(reasons.values()):
            warnings.warn(f"{self._function} gathers all modules in full precision: {reasons}", stacklevel=4)


def _check_options(
    *,
    bits: Any,
    block_size: Any,
    rotate: Any,
    exact_1d: Any,
    min_bytes: Any,
    intra_node: Any,
    keep_for_backward: Any,
    differences: Any,
) -> GatherOptions:
    """Return the options after checking their types and values.

    Raises:
        TypeError: An option is of another type.
        ValueError: An option has an unknown value.
    """
    if bits == 4 and not differences:
        raise ValueError(
            "bits=4 is not for weights: it cost loss in every fine-tuning run that was measured, and the "
            "exact weights of a checkpoint can be worse than the rounded ones that were trained with; for "
            "their differences it is: differences=True"
        )
    if bits not in (None, 8, 4):
        raise ValueError(f"bits must be 8, or 4 with differences=True, got {bits!r}")
    for name, value in {
        "rotate": rotate,
        "exact_1d": exact_1d,
        "keep_for_backward": keep_for_backward,
        "differences": differences,
    }.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    least = _LEAST_BYTES if min_bytes is None else min_bytes
    if isinstance(least, bool) or not hasattr(least, "__index__"):
        raise TypeError(f"min_bytes must be an integer, got {min_bytes!r}")
    if operator.index(least) < 0:
        raise ValueError(f"min_bytes must be at least 0, got {min_bytes!r}")
    if intra_node == "full":
        raise ValueError("intra_node='full' would send the same weights in more bytes: use 'auto'")
    if intra_node not in ("auto", "quantized", "flat"):
        raise ValueError(f"intra_node must be 'auto', 'quantized' or 'flat', got {intra_node!r}")
    if differences:
        _refuse_with_differences(bits, intra_node, keep_for_backward=keep_for_backward)
    block = (32 if differences else 128) if block_size is None else block_size
    layout = Layout("int4" if differences else "int8", block, rotate)
    return GatherOptions(
        layout.block_size,
        layout.rotate,
        exact_1d,
        operator.index(least),
        intra_node,
        keep_for_backward,
        differences,
    )


def _refuse_with_differences(bits: Any, intra_node: str, *, keep_for_backward: bool) -> None:
    """Raise for an option that does not work with differences."""
    if bits == 8:
        raise ValueError("bits=8 does not work with differences=True, which sends them in 4")
    if keep_for_backward:
        raise ValueError(
            "keep_for_backward does not work with differences=True, which keeps what was gathered anyway"
        )
    if intra_node == "quantized":
        raise ValueError(
            "intra_node='quantized' does not work with differences=True: inside hosts weights go round as "
            "they are"
        )


def _describe(hosts: list[int], links: list[str], options: GatherOptions) -> str:
    """Say how the ranks of a group gather, for the log."""
    if len(hosts) == 1:
        return "one rank alone has all shards: FSDP gathers nothing, and weights are exact"
    several, flat = len(set(hosts)), options.intra_node == "flat"
    how = "as differences in 4 bits" if options.differences else "in 8 bits"
    where = f"{len(hosts)} ranks on {several} host(s) gather parameters {how}"
    if several == 1 and set(links) == {"NVLink"}:
        return f"{where}; NVLink joins them all: FSDP's own gathers are likely as fast"
    if flat or several in (1, len(hosts)):
        return f"{where}, each from all others"
    return f"{where}; each message enters a host once"
