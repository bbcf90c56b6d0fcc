"""Steps with gradients that came in no bucket raise; see also integration_tests/averaging_cases.py."""

import copy
import gc
import pickle
import sys
import threading
import time
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from dist_utils.comm_hooks import BucketWatch, UnaveragedGradientsError, completed_future
from dist_utils.testing import run_ranks


class _Net(torch.nn.Module):
    """Three layers, checkpointed reentrantly on request."""

    def __init__(self, layers=3, *, reentrant=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


class _State:
    """What is registered as the state of a hook."""


def _hook(watch):
    def hook(state: _State, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        watch.bucket_came()
        return completed_future(bucket.buffer())

    return hook


def _steps(forward, module, count=3):
    """Step; return what each step was told."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(count):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                forward(torch.ones(2, 4, requires_grad=True)).sum().backward()
                optimizer.step()
            except UnaveragedGradientsError as error:
                found.append(f"error: {error}")
            else:
                found.append("".join(str(one.message) for one in caught if "bucket" in str(one.message)))
    return found


def _model(**options):
    """Return a model whose hook and watch belong together."""
    ddp, state = DistributedDataParallel(_Net(**options)), _State()
    watch = BucketWatch(ddp, "MyState", state)
    ddp.register_comm_hook(state, _hook(watch))
    return ddp, watch


def _watched(_):
    found = {}
    ddp = DistributedDataParallel(_Net())
    BucketWatch(ddp, "MyState")
    with ddp.no_sync():
        found["no_sync"] = _steps(ddp, ddp)
    copy.deepcopy(ddp.module)
    pickle.dumps(ddp.module)
    found["not registered"] = _steps(ddp, ddp)

    ddp, _watch = _model()
    found["in use"] = _steps(ddp, ddp)
    found["no bucket"] = _steps(ddp.module, ddp)
    found["in use again"] = _steps(ddp, ddp)
    ddp, _watch = _model(reentrant=True)
    found["reentrant"] = _steps(ddp, ddp)

    ddp, watch = _model()
    found["from the start"] = _steps(ddp.module, ddp)
    watch.end()
    found["ended"] = _steps(ddp.module, ddp)

    ddp, _watch = _model()
    later = DistributedDataParallel(ddp.module)
    BucketWatch(later, "Later")
    found["a later model's"] = _steps(later, later)

    ddp, _watch = _model()
    later = DistributedDataParallel(ddp.module)
    _later_watch = BucketWatch(later, "Later")
    found["an earlier model's"] = _steps(ddp, ddp)

    ddp, _watch = _model()
    module = ddp.module
    del ddp, _watch
    found["model gone"] = _steps(module, module)

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        without_buckets = DistributedDataParallel(_Net())
    BucketWatch(without_buckets, "MyState")
    found["Python reducer"] = _steps(without_buckets, without_buckets)
    return found


def test_a_step_without_a_bucket_is_an_error_or_warns_once_about_a_hook_that_is_not_in_use():
    for found in run_ranks(_watched, 2):
        for unregistered, state in (("not registered", "MyState"), ("a later model's", "Later")):
            warning, *after = found.pop(unregistered)
            assert after == ["", ""]
            assert f"the communication hook of the {state}" in warning
            assert "register_comm_hook(state, hook)" in warning
        for told in ("no bucket", "from the start"):
            for error in found.pop(told):
                assert error.startswith(
                    "error: an optimizer was to step with gradients that were not averaged"
                )
                assert (
                    "'layers.0.weight', 'layers.0.bias', 'layers.1.weight' and 3 more (and perhaps" in error
                )
        quiet = (
            *("no_sync", "in use", "in use again", "reentrant", "ended", "model gone"),
            "Python reducer",
            "an earlier model's",
        )
        assert found == dict.fromkeys(quiet, [""] * 3)


def _alone(_):
    ddp, _watch = _model()
    return _steps(ddp.module, ddp)


def test_a_single_rank_has_nothing_to_average():
    assert run_ranks(_alone, 1) == [[""] * 3]


def _large(_):
    """One layer of a large model is noticed, and the model is not kept."""
    ddp, _watch = _model(layers=1000)
    told = _steps(ddp.module.layers[777], ddp, 1)
    held = weakref.ref(ddp)
    del ddp, _watch
    gc.collect()
    assert "given some to 'layers.777.weight', 'layers.777.bias' (and perhaps" in told[0]
    assert held() is None


class _OfModel(torch.optim.SGD):
    """Gives its closure arguments, and takes a model."""

    def step(self, closure, model):
        assert isinstance(model, torch.nn.Module)
        closure(model)
        super().step()


def _closures(_):
    """Closures are looked at before the step that follows them; other arguments arrive as they were."""
    ddp, _watch = _model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [one.clone() for one in ddp.parameters()]
    seen = []
    handle = register_optimizer_step_post_hook(lambda _, args, kwargs: seen.append((len(args), list(kwargs))))

    def closure(forward=ddp.module):
        loss = forward(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with pytest.raises(UnaveragedGradientsError) as caught:
            step()
        assert caught.value.parameters == tuple(
            f"layers.{number}.{name}" for number in range(3) for name in ("weight", "bias")
        )
        optimizer.zero_grad()
    with pytest.raises(UnaveragedGradientsError):
        _OfModel(ddp.parameters(), lr=0.1).step(closure, ddp.module)
    optimizer.zero_grad()
    assert all(map(torch.equal, before, ddp.parameters()))
    _OfModel(ddp.parameters(), lr=0.1).step(closure, ddp)
    seen.clear()
    loss = optimizer.step(lambda: closure(ddp))
    optimizer.step(closure=lambda: closure(ddp))
    handle.remove()
    assert isinstance(loss, torch.Tensor)
    assert seen == [(2, []), (1, ["closure"])]


class _Task(torch.nn.Module):
    """A layer of its own behind one that other tasks have, too."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.shared(x))


def _shared(_):
    """Models with a common layer are averaged by turns."""
    shared = torch.nn.Linear(4, 4)
    models, watches = [], []
    for name in ("One", "Two"):
        ddp, state = DistributedDataParallel(_Task(shared)), _State()
        watches.append(BucketWatch(ddp, name, state))
        ddp.register_comm_hook(state, _hook(watches[-1]))
        models.append(ddp)
    both = torch.nn.ModuleList(models)
    for ddp in models:
        assert _steps(ddp, both) == [""] * 3
        (told,) = _steps(ddp.module, both, 1)
        assert "'shared.weight'" in told


def _in_two_threads(rank):
    """Each rank steps one model late, while the other waits in its next pass for the late rank."""
    next_pass, errors = threading.Event(), []

    def train(number, group):
        late = number != rank
        ddp, state = DistributedDataParallel(_Net(), process_group=group), _State()
        watch = BucketWatch(ddp, "MyState", state)

        def hook(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            watch.bucket_came()
            if not late and number_of_pass == 2:
                next_pass.set()
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number_of_pass in range(3):  # in the second one DDP makes its final buckets
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            if late and number_of_pass == 1:
                assert next_pass.wait(20)
                time.sleep(0.2)  # until it waits for its average
            optimizer.step()

    def run(number, group):
        try:
            train(number, group)
        except BaseException as error:  # noqa: BLE001 - of another thread
            errors.append(error)

    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(groups)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return errors


def test_a_step_does_not_wait_for_a_pass_of_another_model_in_another_thread():
    assert run_ranks(_in_two_threads, 2) == [[], []]


def _bound_meanwhile(_):
    """One thread binds models and lets them go, while another one goes on with its own."""
    group, problems = dist.new_group([0, 1]), []
    mine, over = [_model() for _ in range(3)], threading.Event()
    (ddp, watch), *_ = mine

    def bind_others():
        try:
            for _ in range(30):
                others = [DistributedDataParallel(_Net(), process_group=group) for _ in range(3)]
                bound = [BucketWatch(ddp, "Other") for ddp in others]
                del bound, others
                gc.collect()
        except Exception as error:  # noqa: BLE001 - whatever it is
            problems.append(repr(error))
        finally:
            over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=bind_others)
    thread.start()
    try:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        while not over.is_set():
            watch.bucket_came()
            optimizer.step()
    except Exception as error:  # noqa: BLE001 - whatever it is
        problems.append(repr(error))
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    return problems


def test_a_thread_may_bind_models_while_another_one_trains():
    assert run_ranks(_bound_meanwhile, 2) == [[], []]


def _sparse(_):
    """Sparse gradients are looked at."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True), torch.nn.Linear(4, 4))
    ddp = DistributedDataParallel(net)
    watch = BucketWatch(ddp, "MyState")
    watch.bucket_came()
    net(torch.tensor([1, 2])).sum().backward()
    torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1).step()  # of another model
    with pytest.raises(UnaveragedGradientsError) as caught:
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    assert caught.value.parameters == ("0.weight", "1.weight", "1.bias")


def _unused_and_dropped(_):
    """Neither hooks that know their nodes keep a model, nor does its watch."""
    ddp, state = DistributedDataParallel(_Net(), find_unused_parameters=True), _State()
    watch = BucketWatch(ddp, "MyState", state)
    ddp.register_comm_hook(state, _hook(watch))
    assert _steps(ddp, ddp) == [""] * 3
    held = [weakref.ref(ddp), *map(weakref.ref, ddp.parameters())]
    del ddp
    gc.collect()
    assert [one() for one in held] == [None] * 7


def _zeros_outside(_):
    """A layer that was trained before it was frozen may have kept zeros."""
    net = _Net()
    net.layers[0].requires_grad_(False)
    for parameter in net.layers[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    ddp, state = DistributedDataParallel(net), _State()
    watch = BucketWatch(ddp, "MyState", state)
    ddp.register_comm_hook(state, _hook(watch))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    net.layers[0].bias.grad[1] = 1
    with pytest.raises(UnaveragedGradientsError) as caught:
        optimizer.step()
    assert caught.value.parameters == ("layers.0.bias",)


def _steps_of_two_ranks(rank):
    for check in (_large, _closures, _shared, _sparse, _unused_and_dropped, _zeros_outside):
        check(rank)


def test_gradients_of_any_kind_of_model_are_looked_at_before_a_step_and_no_model_is_kept():
    run_ranks(_steps_of_two_ranks, 2)
