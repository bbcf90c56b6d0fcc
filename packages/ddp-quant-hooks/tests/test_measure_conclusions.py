"""Conclusions from made-up measurements: advice, estimates of steps, predictions."""

import dataclasses

import pytest
from measured_hooks import MIB, SIZES, exchange, hooks_on, link

from ddp_quant_hooks.measure import Cluster, HookTimes, Model, advise, estimate_steps, predict
from ddp_quant_hooks.measure.cost_model import traffic
from ddp_quant_hooks.measure.interpolation import interpolated
from ddp_quant_hooks.measure.schedule import repeats_within
from ddp_quant_hooks.measure.step_model import BucketCost, bucket_sizes, play_step
from ddp_quant_hooks.plans import plan_levels


def test_a_slow_network_gets_few_bytes_with_the_numbers_that_say_so():
    advice = advise([link(1.0)], hooks_on(1.0))
    assert (advice.hook, advice.situation) == ("4 bits", "slow network")
    why = advice.reasons[0]
    assert "fp32 takes 210 ms for 25 MiB on a link with 1 Gbit/s each way" in why
    assert "4 bits sends 0.16 of the bytes in 32.9 ms, 6.38 times as fast" in why
    assert "wrong by 0.1 of their length" in advice.reasons[-1]


@pytest.mark.parametrize(("work", "taken"), [(2.2e-3, "8 bits"), (1.8e-3, "8 bits"), (1.6e-3, "4 bits")])
def test_large_errors_must_gain_more(work, taken):
    hooks = hooks_on(1.0, work={"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": work})
    times = {hook.name: hook.exchanges[-1].seconds for hook in hooks}
    assert (times["4 bits"] <= 0.8 * times["8 bits"]) == (taken == "4 bits")
    assert advise([link(1.0)], hooks).hook == taken


def test_a_fast_network_with_free_processors_gains_nothing():
    hooks = hooks_on(100.0, work={"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": 9e-4}, fixed=2e-2)
    advice = advise([link(100.0)], hooks)
    assert (advice.hook, advice.situation) == ("fp32", "fast network")
    assert "Fewer bytes are not clearly faster: bf16 " in advice.reasons[0]


@pytest.mark.parametrize("how", ["works itself", "as an accelerator"])
def test_a_busy_processor_is_named(how):
    hooks = hooks_on(100.0, lost=0.0)
    if how == "as an accelerator":
        hooks = [
            HookTimes(
                hook.name,
                hook.pattern,
                [
                    exchange(one.size, one.seconds, cpu=0.0, sent=one.bytes_sent, lost=0.7 * one.seconds)
                    for one in hook.exchanges
                ],
            )
            for hook in hooks
        ]
    advice = advise([link(100.0)], hooks)
    assert (advice.hook, advice.situation) == ("fp32", "busy processor")
    assert ("processor time" if how == "works itself" else "computation beside it loses") in advice.reasons[0]


def test_ranks_that_share_cores_keep_them_busy_together():
    hooks = hooks_on(100.0, work={"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": 9e-4}, fixed=4e-2)
    share = hooks[0].exchanges[-1].cpu_seconds / hooks[0].exchanges[-1].seconds
    assert 0.5 / 4 < share < 0.5
    assert advise([link(100.0)], hooks).situation == "fast network"
    assert advise([link(100.0)], hooks, cores_per_rank=4.0).situation == "fast network"
    advice = advise([link(100.0)], hooks, cores_per_rank=0.25)
    assert advice.situation == "busy processor"
    assert "with 0.25 of a core for each rank" in advice.reasons[0]


