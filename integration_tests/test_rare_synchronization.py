"""DiLoCo and torch's model averaging in few bits: what the documentation's examples compute."""

import copy
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from trainings import assert_same_bits

from ddp_quant_hooks import QuantizedAllreduceState
from dist_utils.testing import run_ranks, same_on_all_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
from diloco import DiLoCo

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim uses TorchScript
    from model_averaging import ChangeAverager, PostLocalSGDOptimizer

EVERY, STEPS = 4, 18  # the last steps belong to no complete round
SHAPES = [(40, 33), (33,), (65, 7)]
EXACT = 1 << 30  # for min_bytes: everything smaller is sent without compression


def _changes(rank, step):
    """Return changes as an inner optimizer might make them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) / 8 for shape in SHAPES]


def _parameters():
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _change(parameters, rank, step):
    with torch.no_grad():
        for parameter, change in zip(parameters, _changes(rank, step), strict=True):
            parameter.add_(change)


def _train(rank, parameters, fragments, steps):
    """Train; return the steps after which synchronized ranks differed."""
    unequal = []
    for step in steps:
        _change(parameters, rank, step)
        agreed = []
        for fragment in fragments:
            fragment.step()
            has_met = step > EVERY and (step - fragment.turn) % EVERY == fragment.delay
            agreed += fragment.parameters if has_met else fragment.shared
        if not same_on_all_ranks(agreed):
            unequal.append(step)
    return unequal


def _run(rank, options, *, streaming):
    """Return the final parameters, and the steps after which synchronized ranks differed."""
    state, parameters = QuantizedAllreduceState(**options), _parameters()
    if streaming:
        own = [[parameter] for parameter in parameters]
        fragments = [DiLoCo(own[n], state, f"{n}", EVERY, turn=n, delay=2) for n in range(3)]
    else:
        fragments = [DiLoCo(parameters, state, "model", EVERY)]
    unequal = _train(rank, parameters, fragments, range(1, STEPS + 1))
    for fragment in [*fragments, *fragments]:  # the second time there is nothing left
        fragment.finish()
    if not same_on_all_ranks(parameters):
        unequal.append("at the end")
    state.close()
    return [parameter.detach() for parameter in parameters], unequal


def _assert_resume_is_bitwise(rank):
    """Resume from a checkpoint in the middle, as docs/rare-synchronization.md describes."""
    states = [QuantizedAllreduceState(bits=4, min_bytes=0) for _ in range(2)]  # with feedback
    parameters = _parameters()
    outer = DiLoCo(parameters, states[0], "model", EVERY)
    _train(rank, parameters, [outer], range(1, EVERY + 2))
    saved = (
        parameters,
        outer.shared,
        outer.optimizer.state_dict(),
        (outer.steps, outer.unshared),
        states[0].state_dict(),
    )
    resumed_parameters, shared, optimizer, numbers, residuals = copy.deepcopy(saved)
    resumed = DiLoCo(resumed_parameters, states[1], "model", EVERY)
    for own, loaded in zip(resumed.shared, shared, strict=True):
        own.copy_(loaded)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.steps, resumed.unshared = numbers
    states[1].load_state_dict(residuals)
    for one in (outer, resumed):
        _train(rank, one.parameters, [one], range(EVERY + 2, 3 * EVERY))
        one.finish()
        one.state.close()
    assert_same_bits(resumed_parameters, parameters)


def _many_runs(rank):
    _assert_resume_is_bitwise(rank)
    return [
        _run(rank, {"min_bytes": EXACT}, streaming=False),
        _run(rank, {"min_bytes": EXACT}, streaming=True),
        _run(rank, {"min_bytes": 0, "error_feedback": "both"}, streaming=False),
        _run(rank, {"min_bytes": 0, "bits": 4}, streaming=True),  # with feedback
    ]


def _by_formula(number, world_size, *, streaming):
    """Return the end of a parameter by DiLoCo's formula, for all ranks in one process, in fp64."""
    turn, delay = (number, 2) if streaming else (0, 0)
    shared, velocity, sent = _parameters()[number].detach().double(), 0.0, None
    own = [shared] * world_size

    def send():
        nonlocal sent
        sent = shared - sum(own) / world_size

    def receive():
        nonlocal shared, velocity, sent, own
        if sent is not None:
            velocity = 0.9 * velocity + sent
            shared = shared - 0.7 * (sent + 0.9 * velocity)
            own, sent = [shared] * world_size, None

    for step in range(1, STEPS + 1):
        own = [one + _changes(rank, step)[number].double() for rank, one in enumerate(own)]
        if (step - turn) % EVERY == 0:
            send()
        if (step - turn) % EVERY == delay:
            receive()
    receive()
    if any((one != shared).any() for one in own):  # else an outer step would only be momentum's
        send()
        receive()
    return shared


