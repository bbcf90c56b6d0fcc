"""Conclusions from made-up measurements: advice, warnings, the kind of cluster, estimates of steps."""

import dataclasses

import pytest

from ddp_quant_hooks.measure import Exchange, Link, Model, StepTimes, advise, estimate_steps
from ddp_quant_hooks.measure.advice import bucket_sizes, play_step, warn_of_links
from ddp_quant_hooks.measure.links import describe_cluster

MIB = 1 << 20
SIZES = (MIB, 5 * MIB, 25 * MIB)
RATIOS = {"fp32": 1.0, "bf16": 0.5, "8 bits": 0.2578, "4 bits": 0.156}
ERRORS = {"fp32": 3e-8, "bf16": 2.5e-3, "8 bits": 6.5e-3, "4 bits": 0.1}


def link(gbit, *, place="between hosts"):
    return Link(place, 1e-4, gbit * 1e9 / 8)


def exchange(size, seconds, *, cpu=0.0, sent=0, error=1e-3, lost=0.0, beside=None, on_host_link=0):
    return Exchange(
        size=size,
        seconds=seconds,
        quartiles=(0.99 * seconds, 1.01 * seconds),
        cpu_seconds=cpu,
        seconds_beside=seconds if beside is None else beside,
        seconds_lost=lost,
        repeats=9,
        bytes_sent=int(sent),
        bytes_on_host_link=int(on_host_link),
        relative_error=error,
    )


def hooks_on(gbit, *, work=None, fixed=2e-4, lost=0.1):
    """Return hooks between two hosts; an exchange takes the time of the wire or of the processor if longer.

    ``work`` is processor seconds for a MiB of the bucket, by name; sending takes 0.5 ns a byte besides.
    """
    work = work or {"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": 9e-4}
    found = {}
    for name, ratio in RATIOS.items():
        found[name] = []
        for size in SIZES:
            sent = size * ratio
            cpu = work[name] * size / MIB + 0.5e-9 * sent
            seconds = fixed + max(sent * 8e-9 / gbit, cpu)
            found[name].append(
                exchange(size, seconds, cpu=cpu, sent=sent, error=ERRORS[name], lost=lost * seconds)
            )
    return found


def test_a_slow_network_gets_few_bytes_with_the_numbers_that_say_so():
    advice = advise([link(1.0)], hooks_on(1.0))
    assert (advice.hook, advice.situation) == ("4 bits", "slow network")
    why = advice.reasons[0]
    assert "fp32 takes 210 ms for 25 MiB on a link with 1 Gbit/s each way" in why
    assert "4 bits sends 0.16 of the bytes in 32.9 ms, 6.38 times as fast" in why
    assert "wrong by 0.1 of their length" in advice.reasons[-1]


@pytest.mark.parametrize(("work", "taken"), [(1.8e-3, "8 bits"), (1.6e-3, "4 bits")])
def test_large_errors_must_gain_more(work, taken):
    hooks = hooks_on(1.0, work={"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": work})
    times = {name: exchanges[-1].seconds for name, exchanges in hooks.items()}
    assert (times["4 bits"] <= 0.8 * times["8 bits"]) == (taken == "4 bits")
    assert advise([link(1.0)], hooks).hook == taken


@pytest.mark.parametrize(("cores", "situation"), [(1.0, "fast network"), (0.25, "busy processor")])
def test_a_fast_network_gains_nothing_and_ranks_that_share_cores_keep_them_busy(cores, situation):
    hooks = hooks_on(100.0, fixed=2e-2)
    advice = advise([link(100.0)], hooks, cores_per_rank=cores)
    assert (advice.hook, advice.situation) == ("fp32", situation)
    assert advice.reasons[0].startswith("fp32 takes 33.1 ms for 25 MiB"), "measured, whatever the links are"
    assert "Fewer bytes are not clearly faster: bf16 " in advice.reasons[0]
    assert ("with 0.25 of a core for each rank" in advice.reasons[0]) == (cores < 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({}, "processor time"), ({"cpu_seconds": 0.0, "seconds_lost": 0.02}, "computation beside it loses")],
    ids=["works itself", "as an accelerator"],
)
def test_a_busy_processor_is_named(changes, why):
    hooks = hooks_on(100.0, lost=0.0)
    hooks = {name: [dataclasses.replace(one, **changes) for one in found] for name, found in hooks.items()}
    advice = advise([link(100.0)], hooks)
    assert (advice.hook, advice.situation) == ("fp32", "busy processor")
    assert why in advice.reasons[0]


def test_buckets_too_small_to_gain_are_named():
    few = {name: hooks_on(1.0)[name] for name in ("fp32", "8 bits")}
    few["8 bits"][0] = dataclasses.replace(few["8 bits"][0], seconds=0.05, quartiles=(0.05, 0.05))
    advice = advise([link(1.0)], few)
    assert advice.hook == "8 bits"
    (about,) = [reason for reason in advice.reasons if reason.startswith("Buckets too small")]
    assert "with 1 MiB (50 instead of 8.59 ms)" in about
    assert "5 MiB" not in about


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