def test_buckets_too_small_to_gain_are_named():
    hooks = hooks_on(1.0)
    few = [hook for hook in hooks if hook.name in ("fp32", "8 bits")]
    slow_start = dataclasses.replace(few[1].exchanges[0], seconds=0.05, quartiles=(0.05, 0.05))
    few[1] = HookTimes("8 bits", "direct", [slow_start, *few[1].exchanges[1:]])
    advice = advise([link(1.0)], few)
    assert advice.hook == "8 bits"
    (about,) = [reason for reason in advice.reasons if reason.startswith("Buckets too small")]
    assert "with 1 MiB (50 ms instead of 8.59 ms)" in about
    assert "5 MiB" not in about


def test_sizes_that_were_not_measured_with_all_hooks_do_not_count():
    hooks = hooks_on(1.0)
    hooks[0] = HookTimes("fp32", "ring", hooks[0].exchanges[:2])
    assert "for 5 MiB" in advise([link(1.0)], hooks).reasons[0]
    hooks[0] = HookTimes("fp32", "ring", [])
    with pytest.raises(ValueError, match="no bucket size was measured with all hooks"):
        advise([link(1.0)], hooks)


def test_with_a_model_the_estimated_step_decides():
    hooks = hooks_on(1.0)
    hidden = Model(parameters=7_000_000, step_seconds=10.0)
    estimate = estimate_steps(hooks, hidden)
    advice = advise([link(1.0)], hooks, estimate)
    assert advice.hook == "fp32", "a step of 10 s hides all of it"
    assert advice.reasons[0].startswith("A step is estimated to take ")
    assert advice.situation == "slow network", "it is, though nobody waits for it"
    assert "Fewer bytes arrive sooner, but the step is not clearly shorter: bf16 " in advice.reasons[1]
    assert advise([link(1.0)], hooks).hook == "4 bits"
    urgent = estimate_steps(hooks, Model(7_000_000, 0.1))
    gain = 1 - urgent.steps["4 bits"].seconds / urgent.steps["8 bits"].seconds
    assert 0.05 < gain < 0.2, "too little for errors of 10 %"
    assert advise([link(1.0)], hooks, urgent).hook == "8 bits"


def test_a_hook_that_gains_in_the_step_alone_is_not_called_faster():
    hooks = [hook for hook in hooks_on(1.0) if hook.name in ("fp32", "8 bits")]
    slow_end = dataclasses.replace(hooks[1].exchanges[-1], seconds=0.3, quartiles=(0.3, 0.3))
    hooks[1] = HookTimes("8 bits", "direct", [*hooks[1].exchanges[:-1], slow_end])
    advice = advise([link(1.0)], hooks, estimate_steps(hooks, Model(500_000, 0.01)))
    assert advice.hook == "8 bits"
    assert "in 300 ms, not sooner, but the step is shorter" in advice.reasons[1]


def test_buckets_are_those_of_ddp():
    assert bucket_sizes(7_000_000) == [MIB, 25 * MIB, 28_000_000 - 26 * MIB]
    assert bucket_sizes(1000) == [4000]
    assert sum(bucket_sizes(123_456_789)) == 4 * 123_456_789


def test_a_step_that_hides_all_but_the_last_bucket():
    buckets = [BucketCost(MIB, 0.02, 0.02, 0.0)] * 4
    step = play_step(0.6, buckets)  # 0.4 s of backward, 0.1 s for each bucket
    assert step.exposed == pytest.approx(0.02)
    assert step.seconds == pytest.approx(0.62)
    assert step.contention == pytest.approx(0.0)


def test_a_step_whose_buckets_queue_up():
    step = play_step(0.6, [BucketCost(MIB, 0.3, 0.3, 0.0)] * 4)
    assert step.seconds == pytest.approx(0.2 + 0.1 + 4 * 0.3), "from the first bucket on the wire is busy"
    assert step.exposed == pytest.approx(0.1 + 4 * 0.3 - 0.4)