def test_diloco_follows_its_formula_and_ranks_agree_bitwise_after_each_outer_step():
    ranks = run_ranks(_many_runs, 3, timeout=240)
    for runs in ranks:
        assert [unequal for _, unequal in runs] == [[]] * 4
    plain, streamed = (
        [_by_formula(number, 3, streaming=streaming) for number in range(3)] for streaming in (False, True)
    )
    assert (plain[0] - streamed[0]).abs().max() > 0.1
    runs = [parameters for parameters, _ in ranks[0]]
    for found, expected in zip(runs[0] + runs[1], plain + streamed, strict=True):
        # Fewer than 100 roundings of values below 8.
        assert (found - expected).abs().max() < 100 * 8 * 2**-24
    # How far a unit in one of at most 6 averages has moved the parameters n rounds later, with momentum.
    gains = [0.7 * (1 + 0.9 * (1 - 0.9**n) / (1 - 0.9)) for n in range(1, 7)]
    for run, expected, levels in [(2, plain, 127), (3, streamed, 7)]:
        # Rounding errors of 1 / levels of a block's largest change, which is below 1 (4 standard deviations),
        # uniformly distributed: one for the mean, and a third of the variance for the mean of three ranks.
        deviation = (4 / 3 / 12) ** 0.5 / levels * sum(gain**2 for gain in gains) ** 0.5
        for found, exact in zip(runs[run], expected, strict=True):
            assert 0 < (found - exact).square().mean().sqrt() < deviation


def _average(rank, state):
    """Average now and then, with ours and with torch's averager, whose mean is exact except for rounding.

    Returns the largest difference after each step, and whether the ranks agree.
    """
    ours, torchs = _parameters(), _parameters()
    schedule = {"period": 2, "warmup_steps": 1}
    averager, torchs_averager = ChangeAverager(ours, state, **schedule), PeriodicModelAverager(**schedule)
    for parameter in torchs:
        parameter.grad = torch.zeros_like(parameter)  # torch averages only those with a gradient
    found = []
    for step in range(1, 6):
        for parameters, either in ((ours, averager), (torchs, torchs_averager)):
            _change(parameters, rank, step)
            either.average_parameters([{"params": parameters}])
        difference = max((a - b).abs().max().item() for a, b in zip(ours, torchs, strict=True))
        found.append((difference, same_on_all_ranks(ours)))
        for own, other in zip(ours, torchs, strict=True):
            other.data.copy_(own.data)
    state.close()
    return found


def _post_local_sgd(rank, *, restarted):
    """Train with torch's optimizer, with or without a restart from a checkpoint; return the parameters."""
    state = QuantizedAllreduceState(min_bytes=0)
    parameters = _parameters()

    def make():
        inner = torch.optim.AdamW(parameters, lr=1e-2)
        return PostLocalSGDOptimizer(inner, ChangeAverager(parameters, state, period=3, warmup_steps=2))

    optimizer = make()
    for step in range(1, 10):
        if restarted and step == 7:  # the step before has averaged
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(saved)
        for parameter, change in zip(parameters, _changes(rank, step), strict=True):
            parameter.grad = change
        optimizer.step()
    assert same_on_all_ranks(parameters)
    state.close()
    return parameters


def _model_averaging(rank):
    straight_on, restarted = (_post_local_sgd(rank, restarted=which) for which in (False, True))
    assert_same_bits(restarted, straight_on)
    return _average(rank, QuantizedAllreduceState(min_bytes=0, error_feedback="both"))


def test_model_averaging_is_torchs_except_for_8_bits():
    for found in run_ranks(_model_averaging, 3, timeout=240):
        differences, agree = zip(*found, strict=True)
        assert agree == (False, True, False, True, False)
        assert differences[::2] == (0, 0, 0)  # no average
        # Two roundings to 1 / 127 of the largest change of a block, each by at most half of that: no change
        # is above 6 / 8 * sqrt(2), six deviations of two steps. Error feedback adds the last one's loss.
        assert 0 < max(differences) < 2 * 6 / 8 * 2**0.5 / 127
