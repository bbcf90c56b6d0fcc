"""Frameworks beside hooks and overlapped steps: the programs of docs/frameworks.md run, and bits stay."""

import ast
import functools
import os

import pytest
import torch
import torch.distributed as dist
from frameworks import FRAMEWORKS, ON_GPUS, PAGE, launch, needs, program, recipe, source
from trainings import assert_same_bits

from ddp_optim_overlap import ConfigError
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils import AgreementError
from dist_utils.testing import nccl_can_run, same_bits, same_on_all_ranks

FEEDBACK = {"error_feedback": "both", "min_bytes": 0}
NOT_QUANTIZED = {"min_bytes": 2**30}
ON_TWO_NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

each_framework = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in FRAMEWORKS]
)


def _overlap(name, run):
    """Compare a run with the framework's own; return the parameters."""
    train = FRAMEWORKS[name].make().train
    own, instead = FRAMEWORKS[name].runs[run]
    expected = train(options=own)
    found = train("Overlapped", {} if instead else own, instead)
    assert_same_bits(found.parameters, expected.parameters)
    assert found.norms == expected.norms
    return expected.parameters


@functools.cache
def _parameters(name, run):
    return launch(_overlap, name, run)[0]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(name, run, marks=needs(name))
        for name, framework in FRAMEWORKS.items()
        for run in framework.runs
    ],
)
def test_an_overlapped_run_has_the_bits_of_the_frameworks_own(name, run):
    # What has no effect would be no comparison.
    assert same_bits(_parameters(name, run), _parameters(name, "plain")) == (run == "plain")


def _assert_a_quarter(sent):
    assert 0 < 4 * sent.bytes_sent < 1.1 * sent.bytes_of_allreduce


def _quantize(name):
    framework = FRAMEWORKS[name]
    train = framework.make().train
    whole = train("QuantizedGradients", ours=FEEDBACK)
    for how in ("QuantizedGradients", "QuantizedAndOverlapped"):
        again = train(how, ours=FEEDBACK)
        assert_same_bits(again.parameters, whole.parameters)
        _assert_a_quarter(again.statistics)
        train(how, ours=FEEDBACK, saves=how)
        dist.barrier()
        resumed = train(how, ours=FEEDBACK, resumes=how)
        if framework.resumes_bitwise:
            assert_same_bits(resumed.parameters, whole.parameters)


@each_framework
def test_quantized_gradients_take_a_quarter_of_the_bytes_and_resume(name):
    launch(_quantize, name)


def _clip(name):
    framework = FRAMEWORKS[name]
    train = framework.make().train
    with pytest.raises(ConfigError, match="pass clip= to overlap_optimizer"):
        train("Overlapped", framework.clips_by_norm)
    own = train(options=framework.clips_by_norm)
    assert not same_bits(own, train())
    beside = train("QuantizedGradients", framework.clips_by_norm, NOT_QUANTIZED)
    assert beside.statistics.plain_buckets > 0
    assert_same_bits(beside.parameters, own.parameters)


@each_framework
def test_clipping_by_the_norm_works_beside_the_hook_and_is_refused_beside_the_overlap(name):
    launch(_clip, name)


def _ignore_hook():
    """Pass the hook to the strategy, which ignores it on CPUs; bind the state once there is a module."""
    lightning = FRAMEWORKS["Lightning"].make()
    state = QuantizedAllreduceState(min_bytes=0)

    class Bind(lightning.program["L"].Callback):
        def on_fit_start(self, trainer, pl_module):
            state.bind(trainer.strategy.model)

    strategy = {"ddp_comm_state": state, "ddp_comm_hook": quantized_allreduce_hook}
    with pytest.warns(UserWarning, match="has got no bucket"):
        lightning.train(strategy=strategy, callback=Bind())
    assert state.statistics.bytes_sent == 0


@needs("Lightning")
def test_a_hook_that_lightning_ignores_warns():
    launch(_ignore_hook)


def _compare_ranks(name):
    """Train with the page's callback that compares the ranks; then let a rank drift before its third call."""
    framework = FRAMEWORKS[name].make()
    same = recipe(framework.program, framework.recipe_base)
    framework.train(callback=same())
    calls = []

    class Drifts(same):
        pass

    def drift(self, *given, **named):
        calls.append(named or given)
        if len(calls) == 3 and dist.get_rank() == 1:
            model = named.get("model") or given[1]
            next(model.parameters()).data.view(-1)[0] += 1.0
        getattr(same, framework.end_of_step)(self, *given, **named)

    setattr(Drifts, framework.end_of_step, drift)
    with pytest.raises(AgreementError, match="ranks hold different values at step 3, first:\n  model"):
        framework.train(callback=Drifts())
    return len(calls)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=needs(one)) for one in ("Lightning", "Transformers")]
)
def test_the_pages_callback_notices_a_rank_that_drifts(name):
    assert launch(_compare_ranks, name) == [3, 3]


def _main(title, *, on_gpus=False):
    found = program(title, on_gpus=on_gpus)
    _assert_a_quarter(found["main"]())
    parameters = list(found["net"].parameters())
    assert same_on_all_ranks(parameters)
    return parameters[0].device.type, dist.get_backend()


@each_framework
def test_the_program_runs(name):
    assert [device for device, _ in launch(_main, name)] == ["cpu", "cpu"]


def _on_own_gpu(title):
    rank = os.environ["RANK"]
    os.environ["GROUP_RANK"] = rank
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(rank) % count]
    return _main(title, on_gpus=True)


@pytest.mark.gpu
@each_framework
def test_the_program_runs_on_two_nodes_with_a_gpu(name):
    if not nccl_can_run(2):
        pytest.skip("NCCL needs a GPU for each of 2 ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    for device, backend in launch(_on_own_gpu, name, environ=ON_TWO_NODES):
        assert "nccl" in backend
        assert device == ("cpu" if name == "Lightning" else "cuda")  # Lightning moves models back


@pytest.mark.parametrize("name", ON_GPUS)
def test_what_differs_on_gpus_is_on_the_page_and_in_the_program(name):
    text = PAGE.read_text()
    assert [old for old in ON_GPUS[name] if old.strip(" ,") not in text] == []
    ast.parse(source(name, on_gpus=True))