def test_a_step_whose_communication_takes_time_from_backward():
    # One bucket is averaged beside the second half of backward: 0.1 s, of which computation loses half.
    step = play_step(0.3, [BucketCost(MIB, 0.04, 0.1, 0.05), BucketCost(MIB, 0.04, 0.1, 0.05)])
    assert step.contention == pytest.approx(0.05)
    assert step.exposed == pytest.approx(0.04), "after backward nothing is computed beside it"
    assert step.seconds == pytest.approx(0.3 + 0.05 + 0.04)


def test_the_rest_of_an_exchange_after_backward_runs_alone():
    # 0.1 s of backward are left for an exchange of 0.2 s: half is done, the rest takes half of 0.12 s.
    step = play_step(0.3, [BucketCost(MIB, 0.12, 0.2, 0.0), BucketCost(MIB, 0.0, 0.0, 0.0)])
    assert step.exposed == pytest.approx(0.06)


def test_copies_into_buckets_and_back_belong_to_a_step():
    step = play_step(0.3, [BucketCost(1000, 0.0, 0.0, 0.0)], copy_per_byte=1e-5)
    assert step.seconds == pytest.approx(0.3 + 2 * 0.01)
    assert step.copying == pytest.approx(0.02)


def test_times_between_sizes_are_on_lines_and_never_negative():
    points = [(1.0, 2.0), (5.0, 4.0), (25.0, 24.0)]
    assert [interpolated(points, at) for at in (1, 3, 5, 15, 35)] == pytest.approx([2, 3, 4, 14, 34])
    assert interpolated([(1.0, 1.0), (2.0, 4.0)], 0.5) == 0.0
    assert interpolated([(2.0, 3.0)], 4.0) == 6.0


def test_repeats_fit_a_budget_and_short_runs_leave_theirs_to_long_ones():
    wanted = dict.fromkeys(range(3), 20)
    repeats = repeats_within({0: 0.01, 1: 1.0, 2: 8.0}, wanted, 20.0)
    assert repeats == {0: 20, 1: 9, 2: 1}
    assert repeats_within({0: 0.01, 1: 30.0}, {0: 20, 1: 20}, 20.0) == {0: 20, 1: 0}
    assert repeats_within({0: 1.0}, {0: 5}, -3.0) == {0: 0}


@pytest.mark.parametrize("gbit", [0.1, 1.0, 25.0])
def test_the_measured_cluster_is_predicted_as_it_was_measured(gbit):
    hooks, links = hooks_on(gbit), [link(gbit, latency=0.0)]
    prediction = predict(links, hooks, [[0], [1]], Cluster(2, gbit))
    for hook in hooks:
        measured = {one.size: one.seconds for one in hook.exchanges}
        assert prediction.predicted_seconds[hook.name] == pytest.approx(measured, rel=0.02)


def test_what_was_measured_on_a_slow_link_predicts_a_faster_one():
    prediction = predict([link(1.0)], hooks_on(1.0), [[0], [1]], Cluster(2, 10.0))
    truth = {hook.name: hook.exchanges[-1].seconds for hook in hooks_on(10.0)}
    found = {name: seconds[SIZES[-1]] for name, seconds in prediction.predicted_seconds.items()}
    assert found == pytest.approx(truth, rel=0.1)


def test_ranks_of_a_node_share_its_link():
    hooks, links = hooks_on(1.0), [link(1.0)]
    alone = predict(links, hooks, [[0], [1]], Cluster(8, 1.0)).predicted_seconds
    packed = predict(links, hooks, [[0], [1]], Cluster(64, 1.0, ranks_per_node=8)).predicted_seconds
    size = SIZES[-1]
    # Around a ring one rank of a node sends to the next node: 2 * 63 / 64 instead of 2 * 7 / 8 of the bytes.
    assert packed["fp32"][size] == pytest.approx(alone["fp32"][size] * 63 / 64 * 8 / 7, rel=0.1)
    # In levels, the first of them inside nodes, each rank of a node sends an eighth of what a single rank
    # does.
    assert packed["8 bits"][size] == pytest.approx(alone["8 bits"][size], rel=0.1)
    # A grid sends the same amount between nodes, and fp32 inside.
    assert alone["8 bits"][size] < packed["8 bits between nodes"][size] < packed["fp32"][size]
    assert packed["4 bits between nodes"][size] < packed["8 bits between nodes"][size]


