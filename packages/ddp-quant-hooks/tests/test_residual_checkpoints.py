"""Residuals in files: found by name, checked before anything changes, gathered for one rank's checkpoint."""

import copy
import io
import logging
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from quant_buckets import LEAVES_OUT_BUCKETS
from resumed_runs import Net, Run, complex_if_sent, resumed, state_maker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import HierarchicalAllreduceState, QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils import TensorMismatchError
from dist_utils.testing import run_ranks, same_bits

BOTH = state_maker(error_feedback="both")


class Lines(logging.Handler):
    """The log of this package, as text."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("ddp_quant_hooks")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def about(self, text):
        found = [line for line in self.lines if text in line]
        self.lines.clear()
        return len(found)


def _trained(make_state=BOTH, steps=3, **options):
    run = Run(make_state, **{"bucket_cap_mb": 0.012, **options})
    for number in range(steps):
        run.step(number)
    return run


def _names(rank):
    run = _trained()
    saved = run.state.state_dict(run.ddp)
    assert saved["own"].keys() == dict(Net().named_parameters()).keys()
    compiled = torch.compile(run.ddp.module)  # nothing is compiled before it is called
    for model in (run.ddp.module, torch.compile(run.ddp), compiled, None):
        assert same_bits(saved["own"], run.state.state_dict(model)["own"])
    part = Net()
    part.layers[1] = torch.compile(part.layers[1])
    for model in (DistributedDataParallel(Net()), Net(), DistributedDataParallel(torch.compile(Net())), part):
        state = BOTH()
        state.load_state_dict(saved, model)
        again = state.state_dict(model)
        assert same_bits(saved["own"], again["own"])
        assert [row["parameters"] for row in again["buckets"]] == [
            row["parameters"] for row in saved["buckets"]
        ]
        assert again["steps"] == 3
    with pytest.raises(ValueError, match=r"a parameter of shape|a parameter 'layers\.\d\.\w+', which the"):
        run.state.state_dict(Net())
    smaller = copy.copy(run.ddp.module)
    smaller._modules = {name: module for name, module in smaller._modules.items() if name != "norm"}
    with pytest.raises(
        ValueError, match=r"residuals of a parameter 'norm\.weight', which the model does not"
    ):
        run.state.state_dict(smaller)
    fresh = BOTH()
    with pytest.raises(ValueError, match=r"state_dict\(\) needs the model .* bind\(ddp\)"):
        fresh.state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict\(\) needs the model"):
        fresh.load_state_dict(saved)
    with pytest.raises(TypeError, match="model must be a module, got int"):
        fresh.state_dict(3)
    with pytest.warns(UserWarning, match="pickles its options only"):
        pickled = pickle.loads(pickle.dumps(run.state))
    assert pickled.state_dict(run.ddp)["own"] == {}


def test_names_do_not_depend_on_wrappers():
    run_ranks(_names, 2)


def _checks(rank):
    run = _trained()
    saved = run.state.state_dict()
    before = copy.deepcopy(saved)

    def refused(match, change=None, make_state=BOTH, kind=ValueError, model=None):
        state = make_state()
        wrong = copy.deepcopy(saved) if change is None else change(copy.deepcopy(saved))
        with pytest.raises(kind, match=match):
            state.load_state_dict(wrong, model or run.ddp)
        assert state.feedback.residuals.own_of == {}
        if make_state is BOTH and model is None:
            with pytest.raises(kind, match=match):
                run.state.load_state_dict(wrong)

    def without(name):
        return lambda saved: {key: value for key, value in saved.items() if key != name}

    def with_own(value):
        return lambda saved: {**saved, "own": {**saved["own"], "norm.bias": value}}

    def with_row(**entries):
        return lambda saved: {**saved, "buckets": [{**saved["buckets"][0], **entries}, *saved["buckets"][1:]]}

    refused("version 1 of the format, and this release", lambda saved: {**saved, "version": 1})
    refused("version None", lambda saved: {})
    refused("what state_dict.. returned, got a list", lambda saved: [], kind=TypeError)
    refused(f"rank {1 - rank}, but here it is {rank}", lambda saved: {**saved, "rank": 1 - rank})
    refused("of world_size 5, but here it is 2", lambda saved: {**saved, "world_size": 5})
    refused("of error_feedback 'both', but here", make_state=state_maker(error_feedback="shard"))
    refused("of scatter", make_state=state_maker(error_feedback="both", block_size=64))
    refused("of exact_1d False, but here", make_state=state_maker(error_feedback="both", exact_1d=True))
    refused("of min_bytes 0, but here", make_state=state_maker(error_feedback="both", min_bytes=9))
    refused("of gather", make_state=state_maker(error_feedback="both", gather="bf16"))
    refused("of exact_1d None", without("exact_1d"))
    refused("not residuals that state_dict", without("own"))
    refused("not residuals that state_dict", without("steps"))
    refused("not residuals that state_dict", with_row(parameters=3))
    refused("a parameter 'norm.bias' of 36 values, 37 long here", with_own(torch.zeros(36)))
    refused("a parameter 'norm.bias' of -1 values", with_own(None))
    refused(
        "residual 'norm.bias' is not a tensor of floating-point numbers, but torch.int64",
        with_own(torch.zeros(37, dtype=torch.int64)),
    )
    refused("'norm.bias' must be flat", with_own(torch.zeros(37, 1)))
    refused("'norm.bias' must be flat", with_own(torch.zeros(37).to_sparse()))
    refused("'norm.bias' must be flat", with_own(torch.zeros(37, device="meta")))
    for value in (torch.nan, torch.inf, torch.finfo(torch.float32).max):  # the last rounds to infinity
        refused("'norm.bias' has values that are not finite", with_own(torch.full((37,), value)))
    refused("'shard' of bucket 0 have 3 values, here it takes 0", with_row(shard=torch.zeros(3)))
    refused("chunks of 77 values", with_row(chunk_values=77))
    refused(
        "belong to a hierarchical",
        with_row(own=torch.zeros(sum(n for _, n in saved["buckets"][0]["parameters"]))),
    )
    refused("bucket 1 has no parameters, or", lambda saved: {**saved, "buckets": saved["buckets"][:1] * 2})
    refused("'layers.0.weight' of 2257 values, not there", model=torch.nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2, 1))
    refused(
        "of state 'QuantizedAllreduceState', but", make_state=lambda: HierarchicalAllreduceState(mesh=mesh)
    )
    after = run.state.state_dict()
    assert same_bits(before["own"], after["own"]), "nothing was changed"
    run.step(3)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    run_ranks(_checks, 2)


def _of_release_0_5(rank):
    """A Linear(9, 7) on three ranks, after three steps with residuals in fp32."""
    ddp = DistributedDataParallel(torch.nn.Linear(9, 7))
    state = state_maker(error_feedback="both", block_size=32)()
    ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)
    gathered = None
    if rank == 0:
        path = Path(__file__).parent / "data" / "residuals_of_release_0.5.pt"
        gathered = torch.load(path, weights_only=True)
        assert gathered["ranks"][0]["own"]["weight"].dtype == torch.float32
    state.scatter_state_dict(gathered)
    loaded = state.gather_state_dict()
    if gathered is not None:
        assert [part.pop("levels") for part in loaded["ranks"]] == [None] * 3, "that release knew none"
        assert same_bits(loaded, _in_bf16(gathered)), "each value is rounded, and nothing else changes"
    ddp(torch.ones(2, 9)).sum().backward()
    after = state.state_dict()
    assert after["steps"] == 4
    assert after["buckets"][0]["shard"].dtype == torch.bfloat16


def _in_bf16(saved):
    if isinstance(saved, dict):
        return {name: _in_bf16(part) for name, part in saved.items()}
    if isinstance(saved, list):
        return [_in_bf16(part) for part in saved]
    return saved.bfloat16() if isinstance(saved, torch.Tensor) else saved


def test_residuals_in_fp32_of_an_older_release_are_rounded():
    run_ranks(_of_release_0_5, 3)


def _half_of_fp32(_):
    run = _trained()
    own = run.state.state_dict()["own"].values()
    assert sum(lost.nbytes for lost in own) == 2 * sum(lost.numel() for lost in own)
    kept = {id(part.residual): part.residual for part in run.state.feedback.residuals.own_of.values()}
    memory = [tensor.untyped_storage() for one in kept.values() for tensor in (one.last, one.next)]
    assert sum(part.nbytes() for part in memory) == 4 * sum(lost.numel() for lost in own)


def test_residuals_take_4_bytes_a_value_and_2_in_a_file():
    run_ranks(_half_of_fp32, 2)


def _complex_parameters(rank):
    dtype = complex_if_sent()
    if not dtype.is_complex:
        return False
    ddp = DistributedDataParallel(torch.nn.Linear(40, 30, dtype=dtype))
    state = BOTH()
    ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)
    for _ in range(3):
        ddp(torch.randn(3, 40, dtype=dtype)).abs().square().sum().backward()
    saved = state.state_dict()
    assert saved["own"]["weight"].numel() == 2 * 1200, "a complex number has two"
    assert saved["own"]["weight"].abs().max() > 0
    state.load_state_dict(saved)
    assert same_bits(saved["own"], state.state_dict()["own"])
    return True


def test_complex_parameters_have_residuals_twice_as_long():
    if not all(run_ranks(_complex_parameters, 2)):
        pytest.skip("Gloo does not broadcast complex parameters in this torch")


def _other_buckets(rank):
    """With another bucket cap, a rank's own residuals follow the parameters; those of shards cannot."""
    lines = Lines()
    run = _trained()
    assert lines.about("dropped the residuals of the shards") == 1, "of the one bucket of the first step"
    checkpoint = run.save()
    run.step(3)
    for cap in (0.02, 25, 0.006):
        again = resumed(checkpoint, BOTH, bucket_cap_mb=cap)
        again.step(3)
        assert torch.equal(run.weights(), again.weights()), "the first step is averaged in the saved buckets"
        after = again.state.state_dict()
        assert same_bits(run.state.state_dict()["own"], after["own"])
        lines.lines.clear()
        again.step(4)
        assert lines.about("dropped the residuals of the shards") == len(checkpoint["residuals"]["buckets"])
        assert again.state.state_dict()["own"].keys() == after["own"].keys()
        again.step(5)
        again.state.close()

    # In the same run, back to the checkpoint: like a run that was stopped there.
    first = {name: lost.clone() for name, lost in run.state.state_dict()["own"].items()}
    for number in (4, 5):
        run.step(number)
    run.ddp.module.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    run.state.load_state_dict(checkpoint["residuals"])
    run.step(3)
    assert same_bits(first, run.state.state_dict()["own"])


