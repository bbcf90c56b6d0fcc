"""Residuals in files: found by name, checked before anything changes, gathered for one rank's checkpoint."""

import copy
import gc
import io
import logging
import multiprocessing
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from quant_buckets import flat_residuals
from resumed_runs import Net, Run, complex_if_sent, resumed, state_maker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import HierarchicalAllreduceState, QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.feedback import checkpoint
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
        assert same_bits(saved, run.state.state_dict(model))
    part = Net()
    part.layers[1] = torch.compile(part.layers[1])
    for model in (DistributedDataParallel(Net()), Net(), DistributedDataParallel(torch.compile(Net())), part):
        state = BOTH()
        state.load_state_dict(saved, model)
        assert same_bits(saved, state.state_dict(model))
    with pytest.raises(ValueError, match=r"a parameter 'layers\.\d\.\w+', which the"):
        run.state.state_dict(Net())
    smaller = copy.copy(run.ddp.module)
    smaller._modules = {name: module for name, module in smaller._modules.items() if name != "norm"}
    with pytest.raises(
        ValueError, match=r"residuals of a parameter 'norm\.weight', which the model does not"
    ):
        run.state.state_dict(smaller)
    fresh = BOTH()
    assert fresh.state_dict()["lengths"] == {}, "there is nothing to save yet"
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
        assert state.state_dict(run.ddp)["own"] == {}
        if make_state is BOTH and model is None:
            with pytest.raises(kind, match=match):
                run.state.load_state_dict(wrong)

    def without(name):
        return lambda saved: {key: value for key, value in saved.items() if key != name}

    def with_own(values):
        return lambda saved: {**saved, "own": {**saved["own"], "norm.bias": [(0, 0, values)]}}

    def with_one(entry, value):
        return lambda saved: {**saved, entry: {**saved[entry], "layers.0.weight": value}}

    refused("version 2 of the format, and this release", lambda saved: {**saved, "version": 2})
    refused("version None", lambda saved: {})
    refused("what state_dict.. returned, got a list", lambda saved: [], kind=TypeError)
    refused(f"rank {1 - rank}, but here it is {rank}", lambda saved: {**saved, "rank": 1 - rank})
    refused("of world_size 5, but here it is 2", lambda saved: {**saved, "world_size": 5})
    refused("of error_feedback 'both', but here", make_state=state_maker(error_feedback="shard"))
    refused("of scatter", make_state=state_maker(error_feedback="both", block_size=64))
    refused("of exact_1d False, but here", make_state=state_maker(error_feedback="both", exact_1d=True))
    refused("of min_bytes 0, but here", make_state=state_maker(error_feedback="both", min_bytes=9))
    refused("of gather", make_state=state_maker(error_feedback="both", gather="fp16"))
    refused("of exact_1d None", without("exact_1d"))
    for entry in ("own", "steps", "lengths"):
        refused("not residuals that state_dict", without(entry))
    refused("a parameter 'layers.0.weight' of 36 values, 2257 long here", with_one("lengths", 36))
    refused("another memory format: with strides", with_one("strides", (1, 61)))
    for value in (torch.nan, torch.inf, torch.finfo(torch.float32).max):  # the last rounds to infinity
        refused("'norm.bias' has values that are not finite", with_own(torch.full((37,), value)))
    refused("'.*' of .* values, not there", model=torch.nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2, 1))
    refused(
        "of state 'QuantizedAllreduceState', but", make_state=lambda: HierarchicalAllreduceState(mesh=mesh)
    )
    assert same_bits(before, run.state.state_dict()), "nothing was changed"
    run.step(3)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    run_ranks(_checks, 2)


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
    assert flat_residuals(saved)["weight"].numel() == 2 * 1200, "a complex number has two"
    assert flat_residuals(saved)["weight"].abs().max() > 0
    state.load_state_dict(saved)
    assert same_bits(saved, state.state_dict())
    return True


def test_complex_parameters_have_residuals_twice_as_long():
    if not all(run_ranks(_complex_parameters, 2)):
        pytest.skip("Gloo does not broadcast complex parameters in this torch")


def _positions(saved, kind):
    """Return each value's residual by parameter and position."""
    return {
        (name, start + number, weight): value
        for name, pieces in saved[kind].items()
        for start, weight, values in pieces
        for number, value in enumerate(values.tolist())
    }


def _other_buckets(rank):
    """Whatever buckets come: each residual stays with its value or is dropped, none goes astray."""
    lines, text = Lines(), "dropped the residuals of"
    run = _trained(steps=4)
    assert lines.about(text) == 1, "of the buckets of the first step"
    checkpoint = run.save()
    saved = checkpoint["residuals"]
    for cap in (0.02, 25, 0.006):
        again = resumed(checkpoint, BOTH, bucket_cap_mb=cap)
        assert same_bits(saved, again.state.state_dict())
        lines.lines.clear()
        again.backward(3)
        again.state.discard_step()
        kept = again.state.state_dict()
        assert same_bits(flat_residuals(saved), flat_residuals(kept))
        before, after = _positions(saved, "shard"), _positions(kept, "shard")
        assert before != after
        assert all(value == before.get(place, 0.0) for place, value in after.items())
        assert any(value and place in before for place, value in after.items())
        again.optimizer.zero_grad()
        again.step(3)
        assert lines.about(text) == 1, "one line for all buckets"
        again.state.close()
    # Loaded before the first pass, they are used as well, in the buckets of that pass.
    early = Run(BOTH, bucket_cap_mb=0.012)
    early.state.load_state_dict(saved)
    early.backward(3)
    early.state.discard_step()
    assert same_bits(flat_residuals(saved), flat_residuals(early.state.state_dict()))


