"""Steps are observed: one that did not happen changes no residual, one that happened is counted once."""

import gc
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from quant_buckets import LEAVES_OUT_BUCKETS, flat_residuals, make_state
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import kernels, quantized_allreduce_hook
from dist_utils.testing import call_in_backward, run_ranks, same_bits


def _wrap(net, state, **options):
    ddp = DistributedDataParallel(net, **options)
    ddp.register_comm_hook(state.bind(ddp), quantized_allreduce_hook)
    return ddp


def _data(number, size, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, size, generator=torch.Generator().manual_seed(1000 * number + rank))


def _own(state):
    return flat_residuals(state.state_dict())


class Branches(torch.nn.Module):
    """A trunk and two heads, some of which a step uses."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(90, 90)
        self.b = torch.nn.Linear(90, 90)
        self.left = torch.nn.Linear(90, 90)
        self.right = torch.nn.Linear(90, 90)

    def forward(self, x, heads):
        x = self.b(self.a(x))
        for head in heads:
            x = getattr(self, head)(x)
        return x


def _branches(rank):
    """Train with heads that no rank uses in some steps; DDP leaves their buckets out."""
    torch.manual_seed(0)
    plans = {
        "never again": lambda number: ("left", "right") if number < 3 else (),
        "in turns": lambda number: ("left",) if number % 2 else ("right",),
        "now and then": lambda number: ("left",) if number % 5 == 0 else (),
    }
    errors = {}
    for name, plan in plans.items():
        net, state = Branches(), make_state("int4", error_feedback="both")
        reference = Branches()
        reference.load_state_dict(net.state_dict())
        ddp = _wrap(net, state, bucket_cap_mb=0.03, **LEAVES_OUT_BUCKETS)
        sums = {key: torch.zeros_like(value) for key, value in net.named_parameters()}
        exact = {key: torch.zeros_like(value) for key, value in net.named_parameters()}
        largest = dict.fromkeys(sums, 0.0)
        steps = 60
        for number in range(steps):
            ddp(_data(number, 90), plan(number)).square().mean().backward()
            for peer in range(dist.get_world_size()):
                reference(_data(number, 90, peer), plan(number)).square().mean().backward()
            for key, value in net.named_parameters():
                other = reference.get_parameter(key)
                if other.grad is not None:
                    mean = other.grad / dist.get_world_size()
                    exact[key] += mean
                    largest[key] = max(largest[key], mean.abs().max().item())
                    sums[key] += value.grad
                value.grad = other.grad = None
        # With 4 bits, half a step of a block is 1/14 of its largest value. With the residual, that is at most
        # 8/7 of the gradient's, and on a rank it can be several times the mean's. It is lost once on the rank
        # and, with three ranks, once in the mean.
        errors[name] = max(
            ((sums[key] - exact[key]).abs().max() / largest[key]).item() for key in sums if largest[key]
        )
        saved = state.state_dict()
        assert saved["steps"] == steps, name
        assert {key for key in sums if largest[key]} <= saved["own"].keys()
        state.close()
    return errors


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_feedback_does_not_rely_on_the_first_bucket(world_size):
    for errors in run_ranks(_branches, world_size, timeout=150):
        assert max(errors.values()) < 1, errors


def _raise_if_told(switch):
    if switch["raises"]:
        raise ArithmeticError("the user's own error")


class Layers(torch.nn.Module):
    def __init__(self, *, reentrant=False, dtypes=(torch.float32,) * 4):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(90, 90, dtype=dtype) for dtype in dtypes)
        self.switch = {"raises": False}
        self.reentrant = reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = x.to(layer.weight.dtype)
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
            if index == 1:
                x = call_in_backward(x, partial(_raise_if_told, self.switch))
        return x


def _raises(rank):
    torch.manual_seed(0)
    for feedback in ("both", "shard"):
        state = make_state("int8", error_feedback=feedback)
        net = Layers()
        ddp = _wrap(net, state, bucket_cap_mb=0.03)

        def step(number, ddp=ddp, net=net):
            ddp(_data(number, 90)).square().mean().backward()
            net.zero_grad()

        for number in range(4):
            step(number)
        before = state.state_dict()
        real = kernels.encode_shards

        def slow(*arguments, real=real, **options):
            time.sleep(0.2)  # the worker is still busy when backward() has raised
            real(*arguments, **options)

        kernels.encode_shards = slow
        net.switch["raises"] = True
        try:
            with pytest.raises(ArithmeticError, match="the user's own error"):
                step(9)
        finally:
            kernels.encode_shards = real
            inside = state.state_dict()
        state.wait()
        for after in (inside, state.state_dict()):
            assert same_bits(before, after)
        # The next pass begins from there, whatever the dead one still does. DDP itself cannot go on.
        net.switch["raises"] = False
        del ddp, step
        gc.collect()
        net.zero_grad()
        again = _wrap(net, state, bucket_cap_mb=0.03)
        twin = make_state("int8", error_feedback=feedback)
        other = Layers()
        other.load_state_dict(net.state_dict())
        fresh = _wrap(other, twin, bucket_cap_mb=0.03)
        twin.load_state_dict(before)
        for number in range(10, 13):
            for model in (again, fresh):
                model(_data(number, 90)).square().mean().backward()
            for left, right in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.equal(left.grad, right.grad)
            again.zero_grad()
            fresh.zero_grad()
        assert state.state_dict()["steps"] == 7
        state.close()
        twin.close()


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_backward_that_raises_leaves_residuals_and_may_be_saved_at_once(world_size):
    run_ranks(_raises, world_size, timeout=90)


def _raises_in_new_buckets(rank):
    """The failed pass is the first in rebuilt buckets: a rank's own residuals are those from before it."""
    torch.manual_seed(0)
    net, state = Layers(), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    ddp(_data(0, 90)).square().mean().backward()
    before = _own(state)
    net.switch["raises"] = True
    with pytest.raises(ArithmeticError):
        ddp(_data(1, 90)).square().mean().backward()
    net.switch["raises"] = False
    for _ in range(2):
        assert same_bits(before, _own(state))
    # A new DDP begins with the old buckets, and finds what belongs to the parameters.
    del ddp
    gc.collect()
    net.zero_grad()
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    ddp(_data(2, 90)).square().mean().backward()
    state.discard_step()
    assert same_bits(before, _own(state))