def test_without_levels_ranks_of_a_node_share_what_all_send():
    hooks, links = hooks_on(1.0), [link(1.0)]
    alone = predict(links, hooks, [[0], [1]], Cluster(2, 1.0)).predicted_seconds["8 bits"][SIZES[-1]]
    packed = predict(links, hooks, [[0], [1]], Cluster(16, 1.0, ranks_per_node=8)).predicted_seconds
    # All eight send to 8 of 15 others: 8 * 8 / 15 of 2 * 15 / 16 of the bytes.
    assert packed["8 bits"][SIZES[-1]] == pytest.approx(alone * 8, rel=0.1)


def test_messages_are_those_that_the_hooks_plan():
    size = 25 * MIB
    assert traffic("direct", size, 0.26, Cluster(4, 1.0)).messages == 2 * 6 * 3, "six chunks"
    many = Cluster(1024, 1.0, ranks_per_node=8)
    planned = plan_levels(1024, size // 4, 8)
    moved = traffic("direct", size, 0.26, many)
    assert moved.rounds == 2 * len(planned.sizes) > 2
    assert moved.messages <= 2 * 1023, "no more than around a ring"
    assert traffic("direct", size, 0.26, Cluster(10**9, 1.0)).messages < 2 * 10**9
    assert moved.between == pytest.approx(2 * 127 / 128 * size * 0.26), "what a node sends at least"
    assert traffic("direct", size, 0.26, Cluster(2, 1.0), on_streams=True).messages == 1


def test_predicted_steps_need_a_model_and_say_what_they_stand_on():
    hooks, links = hooks_on(1.0), [link(1.0)]
    assert predict(links, hooks, [[0], [1]], Cluster(8, 1.0)).predicted_steps == {}
    prediction = predict(links, hooks, [[0], [1]], Cluster(2, 1.0), Model(7_000_000, 0.2))
    estimated = estimate_steps(hooks, Model(7_000_000, 0.2)).steps
    for name, step in prediction.predicted_steps.items():
        assert step.seconds == pytest.approx(estimated[name].seconds, rel=0.05)
    assert "1 Gbit/s in each direction, as given" in prediction.assumptions[0]
    assert "none were measured here" in prediction.assumptions[2]


def test_nodes_of_different_sizes_can_predict_too():
    links = [link(40.0, place="inside nodes"), link(1.0)]
    prediction = predict(links, hooks_on(1.0, world=3), [[0, 1], [2]], Cluster(4, 10.0))
    assert prediction.predicted_seconds["fp32"][SIZES[-1]] < hooks_on(1.0, world=3)[0].exchanges[-1].seconds


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(1, 1.0), "world must be at least 2 and at most 1e.09, got 1"),
        (lambda: Cluster(10**400, 1.0), "world must be at least 2 and at most 1e.09, got 1"),
        (lambda: Cluster(8, 0.0), "gbit must be positive and finite, got 0.0"),
        (lambda: Cluster(8, float("inf")), "gbit must be positive and finite, got inf"),
        (lambda: Cluster(8, 1.0, 3), "ranks_per_node must divide world, got 3 and 8"),
        (lambda: Model(0, 1.0), "parameters must be positive, got 0"),
        (lambda: Model(10**400, 1.0), "parameters must be at most 1e.12, got 1"),
        (lambda: Model(float("inf"), 1.0), "parameters must be at most 1e.12, got inf"),
        (lambda: Model(10, float("nan")), "step_seconds must be positive and finite, got nan"),
        (lambda: Model(10, float("inf")), "step_seconds must be positive and finite, got inf"),
    ],
)
def test_what_no_cluster_or_model_has_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
