"""Residuals in files: found by name, checked before anything changes, gathered for one rank's checkpoint."""

import contextlib
import copy
import logging
import os
import pathlib
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from quant_buckets import assert_same, flat_residuals
from resumed_runs import Net, Run, resumed, state_maker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
)
from ddp_quant_hooks.feedback import checkpoint
from dist_utils import TensorMismatchError
from dist_utils.testing import run_ranks, same_bits

BOTH = state_maker(error_feedback="both")


def _trained(steps=3):
    run = Run(BOTH, bucket_cap_mb=0.012)
    for number in range(steps):
        run.step(number)
    return run


def _names(rank):
    run = _trained()
    saved = run.state.state_dict()
    assert saved["parameters"].keys() == dict(Net().named_parameters()).keys()
    # Nothing is compiled before it is called; one rank suffices, as that imports the compiler.
    compiled = torch.compile if rank == 0 else torch.nn.Module.eval
    part = Net()
    part.layers[1] = compiled(part.layers[1])
    for model in (DistributedDataParallel(Net()), Net(), DistributedDataParallel(compiled(Net())), part):
        state = BOTH()
        state.load_state_dict(saved, model)
        assert same_bits(saved, state.state_dict(model))
    for model in (run.ddp, run.ddp.module, compiled(run.ddp)):
        assert same_bits(saved, run.state.state_dict(model))
    with pytest.raises(ValueError, match=r"a parameter 'layers\.\d\.\w+', which the model does not"):
        run.state.state_dict(Net())
    fresh = BOTH()
    assert fresh.state_dict()["parameters"] == {}, "there is nothing to save yet"
    with pytest.raises(ValueError, match=r"load_state_dict\(\) needs the model"):
        fresh.load_state_dict(saved)
    with pytest.raises(TypeError, match="model must be a module, got int"):
        fresh.state_dict(3)
    with pytest.warns(UserWarning, match="pickles its options only"):
        pickled = pickle.loads(pickle.dumps(run.state))
    assert pickled.state_dict(run.ddp)["parameters"] == {}


def _without(name):
    return lambda saved: {key: value for key, value in saved.items() if key != name}


def _with(name, **changes):
    """Return a change to the entry of one parameter; ``None``: to leave out what it has."""

    def change(saved):
        entry = {**saved["parameters"][name], **changes}
        entry = {key: value for key, value in entry.items() if value is not None}
        return {**saved, "parameters": {**saved["parameters"], name: entry}}

    return change


def _with_pieces(*pieces):
    return _with("norm.bias", slots={"own": {"length": 37, "pieces": [*pieces]}})


WRONG_FILES = {  # what the message must say, and the change of a file
    "version 2 of the format, and this release": lambda saved: {**saved, "version": 2},
    "version None": lambda saved: {},
    "what state_dict.. returned, got a list": lambda saved: [],
    "residuals are of rank 7, but here": lambda saved: {**saved, "rank": 7},
    "of world_size 5, but here it is 2": lambda saved: {**saved, "world_size": 5},
    "of exact_1d None": _without("exact_1d"),
    "not residuals that state_dict.*'parameters'": _without("parameters"),
    "not residuals that state_dict.*'slots'": _with("norm.bias", slots=None),
    "not residuals that state_dict.*'pieces'": _with("norm.bias", slots={"own": {"length": 37}}),
    "not residuals that state_dict.*'length'": _with("norm.bias", length=None),
    "not residuals that state_dict.*inf is not a count": lambda saved: {**saved, "steps": float("inf")},
    "not residuals that state_dict.*-1 is not a count": _with_pieces((-1, 1.0, torch.ones(9))),
    "not residuals that state_dict.*0.5 is not a count": _with_pieces((0.5, 1.0, torch.ones(9))),
    "not residuals that state_dict.*Boolean value": lambda saved: {**saved, "version": torch.ones(3)},
    "not residuals that state_dict.*argument": _with_pieces((0, 1.0)),
    "not residuals that state_dict.*pieces of several dtypes": _with_pieces(
        (0, 1.0, torch.ones(9)), (9, 1.0, torch.ones(9).bfloat16())
    ),
    r"a piece of shape \(38,\) at 0, but only 37 values": _with_pieces((0, 1.0, torch.ones(38))),
    r"a piece of shape \(3, 3\) at 0": _with_pieces((0, 1.0, torch.ones(3, 3))),
    "a parameter 'layers.0.weight' of 36 values, 2257 long here": _with("layers.0.weight", length=36),
    "another memory format: with strides": _with("layers.0.weight", order=(1, 61)),
    "'norm.bias' has values that are not finite": _with_pieces((0, 1.0, torch.full((37,), torch.nan))),
    "'norm.bias' has values that are not finite in torch.int64": _with_pieces(
        (0, 1.0, torch.ones(37).long())
    ),
}
OTHER_OPTIONS = {
    "error_feedback 'both', but here": {"error_feedback": "shard"},
    "scatter": {"block_size": 64},
    "gather": {"gather": "fp16"},
    "exact_1d False, but here": {"exact_1d": True},
    "min_bytes 0, but here": {"min_bytes": 9},
    "levels": {"levels": (2,)},
}


