"""Everything that communicates, as cases for test_peers.py: hooks, overlaps, FSDP2, tensors, collectives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from trainings import (
    HOOKS,
    TRAININGS,
    Hook,
    Net,
    Places,
    Training,
    mesh_of,
    no_hook,
    with_hook,
)

import ddp_compress_hooks as compress
import ddp_quant_hooks as quant
import dist_autograd_collectives as dac
from ddp_compress_hooks import CompressState
from ddp_optim_overlap import ByValue, ClipPolicy
from ddp_quant_hooks import AutoState, QuantizedAllreduceState
from dist_utils import (
    AgreementError,
    OrderedWorker,
    require_same_terms,
    start_messages,
    sync_module_states,
    verify_param_shape_across_processes,
)
from dist_utils.process_groups import all_gather_plain

RANKS, VICTIM = 3, 1
AVG = dist.ReduceOp.AVG
X = torch.ones(2)
GLOO_ERROR = "Timed out|timeout caused|Connection (closed|reset)"
"""What torch's own collectives say of a peer that does not take part, or has ended its connections."""
NOT_THERE = r"ranks \[0, 2\] came within {limit:g} s, ranks \[1\] did not"
"""What errors say if a rank does not come to a comparison in the store."""

Trouble = Callable[[], None]
Begin = Callable[[dist.ProcessGroup, Places], "Part | Training"]


class Part:
    """One rank's part of a case that only makes calls; the others are of :class:`trainings.Training`.

    Args:
        places: Where the rank may get into trouble.
        call: Makes a step; called with what to call in its middle.
        state: What is closed at the end, if anything.
    """

    handle = None

    def __init__(
        self, places: Places, call: Callable[[Trouble], torch.Tensor | None], state: Any = None
    ) -> None:
        self._places, self._call, self._state = places, call, state
        self._results: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        """Make a step."""
        self._places.begin(number)
        result = self._call(lambda: self._places.at("backward"))
        self._results = [] if result is None else [result]

    def parameters(self) -> list[torch.Tensor]:
        """Return the result of the last step, if it has one."""
        return self._results

    def close(self) -> None:
        """Close the state."""
        if self._state is not None:
            self._state.close()


class Case(NamedTuple):
    """What all ranks do, and the errors of the others if the victim gets into trouble.

    Attributes:
        begin: Called with the ranks' group and the places; collective.
        error: The documented type.
        text: A pattern in the error if the victim is in trouble in the middle of a step.
        text_at_first: Likewise before its first step.
        steps_parts: Buckets are stepped one by one: some may be stepped before the error.
        waiting: The other ranks that wait for the victim.
        witnesses: The ranks whose error says in what they differ; the others do not compare, and wait in
            torch's own collectives.
        starts_anew: After ``close()`` on all ranks the group can be used again, and with FSDP2 the model.
    """

    begin: Begin
    error: type[Exception] = RuntimeError
    text: str = ""
    text_at_first: str = ""
    steps_parts: bool = False
    waiting: tuple[int, ...] = (0, 2)
    witnesses: tuple[int, ...] = (0, 1, 2)
    starts_anew: bool = False


def _train_with(hook: Hook, overlap: dict[str, Any] | None = None, **options: Any) -> Begin:
    return lambda group, places: with_hook(group, hook, overlap, **{"places": places, **options})


def _training(name: str) -> Case:
    kind = TRAININGS[name]
    text = "" if name == "FSDP2 across shards" else NOT_THERE  # FSDP gathers parameters first
    stateless = {"allreduce", "fp16", "bf16 wrapper", "per tensor", "per channel"}
    return Case(
        kind.begin,
        text_at_first=text,
        steps_parts=kind.steps_parts,
        starts_anew=name not in {*stateless, "hook_then_optimizer", "FSDP2 across shards"},
    )


