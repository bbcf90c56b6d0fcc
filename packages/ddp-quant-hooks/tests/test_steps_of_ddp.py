"""Steps are observed: one that did not happen changes no residual, one that happened is counted once."""

import copy
import gc
import time

import pytest
import torch
import torch.distributed as dist
from averaging_callers import spoiled_kernel
from quant_buckets import LEAVES_OUT_BUCKETS, assert_same, differences, flat_residuals, make_state
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import (
    LowRankState,
    QuantizedAllreduceState,
    low_rank_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import call_in_backward, run_ranks


class Layers(torch.nn.Module):
    """Layers of given types, whose backward pass can raise when it comes to one of them."""

    def __init__(self, *, reentrant=False, dtypes=(torch.float32,) * 4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(90, 90, dtype=dtype) for dtype in dtypes)
        self.reentrant, self.fails_before = reentrant, None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = call_in_backward(x, lambda index=index: index == self.fails_before and 1 / 0)
            x = x.to(layer.weight.dtype)
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def _wrap(net, state, **options):
    ddp = DistributedDataParallel(net, **options)
    hook = low_rank_hook if isinstance(state, LowRankState) else quantized_allreduce_hook
    ddp.register_comm_hook(state.bind(ddp), hook)
    return ddp


def _backward(ddp, number, *arguments, set_to_none=True):
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(4, 90, generator=generator).requires_grad_()
    ddp(x, *arguments).float().square().mean().backward()
    ddp.zero_grad(set_to_none)


def _own(state):
    return flat_residuals(state.state_dict())


def _steps(state):
    return state.state_dict()["steps"]


FAILURES = {  # the steps before, the layer before which backward() raises, and the model
    "in the middle": (3, 2, {}),
    "in the first pass in new buckets": (1, 2, {}),
    "when every bucket has come": (3, 0, {}),
    "around passes inside the pass": (3, 0, {"reentrant": True}),
}


def _raises(rank, case):
    """A pass raises while slow jobs of its buckets run, with a NaN; it is saved at once, and made again."""
    steps, place, options = FAILURES[case]
    net, state = Layers(**options), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    for number in range(steps):
        _backward(ddp, number)
    before = _own(state)
    net.fails_before = place
    poison = net.layers[3].bias.register_hook(lambda gradient: gradient * torch.nan)
    with spoiled_kernel(lambda: time.sleep(0.05)):
        with pytest.raises(ZeroDivisionError):
            _backward(ddp, 9)
        poison.remove()
        net.fails_before = None
        if rank == 0:  # it waits; the other ranks' jobs are still under way when the next pass begins
            assert_same(before, _own(state))
        del ddp  # it cannot go on
        gc.collect()
        net.zero_grad()
        ddp = _wrap(net, state, bucket_cap_mb=0.03)
        _backward(ddp, 10)
    assert _steps(state) == steps + 1
    state.discard_step()
    assert_same(before, _own(state))
    _backward(ddp, 11)
    after = _own(state)
    assert [name for name, lost in after.items() if not lost.isfinite().all()] == []
    changed = differences(before, after)
    assert {name for name in before if name.endswith("weight")} <= changed.keys()
    assert _steps(state) == steps + 1


def _closed_inside(_):
    """What the buckets before it have lost was fed back in this pass, and must not be once more."""
    net, state = Layers(), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    for number in range(2):
        _backward(ddp, number)
    before = _own(state)
    handle = net.layers[2].weight.register_hook(lambda _: state.close())
    _backward(ddp, 2)
    handle.remove()
    assert differences(before, _own(state)).keys() == before.keys()
    assert _steps(state) == 3
    state.discard_step()
    assert_same(before, _own(state))


def test_a_pass_in_which_the_state_is_closed_is_one_step():
    run_ranks(_closed_inside, 2, timeout=60)


def _inside_step(_):
    """Each pass is a step: a block of several would add its residuals to each of them."""
    state = make_state("feedback both")
    ddp = _wrap(Layers(), state)
    with state.step(), pytest.raises(RuntimeError, match="is for plain tensors"):
        _backward(ddp, 0)


def _resized(_):
    """What was lost of rows that are there no more, or of a neighbor in the bucket, is not theirs."""
    for state in (make_state("feedback both"), LowRankState(min_bytes=0, rank=2, warm_up_steps=1)):
        net = torch.nn.ModuleList([torch.nn.Linear(90, 90), torch.nn.Linear(90, 90)])
        net.forward = lambda x, net=net: net[1](net[0](x))
        ddp = _wrap(net, state)
        for number in range(2):
            _backward(ddp, number)
        del ddp
        gc.collect()
        net[1].weight.data = torch.ones(100, 90)
        net[1].bias.data = torch.ones(100)
        net.zero_grad()
        assert flat_residuals(state.state_dict(net)).keys() == {"0.weight", "0.bias"}
        ddp = _wrap(net, state)
        (ddp(torch.zeros(4, 90)).sum() * 0).backward()
        assert net[1].weight.grad.count_nonzero() == 0
        state.close()


class Convolutions(torch.nn.Module):
    """A gradient is the sum of what the ranks give, in any memory format."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(16, 8, 3, 3))
        self.narrow = torch.nn.Parameter(torch.zeros(16, 8, 1, 1))  # of one order in both formats

    def forward(self, *values):
        return sum((parameter * one).sum() for parameter, one in zip(self.parameters(), values, strict=True))


def _gradients(ddp, number):
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    ddp.zero_grad()
    ddp(*(torch.randn(one.shape, generator=generator) for one in ddp.parameters())).backward()
    return [one.grad.clone(memory_format=torch.contiguous_format) for one in ddp.parameters()]


def _memory_formats(_):
    """Values in another order begin without residuals, those in the same order keep theirs."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        net, state = Convolutions(), make_state("feedback both")
        ddp = _wrap(net, state)
        for number in range(3):
            _gradients(ddp, number)
        kept, saved = _own(state), state.state_dict()
        del ddp
        net.to(memory_format=torch.channels_last)
        with pytest.raises(ValueError, match="'wide' were saved in another memory format"):
            state.load_state_dict(saved, net)
        ddp = _wrap(net, state, **options)
        wide, narrow = _gradients(ddp, 3)
        fresh, fed_back = make_state("feedback both"), make_state("feedback both")
        fed_back.load_state_dict({**saved, "parameters": {"narrow": saved["parameters"]["narrow"]}}, net)
        expected = _gradients(_wrap(copy.deepcopy(net), fresh), 3)
        assert_same([expected[0]], [wide])
        assert not torch.equal(expected[1], narrow), "it was fed back"
        state.discard_step()
        after = _own(state)
        assert not after["wide"].any()
        assert_same([kept["narrow"]], [after["narrow"]])


def _memory_format_after_ddp(_):
    """DDP keeps the first order until it makes its final buckets; only views of buckets show that."""
    net, state = Convolutions(), make_state("feedback both")
    ddp = _wrap(net, state, gradient_as_bucket_view=True)
    net.to(memory_format=torch.channels_last)
    _gradients(ddp, 0)
    expected = _gradients(_wrap(copy.deepcopy(net), make_state("feedback both")), 1)
    assert_same([expected[0]], [_gradients(ddp, 1)[0]])


def _all_failures(rank):
    for case in FAILURES:
        _raises(rank, case)


def test_a_backward_that_raises_leaves_residuals_and_its_late_jobs_do_not_disturb_the_next():
    run_ranks(_all_failures, 3, timeout=90)


class Used(torch.nn.Module):
    """Parameters that a step uses or not; fp64 ones are averaged without compression."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(90, 90) for _ in range(3))
        self.plain = torch.nn.Parameter(torch.ones(90, dtype=torch.float64))

    def forward(self, x, names):
        parameters = dict(self.named_parameters())
        return sum((parameters[name] * x.abs().mean(0)).sum() for name in names)


BUCKETS = {
    "together": {"find_unused_parameters": True},
    "apart": {"find_unused_parameters": True, "bucket_cap_mb": 0.03},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "left out": {"bucket_cap_mb": 0.03, **LEAVES_OUT_BUCKETS},
}


def _unused(rank):
    """A pass on one rank has gradients in a plain bucket only; then the first bucket is not used at all."""
    for name, set_to_none in [*((one, True) for one in BUCKETS), ("together", False), ("apart", False)]:
        options = BUCKETS[name]
        # DDP leaves out a bucket only if all ranks use the same parameters.
        plain_only = rank > 0 and name != "left out"
        net, state = Used(), make_state("int4", error_feedback="both")
        names = sorted(dict(net.named_parameters()))
        ddp = _wrap(net, state, **options)
        for number in range(3):
            _backward(ddp, number, names, set_to_none=set_to_none)
        for number, (used, unused) in enumerate(
            [
                (["plain"] if plain_only else ["weights.0"], {"weights.1", "weights.2"}),
                (["weights.0", "weights.1"], {"weights.2"}),
                (["weights.1", "weights.2"], {"weights.0"}),
            ],
            start=3,
        ):
            before = _own(state)
            assert [name for name, lost in before.items() if not lost.any()] == []
            _backward(ddp, number, used, set_to_none=set_to_none)
            assert differences(before, _own(state)).keys() == before.keys() - unused, (name, set_to_none)
            assert _steps(state) == number + 1
        state.close()


def _unused_after_joining(rank):
    """Return which residuals a pass changes that uses one parameter, and that rank 1 only joins; and all."""
    net, state = Used(), make_state("int4", error_feedback="both")
    names = sorted(dict(net.named_parameters()))
    ddp = _wrap(net, state, find_unused_parameters=True)
    with ddp.join():
        for number in range(3):
            _backward(ddp, number, names)
        _backward(ddp, 3, ["weights.0"])
        before = _own(state)
        if rank == 0:
            _backward(ddp, 4, ["weights.0"])
    return sorted(differences(before, _own(state))), sorted(before)


def test_a_rank_that_has_joined_loses_the_residuals_of_parameters_that_no_rank_uses():
    """As docs/appendix/ddp-quant-hooks.md says; the others keep theirs."""
    (first, _), (joined, names) = run_ranks(_unused_after_joining, 2)
    assert first == ["weights.0"]
    assert joined == names == ["weights.0", "weights.1", "weights.2"]


def _passes(rank):
    """Two losses of one iteration, a graph that is used twice, and a pass that is not averaged."""
    net, state = Layers(), make_state("feedback both")
    ddp = _wrap(net, state, bucket_cap_mb=0.03)
    for number in range(4):
        _backward(ddp, number)
    loss = ddp(torch.ones(4, 90)).square().mean()
    loss.backward(retain_graph=True)
    between = _own(state)
    assert _steps(state) == 5
    loss.backward()  # DDP averages once per forward: nothing is sent, nothing lost
    with ddp.no_sync():
        _backward(ddp, 5)
    assert _steps(state) == 5
    assert_same(between, _own(state))


def _static_graph_of_several_types(rank):
    """In its first pass all buckets arrive with index 0, when all gradients are there."""
    net = Layers(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float32))
    state = make_state("feedback both")
    ddp = _wrap(net, state, static_graph=True)
    for number in range(4):
        _backward(ddp, number)
        assert _steps(state) == number + 1
    kept = {name for name, lost in _own(state).items() if lost.abs().max() > 0}
    assert kept >= {"layers.0.weight", "layers.2.weight", "layers.3.weight"}
    assert not any(name.startswith("layers.1.") for name in kept), "fp64 is not quantized"


def _reentrant_checkpoints(rank):
    """Every layer's backward is a pass of its own, but the residuals are those of one pass."""
    found = []
    for reentrant in (True, False):
        state = make_state("feedback both")
        ddp = _wrap(Layers(reentrant=reentrant), state, bucket_cap_mb=0.03)
        for number in range(5):
            _backward(ddp, number)
        assert _steps(state) == 5
        found.append(_own(state))
        state.close()
    assert_same(*found)


def _inside_backward(rank):
    """A step can be taken back, and residuals loaded, only between two passes."""
    net, state, refused = Layers(), make_state("feedback both"), []

    def ask(_):
        for call in (state.discard_step, lambda: state.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"inside backward\(\)"):
                call()
            refused.append(call)

    net.layers[0].weight.register_hook(ask)
    _backward(_wrap(net, state), 0)
    assert len(refused) == 2


POISONED = {  # the parameter with a NaN on one rank, and the state
    "in one of several buckets": ("layers.3.bias", {}),
    "in the last bucket": ("layers.0.bias", {}),
    "in a bucket without compression": ("layers.1.weight", {}),
    "in the exact part of a bucket": ("layers.0.bias", {"exact_1d": True}),
}


def _not_finite(rank):
    """A NaN on one rank, in a part of the gradients: no residual changes, anywhere."""
    for number, (place, options) in enumerate(POISONED.values()):
        dtypes = torch.float32, torch.float64, torch.float32, torch.float32
        net, state = Layers(reentrant=number % 2 == 0, dtypes=dtypes), make_state("feedback both", **options)
        ddp = _wrap(net, state, bucket_cap_mb=0.03)
        for step in range(3):
            _backward(ddp, step)
        before = _own(state)
        if rank == 1:
            poison = net.get_parameter(place).register_hook(lambda gradient: gradient * torch.nan)
        _backward(ddp, 3)
        for _ in range(2):  # asking changes nothing
            assert_same(before, _own(state), place)
        if rank == 1:
            poison.remove()
        _backward(ddp, 4)
        assert differences(before, _own(state)).keys() >= {"layers.0.weight", "layers.2.weight"}
        state.discard_step()
        assert_same(before, _own(state), "the next step began from there")
        state.close()


def _steps_of_two_ranks(rank):
    for check in (
        _inside_step,
        _resized,
        _memory_formats,
        _memory_format_after_ddp,
        _unused,
        _passes,
        _static_graph_of_several_types,
        _reentrant_checkpoints,
        _inside_backward,
        _not_finite,
    ):
        check(rank)


def test_a_pass_that_averages_is_one_step_and_changes_the_residuals_of_what_it_used_if_it_is_finite():
    run_ranks(_steps_of_two_ranks, 2, timeout=150)


def _bytes_kept():
    """Return how many bytes of bf16 tensors are alive."""
    gc.collect()
    kept = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.dtype == torch.bfloat16:
            memory = one.untyped_storage()
            kept[memory.data_ptr()] = memory.nbytes()
    return sum(kept.values())


def _memory(rank):
    """A value has two residuals of two bytes, whatever buckets it comes in, and nothing else grows."""
    net, state = Layers(), make_state("feedback both")
    count = sum(parameter.numel() for parameter in net.parameters())
    wraps = [_wrap(net, state, bucket_cap_mb=cap) for cap in (0.03, 0.07)]
    kept = []
    for number in range(6):  # rebuilt in the second pass; then another cap, and each in turn
        if number == 3:
            state.load_state_dict(state.state_dict())  # of which nothing stays
        _backward(wraps[number > 2 and number % 2], number)
        kept.append(_bytes_kept())
    other = _wrap(Layers(), state)
    _backward(other, 0)
    kept.append(_bytes_kept() // 2)
    del other  # a model that is gone leaves nothing
    _backward(_wrap(torch.nn.Linear(90, 80), state), 0)
    kept.append(_bytes_kept() - 4 * 91 * 80)
    assert kept == [4 * count] * 8


def test_residuals_take_4_bytes_a_value_in_any_buckets():
    run_ranks(_memory, 2)


def test_the_defaults_of_4_bits_feed_errors_back():
    options = QuantizedAllreduceState(bits=4).options
    assert (options.error_feedback, options.block_size, options.gather) == ("both", 32, "int4")
    assert QuantizedAllreduceState().options.error_feedback == "none"