def test_own_residuals_follow_parameters_into_other_buckets():
    run_ranks(_other_buckets, 3)


def _not_in_saved_buckets(rank):
    """Gradients that do not fit the saved buckets are averaged in the actual ones; the log says so."""
    lines = Lines()
    text = "averaged in other buckets than the saved run's"
    run = _trained(use=True, find_unused_parameters=True)
    checkpoint = run.save()
    found = []
    # A missing parameter: frozen now, also with a static graph, where DDP waits at once.
    for options in ({}, {"static_graph": True}):

        class Frozen(Run):
            def __init__(self, *args, **options):
                forward = Net.__init__

                def frozen(net):
                    forward(net)
                    net.layers[2].weight.requires_grad_(requires_grad=False)

                Net.__init__ = frozen
                try:
                    super().__init__(*args, **options)
                finally:
                    Net.__init__ = forward

        again = Frozen(BOTH, weights=checkpoint["model"], bucket_cap_mb=0.012, **options)
        again.state.load_state_dict(checkpoint["residuals"])
        lines.lines.clear()
        for number in range(3, 6):
            again.step(number)
        found.append(lines.about(text) > 0)
        assert again.state.state_dict()["steps"] == 6
        same = again.weights()
        dist.broadcast(same, 0)
        assert torch.equal(same, again.weights())
    # Whole buckets that no rank uses do not arrive; the others are still those of the saved run.
    options = LEAVES_OUT_BUCKETS
    results = []
    run = _trained(use=lambda number: number < 3, **options)
    checkpoint = run.save()
    again = resumed(checkpoint, BOTH, use=lambda number: number < 3, bucket_cap_mb=0.012, **options)
    for number in range(3, 6):
        run.step(number)
        again.step(number)
        results.append(torch.equal(run.weights(), again.weights()))
    assert same_bits(run.state.state_dict()["own"], again.state.state_dict()["own"])
    return found, results