def test_a_pass_that_raises_in_new_buckets_leaves_own_residuals():
    run_ranks(_raises_in_new_buckets, 3)


def _raises_where_buckets_are_left_out(rank):
    """The failed pass has had bucket 0; the next one begins with a later bucket."""
    torch.manual_seed(0)

    class Net(Branches):
        switch: dict = {"raises": False}  # noqa: RUF012

        def forward(self, x, heads):
            x = call_in_backward(self.b(self.a(x)), partial(_raise_if_told, self.switch))
            for head in heads:
                x = getattr(self, head)(x)
            return x

    options = {"bucket_cap_mb": 0.03, **LEAVES_OUT_BUCKETS}
    net, state = Net(), make_state("feedback both")
    ddp = _wrap(net, state, **options)
    for number in range(3):
        ddp(_data(number, 90), ("left", "right")).square().mean().backward()
    before = _own(state)
    net.switch["raises"] = True
    with pytest.raises(ArithmeticError):
        ddp(_data(5, 90), ("left", "right")).square().mean().backward()
    net.switch["raises"] = False
    del ddp  # it cannot go on
    gc.collect()
    ddp = _wrap(net, state, **options)
    for number in range(2):
        ddp(_data(number, 90), ()).square().mean().backward()
    after = _own(state)
    assert torch.equal(before["right.weight"], after["right.weight"])  # of a bucket of the dead pass only
    assert not torch.equal(before["a.weight"], after["a.weight"])
    assert state.state_dict()["steps"] == 5


@pytest.mark.skipif(len(LEAVES_OUT_BUCKETS) < 2, reason="this torch averages every bucket")
def test_a_pass_without_bucket_0_after_one_that_raised_is_a_new_one():
    run_ranks(_raises_where_buckets_are_left_out, 2)


