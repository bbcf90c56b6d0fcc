"""AutoState's conclusions from times: functions of numbers that are identical on all ranks."""

import pytest

from ddp_quant_hooks.auto.choice import fastest, typical_seconds


@pytest.mark.parametrize(
    ("seconds", "best"),
    [((1.0, 1.0), "a"), ((1.0, 0.99), "a"), ((1.0, 0.95), "b"), ((0.95, 1.0), "a")],  # 1 % is noise
)
def test_fewer_bytes_need_a_real_gain(seconds, best):
    assert fastest(["a", "b"], [dict(zip("ab", seconds, strict=True))] * 3) == best


def test_what_slows_a_whole_round_does_not_count():
    rounds = [{"a": scale, "b": 0.9 * scale} for scale in (1.0, 5.0, 0.3)]
    assert fastest(["a", "b"], rounds) == "b"
    assert typical_seconds(rounds) == pytest.approx({"a": 1.0, "b": 0.9})


def test_a_slow_moment_does_not_decide():
    assert fastest(["a", "b"], [{"a": 1.0, "b": seconds} for seconds in (0.9, 9.0, 0.9)]) == "b"


def test_a_candidate_that_was_not_timed_is_not_chosen():
    assert fastest(["a", "b", "c"], [{"b": 2.0, "c": 1.0}] * 3) == "c"
    assert fastest(["a", "b"], []) == "a"
