"""AutoState's conclusions from times: functions of numbers that are identical on all ranks."""

import pytest

from ddp_quant_hooks.auto_choice import (
    Assignment,
    another_round_helps,
    best_by_size,
    clearly_slower,
    fastest,
    typical_steps,
)
from ddp_quant_hooks.auto_trial import Trial, least_passes

A, B, C = (Assignment(name) for name in "abc")


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([1.0, 1.0], A),
        ([1.0, 0.995], A),  # less than can matter
        ([1.0, 0.95], B),
        ([0.95, 1.0], A),
    ],
)
def test_fewer_bytes_need_a_real_gain(seconds, best):
    rounds = [{contender: [one] * 3 for contender, one in zip((A, B), seconds, strict=True)}] * 3
    assert fastest([A, B], rounds) == best


def test_a_gain_within_the_noise_does_not_count():
    noisy = [0.80, 0.985, 1.17]
    quiet = [0.984, 0.985, 0.986]
    assert fastest([A, B], [{A: [1.0] * 3, B: noisy}] * 4) == A
    assert fastest([A, B], [{A: [1.0] * 3, B: quiet}] * 4) == B


def test_what_slows_a_whole_round_does_not_count():
    rounds = [{A: [scale * 1.0] * 3, B: [scale * 0.9] * 3} for scale in (1.0, 5.0, 0.3, 2.0)]
    assert fastest([A, B], rounds) == B


def _around(*centers, noise=0.1):
    """Return a round with three steps around each center."""
    return {
        contender: [center * (1 - noise), center, center * (1 + noise)]
        for contender, center in zip((A, B, C), centers, strict=False)
    }


def test_a_slow_moment_does_not_decide():
    rounds = [_around(1.0, seconds, noise=0.02) for seconds in (0.9, 9.0, 0.9)]
    assert fastest([A, B], rounds) == B
    assert B not in clearly_slower([A, B], rounds)
    assert clearly_slower([A, B], rounds[1:2]) == set()


def test_a_candidate_that_is_far_slower_twice_gets_no_more_turns():
    assert clearly_slower([A, B, C], [_around(1.0, 1.5, 1.1)] * 2) == {B}
    assert clearly_slower([A, B, C], [_around(1.0, 1.5, 1.1)]) == set()


def test_a_candidate_that_is_slower_by_more_than_chance_gets_no_more_turns():
    assert clearly_slower([A, B, C], [_around(1.0, 1.02, 1.1, noise=0.01)] * 2) == {C}
    assert clearly_slower([A, B, C], [_around(1.0, 1.02, 1.1, noise=0.01)]) == set()


def test_another_round_is_made_only_if_the_result_is_open_and_matters():
    assert another_round_helps([A, B], [_around(1.0, 0.95)] * 4)  # A is chosen
    assert not another_round_helps([A, B], [_around(1.0, 0.95, noise=0.001)] * 4)
    assert not another_round_helps([A, B], [_around(1.0, 0.99, noise=0.001)] * 4)
    assert not another_round_helps([A, B], [])


def test_a_candidate_that_left_in_a_fast_period_does_not_count_as_fast():
    """B, twice as slow as A, had its turns before everything became three times as slow."""
    rounds = [_around(1.0, 2.0)] * 2 + [_around(3.0)] * 3
    seconds = {contender: step.seconds for contender, step in typical_steps([A, B], rounds).items()}
    assert seconds == pytest.approx({A: 3.0, B: 6.0})
    late = [_around(1.0)] * 2 + [_around(3.0, 6.0)] * 3  # and a latecomer not for slow
    seconds = {contender: step.seconds for contender, step in typical_steps([A, B], late).items()}
    assert seconds == pytest.approx({A: 3.0, B: 6.0})


def test_each_size_gets_the_shortest_exchange_and_ties_the_more_exact_one():
    services = {"a": {10: [1.0], 20: [2.0], 30: [1.0]}, "b": {10: [0.5], 20: [1.9], 30: [3.0]}}
    assert best_by_size(["a", "b"], services) == Assignment("a", ((10, "b"), (20, "a"), (30, "a")))
    assert best_by_size(["a"], services) is None
    assert best_by_size(["a", "b"], {"a": {10: [1.0]}, "b": {10: [2.0]}}) is None


class _OneRank:
    """Returns its own numbers; errors and times are not measured here."""

    def __init__(self):
        self.values = 0

    def agreed_sizes(self, sizes):
        return [100, 200]

    def largest(self, values):
        self.values = max(self.values, len(values))
        return self

    def read(self):
        return [-1.0] * self.values


@pytest.mark.parametrize("most", [100, 40])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_choice_is_made_within_the_limit_of_passes(count, most):
    names = [str(number) for number in range(count)]
    most = max(most, least_passes(count))
    trial = Trial(names, Assignment("0"), 0.1, most, _OneRank()).run()
    chosen = []

    def run():
        choice = yield from trial
        chosen.append(choice.candidate)

    passes = list(run())
    assert least_passes(count) <= len(passes) <= most
    assert chosen == ["0"]
    turns = {name: sum(one.timed for one in passes if one.assignment.default == name) for name in names}
    assert len(set(turns.values())) == 1  # each as often as the others