def _nested(rank):
    """Reentrant checkpointing runs every layer's backward as a pass of its own; they are one step."""
    torch.manual_seed(0)
    counted = []
    for net in (Layers(reentrant=True), Layers(reentrant=False)):
        net.load_state_dict(Layers().state_dict() if not counted else counted[0][1])
        weights = {name: value.clone() for name, value in net.state_dict().items()}
        state = make_state("feedback both")
        ddp = _wrap(net, state, bucket_cap_mb=0.03)
        poison = {"on": False}
        # On one rank, in the gradient of the first layer, whose bucket is the last.
        net.layers[0].bias.register_hook(
            lambda grad, poison=poison: grad * torch.nan if poison["on"] and rank == 1 else grad
        )

        def step(number, ddp=ddp):
            ddp(_data(number, 90).requires_grad_()).square().mean().backward()
            ddp.zero_grad()

        for number in range(5):
            step(number)
        before = _own(state)
        poison["on"] = True
        step(5)
        poison["on"] = False
        assert same_bits(before, _own(state)), "a value of the last bucket was not finite"
        step(6)
        assert not same_bits(before, _own(state))
        counted.append((state.state_dict()["steps"], weights, _own(state)))
        state.close()
    (steps, _, own), (plain_steps, _, plain_own) = counted
    assert steps == plain_steps == 7
    assert same_bits(own, plain_own)


def test_reentrant_checkpoints_make_one_step():
    run_ranks(_nested, 2)


def _in_turns(rank):
    """Heads used in turns share a bucket with a layer that is always used: nothing of them is lost."""
    found = {}
    for case, options in {
        "together": {},
        "apart": {"bucket_cap_mb": 0.03},
        "views": {"gradient_as_bucket_view": True},
    }.items():
        torch.manual_seed(0)
        net, state = Branches(), make_state("int4", error_feedback="both")
        reference = Branches()
        reference.load_state_dict(net.state_dict())
        ddp = _wrap(net, state, find_unused_parameters=True, **options)
        lost = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
        largest = dict.fromkeys(lost, 0.0)
        for number in range(120):
            heads = ("left",) if number % 2 else ("right",)
            ddp(_data(number, 90), heads).square().mean().backward()
            for peer in range(dist.get_world_size()):
                reference(_data(number, 90, peer), heads).square().mean().backward()
            for name, value in net.named_parameters():
                other = reference.get_parameter(name)
                if other.grad is not None:
                    mean = other.grad / dist.get_world_size()
                    largest[name] = max(largest[name], mean.abs().max().item())
                    lost[name] += value.grad - mean
                value.grad = other.grad = None
        found[case] = max(
            (lost[name].abs().max() / largest[name]).item() for name in lost if "weight" in name
        )
        state.close()
    return found


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_feedback_keeps_what_ddp_throws_away_of_unused_parameters(world_size):
    """Without that, the error grows with the steps: 0.4 and 0.8 of a gradient after 200 of them."""
    for found in run_ranks(_in_turns, world_size, timeout=150):
        assert max(found.values()) < 0.2, found


