"""Ranks that share hosts, in any number and order: few bytes between hosts, identical bits on all ranks."""

import copy
import logging
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from host_names import take_host_name
from kernel_cases import decoded, differences, encoded, reduced
from quant_buckets import flat_residuals, rank_values, run_hook, simulate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    HierarchicalAllreduceState,
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from ddp_quant_hooks.exchange.placement import choose_placement, link_inside_host
from dist_utils.testing import grad_bucket, run_ranks, same_on_all_ranks


def _state(hosts, **options):
    """Return a state that is told which ranks share a host."""
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in sorted(set(hosts))]
    groups = [dist.new_group(node) for node in nodes]
    mine = next(group for node, group in zip(nodes, groups, strict=True) if dist.get_rank() in node)
    return HierarchicalAllreduceState(intra_group=mine, **{"min_bytes": 0, **options})


def _shares(state, inputs, hosts):
    """Return what each host contributes; the mean over hosts of all of it, and its multiple that is the mean.

    No host contributes more than its largest value.
    """
    shares = []
    most = max(map(hosts.count, hosts)) * len(set(hosts)) / len(hosts)
    enlarge = 1 if most <= 1 else 2
    for host in sorted(set(hosts)):
        parts = [values for values, name in zip(inputs, hosts, strict=True) if name == host]
        if state.options.intra_node == "quantized":
            layout = state.options.scatter_layout
            share = decoded([encoded(one, layout) for one in parts], inputs[0].numel(), layout)
            share *= len(set(hosts)) / len(hosts) / enlarge * len(parts)
        else:
            scale = 2.0 ** -(len(parts) - 1).bit_length()
            share = torch.zeros(inputs[0].numel())
            for part in parts:
                share.add_(part, alpha=scale)
            share *= len(set(hosts)) / len(hosts) / enlarge / scale
        shares.append(share)
    return shares, enlarge


def _expected(state, inputs, hosts):
    shares, enlarge = _shares(state, inputs, hosts)
    if state.options.intra_node == "quantized" and len(shares) == 2:  # rounded before: the mean has an owner
        layout, gather, count = state.options.scatter_layout, state.options.gather_layout, len(shares[0])
        mean = reduced([encoded(share, layout) for share in shares], count, layout, gather)
        return decoded([mean], count, gather) * enlarge
    return simulate(state, shares) * enlarge


LENGTHS = (1, 130, 12_345, 1_400_000)
"""The last one has several chunks."""


def _bits(rank, hosts):
    """Compare averages on hosts with the formula."""
    bucket = grad_bucket([torch.ones(3)])
    for inside in ("full", "quantized"):
        state = _state(hosts, intra_node=inside)
        for length, dtype in zip(LENGTHS, cycle([torch.float32, torch.bfloat16]), strict=False):
            inputs = rank_values(length, dtype)
            result = run_hook(state, bucket, inputs[rank].clone())
            expected = _expected(state, inputs, hosts).to(dtype)
            assert differences({"mean": result}, {"mean": expected}) == {}, (inside, length)
            if length == LENGTHS[-1]:
                continue
            whole = torch.cat([inputs[rank].roll(peer) for peer in range(len(hosts))])
            shard = torch.empty(length, dtype=dtype)
            reduce_scatter_tensor(shard, whole, dist.ReduceOp.AVG, state)
            mean = sum(values.double().roll(rank) for values in inputs) / len(hosts)
            assert (shard - mean).abs().max() <= 2 * 6 / 254 + 0.02 * (dtype is torch.bfloat16)
        smallest = torch.full((300,), 2.0**-24, dtype=torch.float16)
        assert torch.equal(run_hook(state, bucket, smallest.clone()), smallest)
        parts = list(rank_values(3000)[rank].split([1000, 2000]))
        all_reduce(parts, dist.ReduceOp.AVG, state)
        assert torch.equal(torch.cat(parts), run_hook(state, bucket, rank_values(3000)[rank].clone()))
        broken = rank_values(1000)
        broken[-1][500] = torch.nan
        result = run_hook(state, bucket, broken[rank].clone())
        assert same_on_all_ranks(result)
        assert result.isnan().nonzero().flatten().tolist() == list(range(384, 512))
        state.close()