def _own_mean(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as a user's own hook does."""
    share = bucket.buffer() / group.size()
    done = dist.all_reduce(share, group=group, async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


_wrapped = _train_with(lambda group: (group, compress.fp16_compress_wrapper(_own_mean)))
_unused_parameters = _train_with(HOOKS["allreduce"], {}, find_unused_parameters=True)
_has_fsdp = hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook")
NAMES = [*HOOKS, "plain tensors, 4 bits, feedback", "hook_then_optimizer"]
NAMES += ["allreduce, overlap", "auto, overlap", "8 bits, released"]
NAMES += ["FSDP2 between nodes", "FSDP2 across shards"] if _has_fsdp else []
TRAINED = {name: _training(name) for name in NAMES}
TRAINED |= {
    "wrapper of a user's hook": Case(_wrapped, text_at_first=NOT_THERE),
    "overlap, unused parameters": Case(_unused_parameters, text_at_first=NOT_THERE, steps_parts=True),
}


def _counts(state: Any) -> Any:
    """Return what a state says of the steps that it has made."""
    if isinstance(state, QuantizedAllreduceState):
        return state.statistics, state.state_dict()["steps"]
    return None


def _on_tensors(make_state: Callable[..., Any], call: Callable[[Any, str], torch.Tensor]) -> Case:
    """Return a case of a step of two calls, between which a rank gets into trouble."""

    def begin(group: dist.ProcessGroup, places: Places) -> Part:
        state = make_state(group)

        def step(trouble: Trouble) -> torch.Tensor:
            call(state, "first")
            counted = _counts(state)
            trouble()
            try:
                return call(state, "second")
            except RuntimeError:
                assert _counts(state) == counted, "the failed call is counted"
                call(state, "third")  # fails, too
                raise AssertionError("a call has ended after one that failed") from None

        return Part(places, step, state)

    return Case(begin, text_at_first=NOT_THERE, starts_anew=True)


def _own_values() -> torch.Tensor:
    return torch.arange(600.0) * (1 + dist.get_rank())


def _in_16_bits(state: CompressState, key: str) -> torch.Tensor:
    del key
    compress.all_reduce(values := _own_values(), AVG, state)
    return values


def _in_8_bits(state: QuantizedAllreduceState, key: str) -> torch.Tensor:
    quant.all_reduce(values := _own_values(), AVG, state, key=key)
    return values


def _scatter(state: QuantizedAllreduceState, key: str) -> torch.Tensor:
    shard = torch.empty(200)
    started = quant.reduce_scatter_tensor(shard, _own_values(), AVG, state, async_op=True, key=key)
    started.wait()
    return shard


_state_of_8_bits = functools.partial(QuantizedAllreduceState, min_bytes=0)
ON_TENSORS = {
    "tensors in 16 bits": _on_tensors(CompressState, _in_16_bits),
    "tensors in 16 bits, fp32 sums": _on_tensors(
        functools.partial(CompressState, wire_dtype=torch.bfloat16, accumulate="fp32"), _in_16_bits
    ),
    "tensors in 8 bits": _on_tensors(_state_of_8_bits, _in_8_bits),
    "tensors in 4 bits, feedback": _on_tensors(
        functools.partial(QuantizedAllreduceState, bits=4, min_bytes=0), _in_8_bits
    ),
    "tensors too small for 4 bits, feedback": _on_tensors(
        functools.partial(QuantizedAllreduceState, bits=4, min_bytes=1 << 20), _in_8_bits
    ),
    "scattered tensors in 8 bits": _on_tensors(_state_of_8_bits, _scatter),
}


def _collective(call: Callable[..., torch.Tensor], title: str, waiting: tuple[int, ...] = (0, 2)) -> Case:
    """Return a case in which a rank gets into trouble between a collective and its backward."""

    def begin(group: dist.ProcessGroup, places: Places) -> Part:
        def step(trouble: Trouble) -> None:
            y = call(torch.ones(3, 2, requires_grad=True), group=group)
            trouble()
            y.sum().backward()

        return Part(places, step)

    text = rf"{title} failed on rank \d of 3 in its group"
    return Case(begin, dac.CollectiveError, f"^the backward of {text}", f"^{text}", waiting=waiting)


RING = [(0, 1), (1, 2), (2, 0)]
COLLECTIVES = {
    "all_reduce": _collective(dac.all_reduce, r"all_reduce\(SUM\)"),
    "all_reduce of the maximum": _collective(
        lambda x, group: dac.all_reduce(x, "max", group), r"all_reduce\(MAX\)"
    ),
    # In its backward rank 2 only sends.
    "broadcast": _collective(lambda x, group: dac.broadcast(x, 0, group), "broadcast", waiting=(0,)),
    "reduce": _collective(lambda x, group: dac.reduce(x, VICTIM, group=group), r"reduce\(SUM\)"),
    "all_gather": _collective(lambda x, group: dac.all_gather(x, group)[1], "all_gather"),
    "all_gather_base": _collective(
        lambda x, group: dac.all_gather_base(torch.empty(9, 2), x, group), "all_gather_base"
    ),
    "gather": _collective(lambda x, group: dac.gather(x, VICTIM, group)[0], "gather"),
    "scatter": _collective(lambda x, group: dac.scatter([x, x, x], VICTIM, group), "scatter"),
    "reduce_scatter": _collective(
        lambda x, group: dac.reduce_scatter(torch.empty(3, 2), [x, x, x], group=group),
        r"reduce_scatter\(SUM\)",
    ),
    "all_to_all": _collective(
        lambda x, group: dac.all_to_all([torch.empty(3, 2)] * 3, [x, x, x], group)[1], "all_to_all"
    ),
    "all_to_all_single": _collective(
        lambda x, group: dac.all_to_all_single(torch.empty(3, 2), x, group=group), "all_to_all_single"
    ),
    "all_gather_cat": _collective(dac.all_gather_cat, "all_gather_cat"),
    "reduce_scatter_dim": _collective(dac.reduce_scatter_dim, r"reduce_scatter_dim\(SUM\)"),
    "permute": _collective(lambda x, group: dac.permute(x, RING, group=group), "permute"),
    "a started all_gather": _collective(
        lambda x, group: dac.start(dac.all_gather, x, group).wait()[0], "all_gather"
    ),
}


def _in_worker(group: dist.ProcessGroup, places: Places) -> Part:
    worker = OrderedWorker(group)

    def step(trouble: Trouble) -> torch.Tensor:
        def job(private: dist.ProcessGroup) -> torch.Tensor:
            total = torch.ones(1)
            dist.all_reduce(total, group=private)
            trouble()
            dist.all_reduce(total, group=private)
            return total

        return worker.submit(job).wait()

    return Part(places, step, worker)


def _calls(call: Callable[..., object], *arguments: Any, **options: Any) -> Begin:
    """Return how to begin a case in which a rank gets into trouble before a call."""

    def begin(group: dist.ProcessGroup, places: Places) -> Part:
        def step(trouble: Trouble) -> None:
            trouble()
            call(*arguments, group=group, **options)

        return Part(places, step)

    return begin


def _agree(group: dist.ProcessGroup) -> None:
    require_same_terms(group, "a step", {"bits": 8})


def _synchronize(group: dist.ProcessGroup) -> None:
    sync_module_states(torch.nn.Linear(2, 3), group, 100, 0, ())


def _exchange(group: dist.ProcessGroup) -> None:
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    received = [(rank, torch.empty(5)) for rank in others]
    for work in start_messages(group, receives=received, sends=[(rank, torch.ones(5)) for rank in others]):
        work.wait()


def _compared(group: dist.ProcessGroup) -> None:
    with dac.compare_calls():
        dac.all_reduce(X, group=group)


NOT_COMPARED = r"comparison of calls failed on rank \d of 3 in the group of all_reduce\(SUM\)"
NO_TERMS = f"a step: {NOT_THERE}"
CALLS = {
    "a collective that is compared": Case(_calls(_compared), dac.CollectiveError, NOT_COMPARED, NOT_COMPARED),
    "OrderedWorker": Case(_in_worker, text_at_first=NOT_THERE, starts_anew=True),
    "require_same_terms": Case(_calls(_agree), AgreementError, NO_TERMS, NO_TERMS),
    "start_messages": Case(_calls(_exchange)),
    "all_gather_plain": Case(_calls(lambda group: all_gather_plain(group, 1))),
    "sync_module_states": Case(_calls(_synchronize)),
    "verify_param_shape_across_processes": Case(
        _calls(lambda group: verify_param_shape_across_processes(group, [X]))
    ),
}
CASES = {**TRAINED, **ON_TENSORS, **COLLECTIVES, **CALLS}


def _is_victim() -> bool:
    return dist.get_rank() == VICTIM


def _differs(usual: Begin, other: Begin, text: str, error: type[Exception] = RuntimeError) -> Case:
    """Return a case in which the victim does something else than the other ranks."""

    def begin(group: dist.ProcessGroup, places: Places) -> Part | Training:
        return (other if _is_victim() else usual)(group, places)

    return Case(begin, error, text)


def _with_state(make: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> Begin:
    return _train_with(lambda group: (make(group, **options), hook))


def _on_8_bits(call: Callable[..., object], *arguments: Any, **options: Any) -> Begin:
    return _calls(lambda group: call(*arguments, AVG, _state_of_8_bits(group), **options))


def _sharded_modules_differ(group: dist.ProcessGroup, places: Places) -> Part:
    from ddp_quant_hooks.fsdp import quantize_all_reduce  # noqa: PLC0415 - torch 2.6 has none of this

    mesh, net = mesh_of(group, 1), Net(places)
    for layer in net.layers[_is_victim() :]:
        fsdp.fully_shard(layer, mesh=mesh["shard"])
    fsdp.fully_shard(net, mesh=mesh["shard"])
    return Part(places, lambda _: quantize_all_reduce(net, QuantizedAllreduceState(mesh["node"])))


def _with_other_buckets(group: dist.ProcessGroup, places: Places) -> Part:
    sparse = torch.nn.Embedding(4, 3, sparse=_is_victim())
    ddp = torch.nn.parallel.DistributedDataParallel(sparse, process_group=group)
    ddp.register_comm_hook(group, compress.fp16_compress_hook)
    return Part(places, lambda _: ddp(torch.tensor([1])).sum().backward())


class OwnClip(ClipPolicy):
    """A user's own policy, whose repr contains an address."""

    def clip(self, parameters: Any) -> None:
        """Change nothing."""


def _hook_of_one_rank(hook: Begin) -> Case:
    """Return a case in which the victim alone has a hook; the others take part in torch's average."""
    text = r"ranks \[1\] came within {limit:g} s, ranks \[0, 2\] did not"
    return _differs(_train_with(no_hook), hook, text)._replace(witnesses=(VICTIM,))


_fp16, _8_bits, _allreduce = (HOOKS[name] for name in ("fp16", "8 bits", "allreduce"))
_all_reduce_8, _scatter_8 = quant.all_reduce, quant.reduce_scatter_tensor


def _apart(usual: str, other: str) -> str:
    """Return what errors say of a difference."""
    return f"{usual} on ranks 0, 2, {other} on rank 1"


DIFFERENCES = {
    "hooks": _differs(
        _train_with(_fp16),
        _train_with(HOOKS["bf16 wrapper"]),
        _apart("fp16_compress_hook", "bf16_compress_hook"),
    ),
    "hooks of two packages": _differs(
        _train_with(HOOKS["bf16, fp32 sums"]),
        _train_with(_8_bits),
        _apart("CompressState", "QuantizedAllreduceState"),
    ),
    "torch's hooks": _differs(
        _train_with(HOOKS["per tensor"]),
        _train_with(HOOKS["per channel"]),
        _apart("quantization_pertensor_hook", "quantization_perchannel_hook"),
    ),
    "kinds of buckets": Case(_with_other_buckets, text=_apart("sparse is False", "True")),
    "options in 16 bits": _differs(
        _with_state(CompressState, compress.compress_hook, wire_dtype=torch.float16, accumulate="fp32"),
        _with_state(CompressState, compress.compress_hook, wire_dtype=torch.bfloat16, saturate=True),
        "; ".join(
            [
                _apart("accumulate is 'fp32'", "'wire'"),
                _apart("saturate is False", "True"),
                _apart("wire_dtype is torch.float16", "torch.bfloat16"),
            ]
        ),
    ),
    "wrappers": _differs(
        _wrapped,
        _train_with(HOOKS["bf16 wrapper"]),
        _apart(r"fp16_compress_wrapper\(_own_mean\)", "bf16_compress_hook"),
    ),
    "options of AutoState": _differs(
        _with_state(AutoState, quant.auto_hook),
        _with_state(AutoState, quant.auto_hook, max_error=0.5),
        _apart("max_error is .*", "0.5"),
    ),
    "a hook on one rank": _hook_of_one_rank(_train_with(_8_bits)),
    "a hook without a state on one rank": _hook_of_one_rank(_train_with(_fp16)),
    "an overlap on one rank": _hook_of_one_rank(_train_with(_allreduce, {})),
    "hooks of overlaps": _differs(
        _train_with(_fp16, {}),
        _train_with(_8_bits, {}),
        _apart("CompressState", "QuantizedAllreduceState"),
    ),
    "clipping": _differs(
        _train_with(_fp16, {"clip": ByValue(1.0)}),
        _train_with(_fp16, {"clip": OwnClip()}),
        _apart("clip is 'ByValue'", "'OwnClip'"),
    ),
    "optimizers": _differs(
        _train_with(_allreduce, {}, places=None),
        _train_with(_allreduce, {}, places=None, make_optimizer=torch.optim.SGD),
        r"\('AdamW', 1\).* on rank.*\('SGD', 1\).* on rank",
    ),
    "sharded modules": Case(
        _sharded_modules_differ, AgreementError, r"module 'layers\.0' is .* not there on rank 1"
    ),
    "keys": _differs(
        _on_8_bits(_all_reduce_8, X, key="a"),
        _on_8_bits(_all_reduce_8, X, key="b"),
        _apart("key is 'a'", "'b'"),
    ),
    "lengths of tensors": _differs(
        _on_8_bits(_all_reduce_8, X),
        _on_8_bits(_all_reduce_8, X[:1]),
        _apart(r"tensors is \[\(2, .*", r"\[\(1, .*"),
    ),
    "functions on tensors": _differs(
        _on_8_bits(_all_reduce_8, torch.ones(9)),
        _on_8_bits(_scatter_8, torch.empty(3), torch.ones(9)),
        _apart("about to do different things: .*all_reduce", ".*reduce_scatter_tensor"),
    ),
}
if not _has_fsdp:
    del DIFFERENCES["sharded modules"]