def _refusals(rank):
    run = _trained()
    saved = run.state.state_dict()
    for match, change in WRONG_FILES.items():
        damaged = change(copy.deepcopy(saved))
        with pytest.raises(ValueError if isinstance(damaged, dict) else TypeError, match=match):
            run.state.load_state_dict(damaged)
        assert same_bits(saved, run.state.state_dict()), "nothing was changed"
    with pytest.raises(ValueError, match=r"'layers\.\d\.\w+' of .* values, not there"):
        run.state.load_state_dict(saved, torch.nn.Linear(2, 2))
    others = {
        f"of {name}": state_maker(**{"error_feedback": "both", **options})()
        for name, options in OTHER_OPTIONS.items()
    }
    mesh = init_device_mesh("cpu", (2, 1))
    others["of state 'QuantizedAllreduceState', but"] = HierarchicalAllreduceState(mesh=mesh)
    for match, state in others.items():
        with pytest.raises(ValueError, match=match):
            state.load_state_dict(saved, run.ddp)
        assert state.state_dict(run.ddp)["parameters"] == {}
    run.step(3)


class Lines(logging.Handler):
    """The lines in the log about residuals that were dropped."""

    def __init__(self):
        super().__init__()
        self.count = 0
        logger = logging.getLogger("ddp_quant_hooks")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.count += "dropped the residuals of" in record.getMessage()


def _positions(saved):
    """Return each mean's residual by parameter and position."""
    return {
        (name, start + number, weight): value
        for name, entry in saved["parameters"].items()
        for start, weight, values in entry["slots"].get("shard", {"pieces": []})["pieces"]
        for number, value in enumerate(values.tolist())
    }


def _other_buckets(rank):
    """Whatever buckets come: each residual stays with its value or is dropped, none goes astray."""
    lines = Lines()
    run = _trained(steps=4)
    assert lines.count == 1, "of the buckets of the first step"
    checkpoint = run.save()
    saved = checkpoint["residuals"]
    early = Run(BOTH, bucket_cap_mb=0.012)
    early.state.load_state_dict(saved)  # before the first pass, whose buckets are others
    runs = [early, *(resumed(checkpoint, BOTH, bucket_cap_mb=cap) for cap in (0.02, 25, 0.006))]
    for again in runs:
        assert same_bits(flat_residuals(saved), flat_residuals(again.state.state_dict()))
        again.backward(3)
        again.state.discard_step()
        kept = again.state.state_dict()
        assert_same(flat_residuals(saved), flat_residuals(kept))
        before, after = _positions(saved), _positions(kept)
        assert {place: value for place, value in after.items() if value != before.get(place, 0.0)} == {}
        assert any(value and place in before for place, value in after.items())
        assert before.keys() - {place for place, value in after.items() if value}, "some are dropped"
        lines.count = 0
        again.optimizer.zero_grad()
        again.backward(3)
        assert lines.count == 1, "one line for all buckets"
        again.state.close()