def test_missing_parameters_fall_back_in_the_same_way_on_all_ranks():
    for found, results in run_ranks(_not_in_saved_buckets, 2):
        assert found == [True, True]
        assert results == [True] * 3


def _bound(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[rank // 2]
    net = torch.nn.Linear(40, 40)
    if rank < 2:
        ddp = DistributedDataParallel(net, process_group=group)
        state = QuantizedAllreduceState(min_bytes=0, error_feedback="both")
        assert state.bind(ddp) is state
        assert state.process_group is group, "the model's"
        with pytest.raises(
            ValueError, match=r"averages over ranks \[0, 1, 2\], but the model over ranks \[0, 1\]"
        ):
            QuantizedAllreduceState(dist.group.WORLD).bind(ddp)
        for wrong in (net, torch.compile(net), None):
            with pytest.raises(TypeError, match=r"bind\(\) takes a DistributedDataParallel module"):
                state.bind(wrong)
        assert state.state_dict()["own"] == {}
        del ddp
        with pytest.raises(ValueError, match="whose model is gone now"):
            state.state_dict()
    whole = DistributedDataParallel(torch.nn.Linear(40, 40))
    mesh = init_device_mesh("cpu", (3, 1))
    grid = HierarchicalAllreduceState(mesh=mesh)
    assert grid.bind(whole) is grid
    if rank < 2:
        part = DistributedDataParallel(torch.nn.Linear(40, 40), process_group=group)
        with pytest.raises(ValueError, match=r"but the model over ranks \[0, 1\]"):
            HierarchicalAllreduceState(mesh=mesh).bind(part)


def test_a_bound_state_knows_its_model_and_its_group():
    run_ranks(_bound, 3)


def _gathers(rank):
    world_size = dist.get_world_size()
    run = _trained()
    for dst in (0, world_size - 1):
        gathered = run.state.gather_state_dict(dst=dst)
        assert (gathered is not None) == (rank == dst)
        if gathered is not None:
            file = io.BytesIO()
            torch.save(gathered, file)
            file.seek(0)
            gathered = torch.load(file, weights_only=True)
            assert [part["rank"] for part in gathered["ranks"]] == list(range(world_size))
        mine = run.state.state_dict()
        again = BOTH()
        other = DistributedDataParallel(Net())
        again.scatter_state_dict(gathered, other, src=dst)
        loaded = again.state_dict(other)
        assert same_bits(mine["own"], loaded["own"])
        assert loaded["buckets"][0]["parameters"] == mine["buckets"][0]["parameters"]

    whole = run.state.gather_state_dict(run.ddp)
    before = run.state.state_dict()

    def all_raise(call, kind, match, on):
        """``kind`` is raised where the problem is, and elsewhere an error that says why; nothing changes."""
        with pytest.raises((kind, TensorMismatchError), match=match) as caught:
            call()
        assert isinstance(caught.value, kind) == (rank in on), caught.value
        assert same_bits(before["own"], run.state.state_dict()["own"])

    everyone = range(world_size)
    scatter = run.state.scatter_state_dict
    all_raise(lambda: scatter(None), TypeError, "got a NoneType", [0])
    all_raise(lambda: scatter({}), ValueError, "not gathered residuals", [0])
    fewer = None if whole is None else {**whole, "ranks": whole["ranks"][:-1]}
    all_raise(lambda: scatter(fewer), ValueError, f"of {world_size - 1} ranks, but the group has", [0])
    all_raise(lambda: scatter(whole, src=7), ValueError, "src must be one of the group's ranks", everyone)
    broken = None
    if whole is not None:
        broken = copy.deepcopy(whole)
        broken["ranks"][1]["own"]["norm.bias"] = torch.zeros(1)
    all_raise(lambda: scatter(broken), ValueError, "a parameter 'norm.bias' of 1 values", [1])
    all_raise(lambda: run.state.gather_state_dict(dst=-1), ValueError, "dst must be", everyone)
    model = Net() if rank == 1 else None
    all_raise(lambda: run.state.gather_state_dict(model), ValueError, "there are residuals of a param", [1])
    with pytest.raises(TensorMismatchError, match=r"gather_state_dict\(dst=0\).*gather_state_dict\(dst=1\)"):
        run.state.gather_state_dict(dst=min(rank, 1))
    scatter(whole)
    run.step(3)
    assert run.state.state_dict()["steps"] == 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_gathers_the_residuals_of_all(world_size):
    run_ranks(_gathers, world_size)


def _channels_last(rank):
    """Residuals follow the elements of a weight, not their places in memory."""
    saved, weights = {}, {}
    for name, order in (("rows", torch.contiguous_format), ("channels", torch.channels_last)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Conv2d(4, 6, 3, bias=False).to(memory_format=order))
        state = QuantizedAllreduceState(bits=4, min_bytes=0).bind(ddp)
        ddp.register_comm_hook(state, quantized_allreduce_hook)
        if saved:
            with torch.device("meta"):  # torch's default device must not matter
                state.load_state_dict(saved["rows"])
        else:
            ddp(torch.randn(2, 4, 5, 5) + rank).square().mean().backward()
        saved[name] = state.state_dict()
        lost = saved[name]["own"]["weight"]
        weights[name] = lost.as_strided((6, 4, 3, 3), ddp.module.weight.stride())
        assert lost.abs().max() > 0
    return torch.equal(weights["rows"], weights["channels"])


def test_a_weight_may_be_channels_last_where_residuals_are_loaded():
    assert run_ranks(_channels_last, 2) == [True, True]