def test_residuals_follow_values_into_other_buckets():
    run_ranks(_other_buckets, 3)


def _levels(rank):
    """Residuals of the means of a row and of all ranks are of one value, and never mixed up."""

    def make():
        return QuantizedAllreduceState(min_bytes=0, error_feedback="both", levels=(2, 2))

    run = _trained(make, steps=4)
    checkpoint = run.save()
    of_means = checkpoint["residuals"]["shard"].values()
    assert {weight for pieces in of_means for _, weight, _ in pieces} == {0.5, 1.0}
    again = resumed(checkpoint, make, bucket_cap_mb=0.012)
    for number in (4, 5):
        run.step(number)
        again.step(number)
    return torch.equal(run.weights(), again.weights())


def test_residuals_of_levels_are_kept_apart():
    assert all(run_ranks(_levels, 4, timeout=90))


def _loaded_tensors_are_freed(_):
    run = _trained(steps=2)
    saved = run.save()["residuals"]
    tensors = [weakref.ref(values) for pieces in saved["own"].values() for _, _, values in pieces]
    run.state.load_state_dict(saved)
    del saved
    gc.collect()
    return sum(one() is not None for one in tensors)


def test_a_state_does_not_keep_the_tensors_of_a_file():
    assert run_ranks(_loaded_tensors_are_freed, 2) == [0, 0]


def _write(state, connection):
    try:
        connection.send(len(state.state_dict()["own"]))
    except RuntimeError as error:
        connection.send(str(error))


def _forked(rank):
    """A child process has no thread of the state's: it saves what is there, and never waits for it."""
    run = _trained(steps=2)
    said = []
    for busy in (False, True):
        if busy:
            run.state.worker.submit(lambda _: time.sleep(3))
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_write, args=(run.state, there))
        child.start()
        said.append(here.recv() if here.poll(30) else "nothing")
        child.kill()
        child.join()
    run.state.wait()
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_saves_residuals_or_says_why_not():
    for idle, busy in run_ranks(_forked, 2):
        assert idle == len(list(Net().parameters()))
        assert "this process was forked while jobs" in busy


def _initialized_again(rank):
    run = _trained(steps=1)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    for call in (run.state.state_dict, run.state.gather_state_dict, lambda: run.step(1)):
        with pytest.raises((ValueError, RuntimeError), match="was destroyed: whatever was made for it"):
            call()


def test_a_bound_state_says_that_its_group_was_destroyed():
    run_ranks(_initialized_again, 2)


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
            with pytest.raises(TypeError, match="must be a DistributedDataParallel module"):
                state.bind(wrong)
        assert state.state_dict()["own"] == {}
        ddp.register_comm_hook(state, quantized_allreduce_hook)
        ddp(torch.ones(1, 40)).sum().backward()
        assert state.state_dict()["own"].keys() == {"weight", "bias"}
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


def _two_models(rank):
    """Models with the same parameters, which rank 1 uses in the other order."""
    runs = [Run(BOTH) for _ in range(2)]
    order = runs if rank == 0 else runs[::-1]
    with pytest.raises(RuntimeError, match=r"number of the bound state is 1 on rank 0, 2 on rank 1"):
        sum(run.ddp(torch.ones(2, 37), use=True).sum() for run in order[::-1]).backward()


def _other_names(rank):
    net = torch.nn.Sequential()
    net.add_module(f"of rank {rank}", torch.nn.Linear(40, 40))
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(BOTH().bind(ddp), quantized_allreduce_hook)
    with pytest.raises(RuntimeError, match="parameters of the bound model"):
        ddp(torch.ones(2, 40)).sum().backward()


def test_states_of_other_models_are_refused():
    run_ranks(_two_models, 2)
    run_ranks(_other_names, 2)


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
        assert same_bits(mine, loaded)

    whole = run.state.gather_state_dict(run.ddp)
    before = run.state.state_dict()

    def all_raise(call, kind, match, on):
        """``kind`` is raised where the problem is, and elsewhere an error that says why; nothing changes."""
        with pytest.raises((kind, TensorMismatchError), match=match) as caught:
            call()
        assert isinstance(caught.value, kind) == (rank in on), caught.value
        assert same_bits(before, run.state.state_dict())

    everyone = range(world_size)
    scatter = run.state.scatter_state_dict
    all_raise(lambda: scatter(None), TypeError, "got a NoneType", [0])
    all_raise(lambda: scatter({}), ValueError, "not gathered residuals", [0])
    fewer = None if whole is None else {**whole, "ranks": whole["ranks"][:-1]}
    all_raise(lambda: scatter(fewer), ValueError, f"of {world_size - 1} ranks, but the group has", [0])
    all_raise(lambda: scatter(whole, src=7), ValueError, "rank 7 is not a member of", everyone)
    broken = None
    if whole is not None:
        broken = copy.deepcopy(whole)
        broken["ranks"][1]["lengths"]["norm.bias"] = 1
    all_raise(lambda: scatter(broken), ValueError, "a parameter 'norm.bias' of 1 values", [1])
    all_raise(lambda: run.state.gather_state_dict(dst=-1), ValueError, "rank -1 is not a member of", everyone)
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


def test_files_of_more_than_2_gib_are_read_whole():
    size = (1 << 31) + 8
    assert len(memoryview(checkpoint._bytes_of(torch.empty(size, dtype=torch.uint8)))) == size