class OneEach(torch.nn.Module):
    """Parameters that a step uses or not; fp64 ones are averaged without compression."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(70, 30) for _ in range(2))
        self.plain = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, factors):
        parameters = *self.weights, self.plain
        return sum((parameters[place] * factor).sum() for place, factor in factors.items())


def _only_in_a_plain_bucket(rank):
    net, state = OneEach(), make_state("int4", error_feedback="both")
    ddp = _wrap(net, state, find_unused_parameters=True)

    def step(*places):
        ddp({place: _data(place, 30)[:1] if place < 2 else 1.0 for place in places}).backward()
        ddp.zero_grad()

    step(0, 1, 2)
    before = _own(state)
    assert before["weights.1"].abs().max() > 0
    step(0 if rank == 0 else 2)
    after = _own(state)
    assert torch.equal(before["weights.1"], after["weights.1"]), "no rank used it"
    assert not torch.equal(before["weights.0"], after["weights.0"])
    state.close()


def test_a_rank_with_gradients_in_plain_buckets_only_keeps_unused_residuals():
    run_ranks(_only_in_a_plain_bucket, 2)


class FirstRaises(Layers):
    """Raises after all parameters, when every bucket has arrived and the passes inside are over."""

    def forward(self, x):
        return super().forward(call_in_backward(x, partial(_raise_if_told, self.first)))

    first: dict = {"raises": False}  # noqa: RUF012


def _raises_around(rank):
    """The pass around those of reentrant checkpoints raises; the next try succeeds."""
    steps = []
    for reentrant in (True, False):
        torch.manual_seed(0)
        net, state = FirstRaises(reentrant=reentrant), make_state("feedback both")
        ddp = _wrap(net, state, bucket_cap_mb=0.03)

        def step(number, ddp=ddp):
            ddp(_data(number, 90).requires_grad_()).square().mean().backward()
            ddp.zero_grad()

        for number in range(3):
            step(number)
        before = _own(state)
        net.first["raises"] = True
        with pytest.raises(ArithmeticError, match="the user's own error"):
            step(3)
        net.first["raises"] = False
        assert same_bits(before, _own(state)), reentrant
        if not reentrant:  # DDP cannot go on
            del ddp, step
            gc.collect()
            net.zero_grad()
            ddp = _wrap(net, state, bucket_cap_mb=0.03)
        for number in range(4, 6):
            ddp(_data(number, 90).requires_grad_()).square().mean().backward()
            ddp.zero_grad()
        assert not same_bits(before, _own(state))
        steps.append(state.state_dict()["steps"])
        state.close()
    assert steps == [5, 5]


def test_an_error_around_reentrant_checkpoints_leaves_residuals():
    run_ranks(_raises_around, 2)


def _static_graph_of_several_types(rank):
    """In its first pass all buckets arrive with index 0, when all gradients are there."""
    torch.manual_seed(0)
    net = Layers(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float32))
    state = make_state("feedback both")
    ddp = _wrap(net, state, static_graph=True)
    for number in range(4):
        ddp(_data(number, 90)).float().square().mean().backward()
        ddp.zero_grad()
        assert state.state_dict()["steps"] == number + 1
    first = _own(state)
    assert {name.split(".")[1] for name in first} == {"0", "2", "3"}, "fp64 is not quantized"
    assert all(lost.abs().max() > 0 for name, lost in first.items() if name.endswith("weight"))


def test_the_first_pass_of_a_static_graph_is_one_step():
    run_ranks(_static_graph_of_several_types, 2)


def _discards(rank):
    """A step that the user skips, on all ranks alike, leaves the run as if it had not been computed."""
    results = []
    for discards in (True, False):
        torch.manual_seed(0)
        net, state = Layers(), make_state("int4", error_feedback="both")
        ddp = _wrap(net, state, bucket_cap_mb=0.03)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for number in range(6):
            if number == 3 and not discards:
                continue
            ddp(_data(number, 90)).square().mean().backward()
            if number == 3:
                if rank == 0:
                    state.state_dict()  # reading changes nothing
                state.discard_step()
                state.discard_step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        saved = state.state_dict()
        results.append(([value.clone() for value in net.parameters()], flat_residuals(saved), saved["steps"]))
        if discards:
            refused = []

            def ask(_, state=state, refused=refused):
                for call in (state.discard_step, lambda: state.load_state_dict({})):
                    with pytest.raises(RuntimeError, match=r"inside backward\(\)"):
                        call()
                    refused.append(call)

            handle = net.layers[0].weight.register_hook(ask)
            ddp(_data(0, 90)).sum().backward()
            handle.remove()
            assert len(refused) == 2
        state.close()
    (left, left_own, steps), (right, right_own, other_steps) = results
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert same_bits(left_own, right_own)
    assert steps == other_steps == 5


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_discarded_step_never_was(world_size):
    run_ranks(_discards, world_size)


def _several_losses(rank):
    """Two losses of one iteration, accumulated without no_sync, and one graph that is used twice."""
    torch.manual_seed(0)
    net, state = Layers(), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    passes = 0
    for number in range(3):
        for part in range(2):
            ddp(_data(10 * number + part, 90)).square().mean().backward()
            passes += 1
        ddp.zero_grad()
    assert state.state_dict()["steps"] == passes
    before = _own(state)
    loss = ddp(_data(7, 90)).square().mean()
    loss.backward(retain_graph=True)
    between = state.state_dict()
    assert between["steps"] == passes + 1
    assert not same_bits(before, between["own"])
    loss.backward()  # DDP averages once per forward: nothing is sent, nothing lost
    after = state.state_dict()
    assert after["steps"] == passes + 1
    assert same_bits(between["own"], after["own"])
    with ddp.no_sync():
        ddp(_data(8, 90)).square().mean().backward()
    assert state.state_dict()["steps"] == passes + 1


def test_every_pass_that_averages_is_a_step():
    run_ranks(_several_losses, 2)


def _bytes_kept():
    """Return how many bytes of bf16 tensors are alive."""
    gc.collect()
    kept = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.dtype == torch.bfloat16:
            memory = one.untyped_storage()
            kept[memory.data_ptr()] = memory.nbytes()
    return sum(kept.values())


def _no_copies(rank):
    """A value has two residuals of two bytes, whatever buckets it comes in, and nothing else grows."""
    torch.manual_seed(0)
    net, state = Layers(), make_state("feedback both")
    count = sum(parameter.numel() for parameter in net.parameters())
    wraps = [_wrap(net, state, bucket_cap_mb=cap) for cap in (0.03, 0.07)]
    for number in range(8):  # rebuilt in the second pass; then another cap, and each in turn
        ddp = wraps[number > 2 and number % 2]
        ddp(_data(number, 90)).square().mean().backward()
        ddp.zero_grad()
        assert _bytes_kept() == 4 * count, number
        before = _own(state)
        ddp(_data(number, 90)).square().mean().backward()
        state.discard_step()
        assert same_bits(before, _own(state))
        del before
    # A model that is gone leaves nothing either.
    other = _wrap(Layers(), state)
    other(_data(0, 90)).square().mean().backward()
    assert len(list(state.feedback.snapshot())) == 2 * len(list(net.parameters()))
    del other
    _wrap(torch.nn.Linear(90, 80), state)(_data(0, 90)).square().mean().backward()
    gc.collect()
    assert len(list(state.feedback.snapshot())) == len(list(net.parameters()))


def test_residuals_take_4_bytes_a_value_in_any_buckets():
    run_ranks(_no_copies, 2)


def _late_jobs(rank):
    """Jobs of a dead pass end, with a NaN, while the next pass is under way."""
    torch.manual_seed(0)
    net, state = Layers(), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    for number in range(3):
        ddp(_data(number, 90)).square().mean().backward()
    before = _own(state)
    gate, real = threading.Event(), kernels.encode_shards

    def gated(*arguments, **options):
        gate.wait(10)
        real(*arguments, **options)

    kernels.encode_shards = gated
    net.switch["raises"] = True
    handle = net.layers[3].bias.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(ArithmeticError):
        ddp(_data(5, 90)).square().mean().backward()
    handle.remove()
    net.switch["raises"] = False
    del ddp  # it cannot go on
    gc.collect()
    net.zero_grad()
    again = _wrap(net, state, bucket_cap_mb=0.03)
    opener = threading.Timer(0.5, gate.set)
    opener.start()
    again(_data(6, 90)).square().mean().backward()
    kernels.encode_shards = real
    saved = state.state_dict()
    assert saved["steps"] == 4
    own = flat_residuals(saved)
    assert not any(torch.equal(lost, before[name]) for name, lost in own.items() if "weight" in name)
    assert all(lost.isfinite().all() for lost in own.values())


def test_jobs_of_a_dead_pass_do_not_disturb_the_next():
    run_ranks(_late_jobs, 2)