def test_buckets_are_those_of_ddp():
    assert bucket_sizes(7_000_000) == [MIB, 25 * MIB, 28_000_000 - 26 * MIB]
    assert bucket_sizes(1000) == [4000]
    assert sum(bucket_sizes(123_456_789)) == 4 * 123_456_789


@pytest.mark.parametrize(
    ("compute", "buckets", "copy_per_byte", "expected"),
    [
        # 0.4 s of backward, 0.1 s for each bucket: it hides all but the last one.
        (0.6, [exchange(MIB, 0.02)] * 4, 0.0, StepTimes(0.62, 0.02, 0.0, 0.0)),
        # From the first bucket on the wire is busy: buckets queue up.
        (0.6, [exchange(MIB, 0.3)] * 4, 0.0, StepTimes(0.2 + 0.1 + 4 * 0.3, 0.1 + 4 * 0.3 - 0.4, 0.0, 0.0)),
        # One bucket is averaged beside the second half of backward: 0.1 s, of which computation loses half.
        # After backward nothing is computed beside the other.
        (0.3, [exchange(MIB, 0.04, beside=0.1, lost=0.05)] * 2, 0.0, StepTimes(0.39, 0.04, 0.05, 0.0)),
        # 0.1 s of backward are left for an exchange of 0.2 s: half is done, the rest takes half of 0.12 s.
        (0.3, [exchange(MIB, 0.12, beside=0.2), exchange(MIB, 0.0)], 0.0, StepTimes(0.36, 0.06, 0.0, 0.0)),
        (0.3, [exchange(1000, 0.0)], 1e-5, StepTimes(0.32, 0.0, 0.0, 0.02)),  # copies to buckets and back
    ],
    ids=["hidden", "queue", "contention", "rest alone", "copies"],
)
def test_a_step_is_played_bucket_by_bucket(compute, buckets, copy_per_byte, expected):
    found = play_step(compute, buckets, copy_per_byte)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_times_between_sizes_are_on_lines_and_never_negative():
    def steps(*points):
        """Return estimated communication of buckets that are not hidden."""
        hooks = {"one": [exchange(size, seconds) for size, seconds in points]}
        return lambda size: estimate_steps(hooks, Model(size // 4, 1e-9)).steps["one"].exposed

    measured = steps((MIB // 4, 2.0), (MIB // 2, 4.0), (MIB, 24.0))
    sizes = (MIB // 4, 3 * MIB // 8, MIB // 2, 3 * MIB // 4)
    assert [measured(size) for size in sizes] == pytest.approx([2, 3, 4, 14])
    assert steps((MIB // 2, 1.0), (MIB, 4.0))(MIB // 8) == 0.0
    assert steps((MIB // 2, 3.0))(MIB) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("parameters", "step_seconds", "message"),
    [
        (0, 1.0, "parameters must be positive and at most 1e12, got 0"),
        (10, float("nan"), "step_seconds must be positive and finite, got nan"),
    ],
)
def test_what_no_model_has_is_refused(parameters, step_seconds, message):
    with pytest.raises(ValueError, match=message):
        Model(parameters, step_seconds)


def test_a_hook_that_moves_more_over_a_hosts_link_than_plain_ddp_is_named():
    # Eight ranks on each of two hosts: an fp32 ring moves 7.5 bytes a value, 8 bits from all to all 8.25.
    moved = {"fp32": 7.5, "bf16": 3.75, "8 bits": 8.25}
    hooks = {name: [exchange(MIB, 1.0, on_host_link=count * MIB / 4)] for name, count in moved.items()}
    (warning,) = warn_of_links(hooks)
    assert warning == "8 bits moves 8.25 bytes a value over a host's link, plain DDP 7.50"


@pytest.mark.parametrize(
    ("hosts", "inside", "text"),
    [
        ([0, 0, 0, 0], 80.0, "one host with 4 ranks and slow links inside it: 80 Gbit/s each way"),
        ([0, 0], 400.0, "one host with 2 ranks and fast links inside it: 400 Gbit/s each way"),
        (
            [0, 1, 0, 1],
            400.0,
            "2 hosts with 2 ranks each: 400 Gbit/s each way inside, 10 Gbit/s each way between",
        ),
        ([0, 0, 1], 400.0, "2 hosts with 1 to 2 ranks each: "),
        ([0, 1, 2], None, "3 hosts with one rank each: 10 Gbit/s each way between hosts"),
    ],
)
def test_the_kind_of_cluster_is_said(hosts, inside, text):
    links = [link(10.0), *([] if inside is None else [link(inside, place="inside hosts")])]
    assert describe_cluster(hosts, links[::-1]).startswith(text)
