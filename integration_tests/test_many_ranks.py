"""Predictions for many ranks: recorded messages are the real ones, and simple simulations are right."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks.link import Transport
from ddp_quant_hooks.measure.cost_model import Cluster, KernelCost, Machine, Worker
from ddp_quant_hooks.residuals import BucketResiduals
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.values import Values
from dist_utils.testing import run_ranks

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
try:
    recording, programs, routes, rings, simulation = (
        importlib.import_module(f"many_ranks.{name}")
        for name in ("recording", "programs", "routes", "rings", "simulation")
    )
finally:
    sys.path.pop(0)
import numpy as np

COUNTS = [1, 1000, 3_000_001]


class Counted(Transport):
    """The real transport, which also records its calls."""

    def __init__(self):
        self.batches = []

    def start(self, group, *, receives, sends, tag):
        self.batches.append(
            tuple(tuple((rank, tensor.nbytes) for rank, tensor in some) for some in (sends, receives))
        )
        return super().start(group, receives=receives, sends=sends, tag=tag)


def maker(world, per_node):
    return routes.planned() if per_node is None else routes.grid(world, per_node)


def really_sent(rank, counts, per_node):
    del rank
    group, world = dist.group.WORLD, dist.get_world_size()
    transport = Counted()
    make = maker(world, per_node)
    route = make(dist.get_rank(), transport)
    sent = [route.average(group, Values([torch.randn(count)]), BucketResiduals(), None) for count in counts]
    return transport.batches, sum(sent)


@pytest.mark.parametrize(("world", "per_node"), [(2, None), (3, None), (4, None), (4, 2)])
def test_recorded_messages_are_those_that_a_rank_sends(world, per_node):
    make = maker(world, per_node)
    program = programs.all_ranks(make, world, COUNTS)
    for rank, (batches, sent) in enumerate(run_ranks(really_sent, world, COUNTS, per_node)):
        schedule = recording.record(make, rank, world, COUNTS)
        recorded = [(one.sends, one.receives) for one in schedule if isinstance(one, recording.Send)]
        assert recorded == batches
        messages = [nbytes for sends, _ in batches for _, nbytes in sends if nbytes]
        assert sum(messages) == sent
        assert program.messages_of(rank) == (len(messages), sent)


@pytest.mark.parametrize(("world", "per_node"), [(5, None), (8, 2), (12, 4), (64, None), (72, 2)])
def test_few_recorded_ranks_give_the_messages_of_all(world, per_node):
    make = maker(world, per_node)
    program = programs.all_ranks(make, world, [12_345], exact=True)
    assert program.recorded < world
    batches = [step.messages for step in program.steps if isinstance(step, programs.Start)]
    for rank in range(world):
        schedule = recording.record(make, rank, world, [12_345])
        sends = [dict(one.sends) for one in schedule if isinstance(one, recording.Send)]
        assert sends == [
            dict(zip(batch.receivers[rank].tolist(), batch.bytes[rank].tolist(), strict=True))
            for batch in batches
        ]
    for batch in batches:
        steps = np.arange(len(batch.steps))
        assert (batch.receivers[batch.senders, steps] == np.arange(world)[:, None]).all()


@pytest.mark.parametrize(("world", "per_node"), [(64, None), (72, 2)])
def test_four_recorded_ranks_are_nearly_exact(world, per_node):
    exact, almost = (
        programs.all_ranks(maker(world, per_node), world, [123_456], exact=exact) for exact in (True, False)
    )
    assert almost.recorded == 4 < exact.recorded
    for one, other in zip(exact.steps, almost.steps, strict=True):
        if isinstance(one, programs.Start):
            assert (one.messages.receivers == other.messages.receivers).all()
            assert abs(one.messages.bytes - other.messages.bytes).max() <= 128 * 4, "a block, of fp32 at most"
        else:
            assert type(one) is type(other)


FREE = KernelCost(0.0, 0.0, 0.0)
NOTHING = Worker(0.0, 0.5, dict.fromkeys(("encode", "reduce", "decode", "elementwise"), FREE))
GBIT = 8e-9  # the rate of a link that carries one byte per second


def program_of(world, *steps):
    return programs.Program(world, [recording.Begin(0), *steps])


def batch(world, length, steps=None):
    steps = range(1, world) if steps is None else steps
    return programs.Messages(
        np.arange(world)[None], np.array(steps), np.full((1, world), length), of_sender=True
    )


def play(program, per_node=1, ranks=None, worker=NOTHING, **machine):
    numbers = {"latency": 0.0, "cpu_per_message": 0.0, "cpu_per_byte": 0.0, "inside": 0.0, "between": 0.0}
    cluster = Cluster(program.world, GBIT, per_node)
    return simulation.play(program, cluster, Machine(**{**numbers, **machine}), worker, ranks)[-1].tolist()


def test_messages_of_a_rank_leave_one_after_another_and_arrive_while_they_leave():
    program = program_of(3, programs.Start(0, batch(3, 10)), recording.Wait(0))
    assert play(program) == pytest.approx([20.0] * 3)
    assert play(program, latency=1.0) == pytest.approx([21.0] * 3)


def test_the_processor_starts_and_receives_messages():
    program = program_of(3, programs.Start(0, batch(3, 0)), recording.Wait(0))
    assert play(program, cpu_per_message=2.0, latency=2.0) == [0.0] * 3, "no bytes, no message"
    # Two receives and two sends start in half a second each. The last message leaves at 2 s, spends 1 s on
    # the wire and takes 1 s to receive; the previous one has arrived at 1.5 + 1 s.
    program = program_of(3, programs.Start(0, batch(3, 1)), recording.Wait(0))
    assert play(program, cpu_per_message=2.0, latency=2.0) == pytest.approx([4.5] * 3)


def test_ranks_of_a_node_share_its_link_but_not_its_inside():
    program = program_of(4, programs.Start(0, batch(4, 10)), recording.Wait(0))
    # Each of two ranks sends two messages of 10 bytes to the other node; the first rank's go first.
    assert play(program, per_node=2) == pytest.approx([30.0, 40.0, 30.0, 40.0])
    assert play(program, per_node=2, inside=5.0) == pytest.approx([50.0] * 4)
    assert play(program, per_node=4, inside=1.0) == pytest.approx([30.0] * 4)


def test_computation_during_communication_costs_nothing():
    worker = Worker(1.0, 0.5, {**NOTHING.kernels, "encode": KernelCost(2.0, 1.0, 0.5)})
    encode = recording.Compute("encode", 4, 3)  # 2 + 3 + 2 s
    program = program_of(2, programs.Start(0, batch(2, 10)), encode, recording.Wait(0), encode)
    assert play(program, worker=worker) == pytest.approx([1 + 10 + 7] * 2)
    shared = simulation.Ranks(cores=0.5, busy=1.0)
    assert play(program, worker=worker, ranks=shared) == pytest.approx([2 + 14 + 14] * 2)


def test_a_late_rank_delays_its_receivers_but_no_link():
    late = simulation.Ranks(late=np.array([0.0, 0.0, 100.0]))
    to_next = [programs.Start(number, batch(3, 10, [1])) for number in (0, 1)]
    program = program_of(3, to_next[0], to_next[1], recording.Wait(1))
    # Rank 0 receives from rank 2, which is 100 s late; the others' second messages overtake its first.
    assert play(program, ranks=late) == pytest.approx([120.0, 20.0, 100.0])


def test_a_slow_rank_works_longer():
    worker = Worker(1.0, 0.5, NOTHING.kernels)
    program = program_of(2, programs.Start(0, batch(2, 10)), recording.Wait(0))
    slower = simulation.Ranks(slower=np.array([1.0, 3.0]))
    assert play(program, worker=worker, ranks=slower) == pytest.approx([13.0, 11.0])


def test_a_ring_takes_as_long_as_its_bytes():
    values = 4 * 1000
    program = rings.ring(4, [values])
    assert program.messages_of(0) == (12, 2 * 3 * values)
    assert play(program) == pytest.approx([2 * 3 / 4 * 4 * values] * 4)
    few, all_of_them = rings.ring(9, [values], played=4), rings.ring(9, [values])
    assert play(few, latency=5.0)[0] == pytest.approx(play(all_of_them, latency=5.0)[0])


def test_buckets_follow_each_other_when_they_are_handed_over():
    one = program_of(2, programs.Start(0, batch(2, 10)), recording.Wait(0))
    program = one.followed_by(one)
    cluster, machine = Cluster(2, GBIT), Machine(0.0, 0.0, 0.0, 0.0, 0.0)
    ends = simulation.play(program, cluster, machine, NOTHING, simulation.Ranks(ready=(0.0, 50.0)))
    assert ends.tolist() == [[10.0, 10.0], [60.0, 60.0]]
    assert isinstance(routes.direct(0, Transport()), Route)