@pytest.mark.parametrize(
    "hosts", ["010", *(pytest.param(hosts, marks=pytest.mark.exhaustive) for hosts in ("0101", "00111"))]
)
def test_every_rank_gets_the_bits_of_the_formula(hosts):
    run_ranks(_bits, len(hosts), hosts, timeout=200)


def _on_a_host(rank, hosts):
    """Return the mean, and the bytes to other hosts for a value, of the default and of other states."""
    if not take_host_name(hosts[rank]):
        return None
    values, found = 128 * 60 * len(hosts), {}
    states = {
        "default": QuantizedAllreduceState(min_bytes=0),
        "nodes": _state(hosts),
        "flat": QuantizedAllreduceState(min_bytes=0, intra_node="flat"),
    }
    for name, state in states.items():
        mean = run_hook(state, grad_bucket([torch.ones(3)]), rank_values(values)[rank])
        found[name] = mean, state.statistics.bytes_between_hosts / values
        state.close()
    return found


@pytest.mark.parametrize("hosts", ["0011", pytest.param("00111", marks=pytest.mark.exhaustive)])
def test_the_default_knows_which_ranks_share_a_host(hosts):
    found = run_ranks(_on_a_host, len(hosts), hosts, timeout=100)
    if found[0] is None:
        pytest.skip("this user cannot give a process a host name of its own")
    expected = found[0]["nodes"][0]
    sent = {name: [0.0, 0.0] for name in found[0]}
    for host, of_rank in zip(hosts, found, strict=True):
        assert differences({"mean": of_rank["default"][0]}, {"mean": expected}) == {}
        for name, (_, size) in of_rank.items():
            sent[name][int(host)] += size
    assert sent["default"] == sent["nodes"]
    # Between two hosts each sends each value once, in 8 bits and with a scale for 128 values. Flat, each rank
    # sends its values to the owners on the other host, and the means of its shard to all of its ranks.
    assert max(sent["default"]) <= 1.01 * (1 + 4 / 128)
    ranks = len(hosts)
    each_way = [2 * hosts.count(host) * (ranks - hosts.count(host)) / ranks for host in "01"]
    assert sent["flat"] == pytest.approx([(1 + 4 / 128) * values for values in each_way], rel=0.01)


def test_what_is_chosen_and_why_is_logged_once(caplog):
    memory, nvlink, unknown = "the host's memory", "NVLink", "a link of unknown speed"
    hosts = [0, 0, 1, 1]
    cases = [
        (hosts, [memory] * 4, "auto", "full", "in full precision inside a host (the host's memory)"),
        (hosts, [nvlink] * 4, "auto", "full", "in full precision inside a host (NVLink)"),
        (
            hosts,
            [nvlink] * 3 + [unknown],
            "auto",
            "quantized",
            "in 8 bits inside a host (NVLink and a link of",
        ),
        (hosts, [unknown] * 4, "full", "full", "in full precision inside a host (as intra_node says)"),
        (hosts, [nvlink] * 4, "flat", "flat", "in 8 bits, each with all others (as intra_node says)"),
        ([0, 0, 0, 1], [nvlink] * 3 + [unknown], "auto", "full", "in full precision inside a host (NVLink)"),
        ([0, 0, 0, 0], [nvlink] * 4, "auto", "flat", "is likely as fast"),
    ]
    for where, links, wanted, inside, line in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert choose_placement("S", where, links, wanted, 8).inside == inside
        (message,) = caplog.messages
        assert line in message
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert choose_placement("S", [0, 1, 2], [unknown] * 3, "auto", 8).inside == "flat"
        assert choose_placement("S", [0, 0, 0], [memory] * 3, "auto", 8).inside == "flat"
    assert not caplog.text


class _Gpu:
    """A GPU as the driver's library tells of it."""

    def __init__(self, number):
        self.uuid_without_prefix = f"gpu-{number}"


