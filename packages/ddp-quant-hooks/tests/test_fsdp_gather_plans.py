"""What a shard is on the wire, and the ways of messages: checked without any communication."""

import itertools
import random

import pytest
import torch
from kernel_cases import decoded, encoded, random_values

from ddp_quant_hooks.fsdp.gather_plan import plan_route, shard_format
from ddp_quant_hooks.kernels import Layout

LAYOUT = Layout("int8", 128, rotate=True)


def _placements():
    for ranks in range(2, 7):
        yield from itertools.product(range(3), repeat=ranks)
    for seed in range(20):
        chance = random.Random(seed)
        yield tuple(chance.randrange(chance.choice([1, 3, 16])) for _ in range(chance.randrange(7, 65)))


def test_every_message_enters_every_host_once_and_comes_to_every_rank():
    for hosts in _placements():
        ranks = range(len(hosts))
        routes = [plan_route(hosts, rank) for rank in ranks]
        has = [{rank} for rank in ranks]
        entered = dict.fromkeys(itertools.product(ranks, set(hosts)), 0)
        for sender, route in enumerate(routes):
            assert sorted(route.order) == [*ranks]
            for receiver in route.sends:
                assert sender in routes[receiver].receives
                has[receiver].add(sender)
                entered[sender, hosts[receiver]] += hosts[receiver] != hosts[sender]
        assert [len(route.receives) for route in routes] == [len(known) - 1 for known in has]
        for rank, route in enumerate(routes):
            for peer, span in route.handed_on:
                assert hosts[peer] == hosts[rank]
                given, sent = route.order[span.start : span.stop], routes[peer].hands_on
                assert given == routes[peer].order[sent.start : sent.stop], "in the same order at both ends"
                assert {*given} <= has[peer], "a rank hands on what it has"
                assert not {*given} & has[rank], "and nobody gets a message twice"
                has[rank] |= {*given}
        assert has == [{*ranks}] * len(hosts), hosts
        assert all(count == (host != hosts[sender]) for (sender, host), count in entered.items()), hosts


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_ranks_of_equal_hosts_send_equally_much(ranks):
    for inside in (1, 2, 8):
        if ranks % inside == 0 and ranks > inside:
            hosts = tuple(rank // inside for rank in range(ranks))
            sent = {plan_route(hosts, rank).messages_sent for rank in range(ranks)}
            assert sent == {ranks // inside - 1 + (inside - 1) * (ranks // inside)}


PARAMETERS = {
    "one run": [(256, False), (128, False), (384, False)],
    "a run for each": [(100, False), (1, False), (129, False)],
    "exact ones between": [(256, False), (128, True), (130, False), (3, True), (2, True), (64, False)],
    "exact ones around": [(5, True), (300, False), (7, True)],
    "an empty shard": [(0, False), (128, False), (0, True), (5, False)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_rounded_by_itself_or_not_at_all(name, dtype):
    parameters = PARAMETERS[name]
    form = shard_format(tuple(parameters), LAYOUT, dtype.itemsize)
    lengths = [length for length, _ in parameters]
    assert sum(form.runs) == sum(lengths)
    order = (2, 0, 1)
    shards = [random_values(sum(lengths), seed).to(dtype) for seed in range(3)]
    memory = torch.zeros(3 * form.message_bytes, dtype=torch.uint8)
    for row, rank in enumerate(order):
        form.encode(shards[rank], memory.view(3, -1)[row])
    found = torch.full((3 * sum(lengths),), torch.nan, dtype=dtype)
    form.decode(memory, order, found)
    for shard, result in zip(shards, found.view(3, -1), strict=True):
        parts = zip(parameters, shard.split(lengths), result.split(lengths), strict=True)
        for (length, exact), before, after in parts:
            alone = before if exact else decoded([encoded(before, LAYOUT)], length, LAYOUT, dtype)
            assert torch.equal(after, alone)


def test_aligned_neighbors_are_one_run_so_that_many_ranks_need_few_kernel_calls():
    assert len(shard_format(((256, False),) * 9, LAYOUT, 4).runs) == 1
    assert shard_format(((256, False), (100, False), (28, False)), LAYOUT, 4).runs == (356, 28)


def test_an_exact_value_that_is_not_finite_costs_its_neighbors_nothing():
    form = shard_format(((128, True), (128, False)), LAYOUT, 4)
    shard = random_values(256, 0)
    shard[3] = torch.inf
    message, found = torch.zeros(form.message_bytes, dtype=torch.uint8), torch.empty(256)
    form.encode(shard, message)
    form.decode(message, (0,), found)
    assert torch.equal(found[:128], shard[:128])
    assert found[128:].isfinite().all()