def _other_kind(rank):
    """One rank loads residuals of keys into the state of a model: all raise, as soon as they compare."""
    run, tensors = _trained(), BOTH()
    all_reduce(torch.ones(1000), dist.ReduceOp.AVG, tensors, key="a")
    run.state.load_state_dict((tensors if rank else run.state).state_dict())
    told = "loaded residuals is 'of parameters in step 3' on rank 0, 'of keys in step 1' on rank 1"
    with pytest.raises(RuntimeError, match=told):
        run.step(3)


class Weighted(torch.nn.Module):
    """Its gradients are what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20, 15))
        self.bias = torch.nn.Parameter(torch.zeros(15))

    def forward(self, weight, bias):
        return (self.weight * weight).sum() + (self.bias * bias).sum()


def _values(step, count):
    seed = 1000 * step + dist.get_rank()
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _of_1_0(rank, ranks):
    """Go on from what release 1.0.1 has saved after steps 0 to 2 of two ranks, with ``bits=4``."""
    saved, tensors = ranks[rank], state_maker(bits=4)()
    tensors.load_state_dict(saved["keys"])
    mean = _values(3, 300)
    all_reduce(mean, dist.ReduceOp.AVG, tensors, key="a")
    ddp, state = DistributedDataParallel(Weighted()), state_maker(bits=4)()
    ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)
    ddp(_values(0, 300).view(20, 15), _values(10, 15)).backward()  # makes the final buckets
    ddp.zero_grad()
    state.load_state_dict(saved["parameters"])
    own = {name: entry["own"][0][2] for name, entry in saved["parameters"]["parameters"].items()}
    assert_same(own, flat_residuals(state.state_dict()))
    ddp(_values(3, 300).view(20, 15), _values(13, 15)).backward()
    assert_same([saved["mean"], *saved["gradients"]], [mean, *(one.grad for one in ddp.parameters())])
    assert (tensors.state_dict()["steps"], state.state_dict()["steps"]) == (4, 4)
    turned = torch.nn.ParameterDict({"weight": torch.zeros(15, 20).t(), "bias": torch.zeros(15)})
    with pytest.raises(ValueError, match="another memory format"):
        state.load_state_dict(saved["parameters"], turned)


def test_a_run_goes_on_from_files_of_1_0():
    run_ranks(_of_1_0, 2, torch.load(pathlib.Path(__file__).with_name("residuals_of_1_0_1.pt")))


def _bound(rank):
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40), process_group=group)
    state = BOTH()
    assert state.bind(ddp).process_group is group
    ddp.register_comm_hook(state, quantized_allreduce_hook)
    ddp(torch.ones(1, 40)).sum().backward()
    assert state.state_dict()["parameters"].keys() == ({"weight", "bias"} if rank < 2 else set())
    del ddp
    if rank < 2:
        with pytest.raises(ValueError, match="whose model is gone now"):
            state.state_dict()


def _other_models(rank):
    """Models with the same parameters, which rank 1 uses in the other order; and one with other names."""
    runs = [Run(BOTH) for _ in range(2)]
    order = runs if rank == 0 else runs[::-1]
    with pytest.raises(RuntimeError, match=r"number of the bound state is 1 on rank 0, 2 on rank 1"):
        sum(run.ddp(torch.ones(2, 37), use=True).sum() for run in order[::-1]).backward()
    net = torch.nn.Sequential()
    net.add_module(f"of rank {rank}", torch.nn.Linear(40, 40))
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(BOTH().bind(ddp), quantized_allreduce_hook)
    with pytest.raises(RuntimeError, match="parameters of the bound model"):
        ddp(torch.ones(2, 40)).sum().backward()


def _gathers(rank):
    run, world_size = _trained(), dist.get_world_size()
    for dst in (0, world_size - 1):
        gathered = run.state.gather_state_dict(dst=dst)
        assert (gathered is not None) == (rank == dst)
        assert gathered is None or [part["rank"] for part in gathered["ranks"]] == list(range(world_size))
        again, other = BOTH(), DistributedDataParallel(Net())
        again.scatter_state_dict(gathered, other, src=dst)
        assert same_bits(run.state.state_dict(), again.state_dict(other))

    whole = run.state.gather_state_dict()
    before = run.state.state_dict()
    gather, scatter = run.state.gather_state_dict, run.state.scatter_state_dict
    fewer = broken = forged = None
    if whole is not None:
        fewer, broken, forged = {**whole, "ranks": whole["ranks"][:-1]}, *map(copy.deepcopy, [whole] * 2)
        broken["ranks"][1]["parameters"]["norm.bias"]["length"] = 1
        forged["ranks"][1]["steps"] = float("inf")
    everyone, model = range(world_size), Net() if rank == 1 else None
    # What is raised where the problem is, and elsewhere a TensorMismatchError that says why.
    for call, kind, match, on in (
        (lambda: scatter(None), TypeError, "got a NoneType", [0]),
        (lambda: scatter({}), TypeError, "got a dict", [0]),
        (lambda: scatter(fewer), ValueError, f"of {world_size - 1} ranks, but the group has", [0]),
        (lambda: scatter(broken), ValueError, "a parameter 'norm.bias' of 1 values", [1]),
        (lambda: scatter(forged), ValueError, "inf is not a count", [1]),
        (lambda: scatter(whole, src=7), ValueError, "rank 7 is not a member of", everyone),
        (lambda: gather(dst=-1), ValueError, "rank -1 is not a member of", everyone),
        (lambda: gather(model), ValueError, "there are residuals of a parameter", [1]),
        (lambda: gather(dst=min(rank, 1)), ValueError, r"dst=0\).*gather_state_dict\(dst=1\)", []),
    ):
        with pytest.raises((kind, TensorMismatchError), match=match) as caught:
            call()
        assert isinstance(caught.value, kind) == (rank in on), caught.value
        assert same_bits(before, run.state.state_dict()), "nothing was changed"
    scatter(whole)
    run.step(3)
    assert run.state.state_dict()["steps"] == 4


def _no_memory(rank):
    """A rank has no memory for what another one sends: the ranks after it do not wait for it."""
    run = _trained()
    gather, whole = run.state.gather_state_dict, run.state.gather_state_dict()
    for failing, call in ((0, gather), (2, lambda: run.state.scatter_state_dict(whole))):
        full = mock.patch.object(checkpoint, "_memory", side_effect=MemoryError("no room"))
        with (
            full if rank == failing else contextlib.nullcontext(),
            pytest.raises((MemoryError, TensorMismatchError), match="no room"),
        ):
            call()
    run.state.scatter_state_dict(whole)
    run.step(3)


def _files_of_two_ranks(rank):
    for check in (_other_models, _names, _refusals, _other_kind):
        check(rank)


def test_files_find_parameters_by_name_and_what_does_not_fit_is_refused_and_changes_nothing():
    run_ranks(_files_of_two_ranks, 2, timeout=120)


def _files_of_three_ranks(rank):
    for check in (_other_buckets, _bound, _gathers, _no_memory):
        check(rank)


def test_residuals_follow_values_into_other_buckets_and_to_the_rank_that_gathers_them():
    run_ranks(_files_of_three_ranks, 3, timeout=120)


class EndsTheProcess:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


def _hostile(rank):
    """Rank 1 sends something else than residuals, which nobody unpickles."""
    options, refused = {"min_bytes": 0, "bits": 4}, "rank 1 sent data that are not saved residuals"
    state = QuantizedAllreduceState(**options)
    gathered = state.gather_state_dict(dst=1)
    if rank == 1:
        hostile = QuantizedAllreduceState(**options)
        hostile.state_dict = lambda _=None: EndsTheProcess()
        with pytest.raises(TensorMismatchError, match=refused):
            hostile.gather_state_dict()
        gathered["ranks"][0] = EndsTheProcess()
        with pytest.raises(TensorMismatchError, match=refused):
            state.scatter_state_dict(gathered, src=1)
        return
    for call in (state.gather_state_dict, lambda: state.scatter_state_dict(None, src=1)):
        with pytest.raises(ValueError, match=refused):
            call()


def test_what_a_peer_sends_as_residuals_is_never_unpickled():
    run_ranks(_hostile, 2)