@pytest.mark.parametrize(
    ("gpus", "joined", "expected"),
    [
        ([0, 1, 2], {1, 2}, "NVLink"),
        ([0, 1, 2], {1}, "a link of unknown speed"),
        ([0], set(), "a link of unknown speed"),
        ([1, 2], {1, 2}, "a link of unknown speed"),  # this process has a part of a GPU
        (None, set(), "a link of unknown speed"),  # there is no driver
    ],
)
def test_nvlink_is_what_the_driver_says_of_all_pairs(monkeypatch, gpus, joined, expected):
    system = pytest.importorskip("cuda.core.system", reason="needs the extra cuda")
    typing = pytest.importorskip("cuda.core.system.typing")

    def all_devices():
        if gpus is None:
            raise RuntimeError("no driver")
        return map(_Gpu, gpus)

    def status(one, other, kind):
        assert (one.uuid_without_prefix, typing.GpuP2PCapsIndex(kind)) == (
            "gpu-0",
            typing.GpuP2PCapsIndex.NVLINK,
        )
        number = int(other.uuid_without_prefix.removeprefix("gpu-"))
        return typing.GpuP2PStatus.OK if number in joined else typing.GpuP2PStatus.NOT_SUPPORTED

    monkeypatch.setattr(system, "Device", SimpleNamespace(get_all_devices=all_devices))
    monkeypatch.setattr(system, "get_p2p_status", status)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="gpu-0"))
    assert link_inside_host("cuda", on_host=False) == expected
    assert link_inside_host("cuda", on_host=True) == "the host's memory"


def _wrong_nodes(rank):
    """Nodes that do not fit are refused on every rank, and a single one changes nothing."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 3], [1, 2])]
    mine = pairs[rank // 2]
    with pytest.raises(ValueError, match="needs either mesh or intra_group"):
        HierarchicalAllreduceState()
    with pytest.raises(ValueError, match="needs either mesh or intra_group"):
        HierarchicalAllreduceState(intra_group=mine, mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="two dimensions"):
        HierarchicalAllreduceState(mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError, match="and others of process_group"):
        HierarchicalAllreduceState(mine, intra_group=dist.group.WORLD)
    # Each rank's group looks right alone; together they are not: ranks 0 and 3 cross over.
    crossed = HierarchicalAllreduceState(intra_group=pairs[2] if rank in {0, 3} else mine, min_bytes=0)
    told = r"rank 1 of the process group has intra_group \[0, 1\], and rank 0 \[0, 3\]"
    with pytest.raises(RuntimeError, match=told):
        run_hook(crossed, grad_bucket([torch.ones(3)]), torch.ones(1000))
    wrong = _state("0011", levels=(4,))
    with pytest.raises(RuntimeError, match=r"product of levels \(4,\) is not 2, the number of hosts"):
        run_hook(wrong, grad_bucket([torch.ones(3)]), torch.ones(1000))
    # Among the ranks of a single host there are only few bits, whatever is asked for.
    means = {}
    for state in (_state("0000"), QuantizedAllreduceState(min_bytes=0)):
        means[type(state)] = run_hook(state, grad_bucket([torch.ones(3)]), rank_values(1000)[rank])
    assert torch.equal(*means.values())


def _trains(rank):
    """Train on two nodes of two ranks, with a NaN in one step."""
    mesh = init_device_mesh("cpu", (2, 2))
    options = {"min_bytes": 0, "error_feedback": "both"}
    state = HierarchicalAllreduceState(mesh=mesh, **options)
    model = DistributedDataParallel(torch.nn.Linear(60, 60))
    model.register_comm_hook(state.bind(model), quantized_allreduce_hook)

    def step(*, poison=False):
        x = torch.randn(3, 60, generator=torch.Generator().manual_seed(rank))
        if poison and rank == 0:
            x[0, 0] = torch.nan  # in one column of a gradient, not in all shards
        model(x).square().sum().backward()
        mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        assert same_on_all_ranks(mine)
        return mine

    for _ in range(5):
        step()
    before = flat_residuals(state.state_dict())
    assert max(lost.abs().max() for lost in before.values()) > 0
    # The owner of a shard alone rounds it.
    assert sum(lost.numel() for lost in before.values()) <= 60 * 61 // 2 + 128
    step(poison=True)
    after = flat_residuals(state.state_dict())
    assert differences(after, before) == {}
    with pytest.raises(TypeError, match="does not pickle"):
        copy.deepcopy(state)
    saved = state.state_dict()
    elsewhere = HierarchicalAllreduceState(mesh=init_device_mesh("cpu", (4, 1)), **options)
    with pytest.raises(ValueError, match="the residuals are of intra_group"):
        elsewhere.load_state_dict(saved, model)


def _on_two_nodes(rank):
    _wrong_nodes(rank)
    _trains(rank)


def test_nodes_that_do_not_fit_are_refused_on_every_rank_and_residuals_are_the_owners_of_finite_steps():
    run_ranks(_on_two_nodes, 4)
