"""FSDP2's parameters as differences to what was gathered last: the bits of the formula, or values."""

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    BF16,
    Watched,
    local,
    needs_custom_gathers,
    needs_reset,
    parameters,
    served_device,
    shard_layers,
    sharded,
    train,
    watched_layers,
    whole,
    with_weights,
)
from host_names import take_host_name
from kernel_cases import decoded, encoded
from quant_buckets import assert_same, through_file
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import differences, quantize_all_gather, quantize_reduce_scatter
from ddp_quant_hooks.kernels import Layout
from dist_utils import AgreementError, start_messages
from dist_utils.testing import run_ranks, same_on_all_ranks

pytestmark = needs_custom_gathers
LAYOUT = Layout("int4", 32, rotate=True)
MOST_ERROR = 0.005
OURS = {"min_bytes": 0, "differences": True}


class Simulation:
    """What all ranks must gather of a layer, computed from the exact shards of all of them."""

    def __init__(self, dtype=torch.float32):
        self.dtype, self.copies, self.values = dtype, {}, []

    @property
    def exact(self):
        """The ranks that send values."""
        return [rank for rank, places in enumerate(self.values) if places]

    def gathered(self, layer):
        """Return the weights that all ranks must see, and note of which parameters each rank sends values."""
        every = list(layer.parameters())
        ranks = every[0].device_mesh.size()
        chunks = [self._chunks(parameter, ranks) for parameter in every]
        self.values = []
        for rank in range(ranks):
            parts, known = [chunk[rank] for chunk in chunks], self.copies.get(rank)
            old = known or [torch.zeros_like(part) for part in parts]
            new = [
                part if one.dim() == 1 else self._follow(before, part)
                for one, before, part in zip(every, old, parts, strict=True)
            ]
            self.values.append(
                [place for place, part in enumerate(parts) if known is None or not _near(new[place], part)]
            )
            for place in self.values[-1]:
                new[place] = parts[place]
            self.copies[rank] = new
        return [self._whole(place, parameter, ranks) for place, parameter in enumerate(every)]

    def _chunks(self, parameter, ranks):
        exact, dim = parameter.full_tensor().detach().to(self.dtype).cpu(), parameter.placements[0].dim
        size = list(exact.shape)
        size[dim] = -(-size[dim] // ranks)
        chunks = [torch.zeros(size, dtype=self.dtype) for _ in range(ranks)]
        for padded, chunk in zip(chunks, exact.chunk(ranks, dim), strict=False):  # the last may have no rows
            padded.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
        return chunks

    def _follow(self, copied, part):
        difference = (part.float() - copied.float()).flatten()
        change = decoded([encoded(difference, LAYOUT)], difference.numel(), LAYOUT, torch.float32)
        return (copied.float() + change.view(part.shape)).to(self.dtype)

    def _whole(self, place, parameter, ranks):
        dim = parameter.placements[0].dim
        rows = torch.cat([self.copies[rank][place] for rank in range(ranks)], dim)
        return rows.narrow(dim, 0, parameter.shape[dim])


def _near(copied, part):
    lost = (part.float() - copied.float()).double().norm()
    return bool(lost <= MOST_ERROR * part.double().norm())


SHARDING = {
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    "second dimension": {"shard_placement_fn": lambda one: Shard(one.dim() - 1)},
}


def _batch(step, width=37):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def _weights(rank, hosts):
    """All passes see the weights of the formula, on all ranks; a large step sends values."""
    named = take_host_name(hosts[rank])
    mesh = init_device_mesh(served_device(), (len(hosts),))
    options = dict(SHARDING)
    if len(hosts) == 4:
        options["resharded to two"] = {"reshard_after_forward": 2}
    for name, sharding in options.items():
        dtype = getattr(sharding.get("mp_policy"), "param_dtype", torch.float32)
        for way in ("auto", "flat"):
            width = 40 if name == "second dimension" else 37  # FSDP divides only rows unevenly
            net = shard_layers(watched_layers(width=width), mesh, **sharding)
            handle = quantize_all_gather(net, **OURS, intra_node=way)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
            simulations = [Simulation(dtype) for _ in net]
            for step, rate in enumerate((1e-4, 1e-4, 0.5, 1e-4, 1e-4)):
                optimizer.param_groups[0]["lr"] = rate
                before, exact = handle.statistics, whole(net)
                expected = [one.gathered(layer) for one, layer in zip(simulations, net, strict=True)]
                for micro_batch in range(1 + step % 2):
                    x = _batch(step + micro_batch, width).to(mesh.device_type).requires_grad_()
                    net(x).square().mean().backward()
                assert_same(whole(net), exact, name)
                for layer, weights in zip(net, expected, strict=True):
                    for when, back in itertools.product(("forward", "backward"), range(1, 2 + step % 2)):
                        seen = [one.cpu() for one in layer.seen[when][-back]]
                        assert_same(seen, weights, (name, way, step, when))
                    assert same_on_all_ranks(layer.seen["forward"][-1])
                if step % 2 == 0:
                    _check(handle.statistics - before, name, simulations, where=named and hosts, way=way)
                optimizer.step()
                optimizer.zero_grad()
            assert 0 < handle.relative_error() < 0.01
    return bool(named)


def _check(found, name, simulations, *, where, way):
    """Each layer is gathered once between hosts, and a second time inside of them, or not at all."""
    if where and way == "auto":  # from other hosts come the shards of the ranks with the same number there
        peers = {peer for peer in range(len(where)) if where[peer] != where[dist.get_rank()]}
        if len(set(where)) < len(where):
            index = _index_on_host(where, dist.get_rank())
            peers = {peer for peer in peers if _index_on_host(where, peer) == index}
    else:
        peers = {*range(dist.get_world_size())}
    exact = sum(bool({*one.exact} & (peers | {dist.get_rank()})) for one in simulations)
    assert (found.exact_gathers, found.quantized_gathers) == (exact, len(simulations) - exact)
    again = {"kept": (0, 0), "resharded to two": (3, 0)}.get(name, (0, 3))
    assert (found.plain_gathers, found.reused_gathers) == again


def _index_on_host(hosts, rank):
    return [peer for peer, host in enumerate(hosts) if host == hosts[rank]].index(rank)


@pytest.mark.parametrize("hosts", ["01", "0011", pytest.param("0123", marks=pytest.mark.exhaustive)])
def test_weights_follow_the_exact_ones_by_the_formula_on_all_ranks(hosts):
    run_ranks(_weights, len(hosts), hosts, timeout=200)


class Adapted(torch.nn.Linear):
    """A frozen layer with an adapter as LoRA adds it."""

    def __init__(self):
        super().__init__(37, 37)
        self.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(5, 37) / 6)
        self.up = torch.nn.Parameter(torch.zeros(37, 5))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def _adapters(rank, hosts):
    """Only those parameters travel as values whose differences are too coarse: never the frozen ones."""
    receivers = 1 if take_host_name(hosts[rank]) else len(hosts) - 1
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(Watched(Adapted()) for _ in range(3)))
    net = shard_layers(layers, init_device_mesh("cpu", (len(hosts),)))
    handle = quantize_all_gather(net, **OURS)
    simulations = [Simulation() for _ in net]
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=0.01)
    adapters = set()
    for step in range(4):
        expected = [one.gathered(layer) for one, layer in zip(simulations, net, strict=True)]
        before = handle.statistics
        loss = net(_batch(step).requires_grad_()).square().mean()
        sent = (handle.statistics - before).bytes_sent
        loss.backward()
        for layer, weights in zip(net, expected, strict=True):
            for when in ("forward", "backward"):
                assert_same(layer.seen[when][-1], weights, (step, when))
            assert same_on_all_ranks(layer.seen["forward"][-1])
        before = handle.statistics
        with torch.no_grad():
            net(_batch(step))
        unchanged = (handle.statistics - before).bytes_sent
        values = [(one, place) for one in simulations for place in one.values[rank]]
        assert sent - unchanged == receivers * sum(one.copies[rank][place].nbytes for one, place in values)
        if step:
            adapters.update(place for _, place in values)
        optimizer.step()
        optimizer.zero_grad()
    assert adapters
    assert adapters <= {2, 3}, "down and up"


@pytest.mark.parametrize("hosts", ["01", "0011"])
def test_only_adapters_travel_as_values(hosts):
    run_ranks(_adapters, len(hosts), hosts, timeout=100)


def _unequal(rank):
    """A host of two ranks and one of one: the weights of the formula, too."""
    take_host_name("001"[rank])
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (3,)))
    quantize_all_gather(net, **OURS)
    simulations = [Simulation() for _ in net]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for step in range(3):
        expected = [one.gathered(layer) for one, layer in zip(simulations, net, strict=True)]
        net(_batch(step).requires_grad_()).square().mean().backward()
        for layer, weights in zip(net, expected, strict=True):
            assert_same(layer.seen["forward"][-1], weights)
            assert_same(layer.seen["backward"][-1], weights)
        optimizer.step()
        optimizer.zero_grad()


def test_hosts_of_unequal_size():
    run_ranks(_unequal, 3, timeout=100)


def _bytes_between_hosts(rank, hosts):
    """Return what a gather of a large layer sends to other hosts, per value, twice."""
    if not take_host_name(hosts[rank]):
        return None
    net = fsdp.fully_shard(torch.nn.Linear(256, 256, bias=False))
    handle, found = quantize_all_gather(net, **OURS), []
    for _ in range(2):
        before = handle.statistics
        net.unshard()
        net.reshard()
        found.append((handle.statistics - before).bytes_between_hosts / 256**2)
    return found


@pytest.mark.parametrize("hosts", ["0011", "0123"])
def test_a_difference_of_four_bits_enters_each_host_once(hosts):
    found = run_ranks(_bytes_between_hosts, len(hosts), hosts, timeout=60)
    if found[0] is None:
        pytest.skip("this user cannot give a process a host name of its own")
    entering = (len(set(hosts)) - 1) / len(set(hosts))
    for host in set(hosts):
        sent = [
            sum(of_rank[turn] for of_rank, name in zip(found, hosts, strict=True) if name == host)
            for turn in range(2)
        ]
        assert sent == pytest.approx([entering * (4 + 0.625), entering * 0.625], rel=0.01)


def _changed(_):
    """What is loaded or changed in place is gathered exactly, in the next pass; and so is a NaN."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (dist.get_world_size(),)))
    handle = quantize_all_gather(net, **OURS)
    train(net, 2)
    others = {name: torch.randn(value.shape) for name, value in watched_layers().state_dict().items()}
    dist.broadcast_object_list(box := [others])
    changes = (
        lambda: set_model_state_dict(net, box[0], options=StateDictOptions(full_state_dict=True)),
        lambda: [parameter.detach().to_local().mul_(-2.0) for parameter in net.parameters()],
        lambda: net[1].layer.weight.detach().to_local()[0, :3].fill_(torch.nan),
    )
    for change in changes:
        change()
        before, exact = handle.statistics, whole(net)
        with torch.no_grad():
            net(_batch(0))
        for layer, weights in with_weights(net, exact):
            seen = layer.seen["forward"][-1]
            assert same_on_all_ranks(seen)
            if not weights[0].isnan().any():
                assert_same(seen, weights) if change is not changes[2] else None
            else:
                assert torch.equal(seen[0].isnan(), weights[0].isnan()), "no neighbor of a NaN becomes one"
        assert (handle.statistics - before).exact_gathers == (1 if change is changes[2] else 3)
    net[1].layer.weight.detach().to_local()[0, :3].fill_(0.5)
    with torch.no_grad():
        net(_batch(0))
    assert_same([net[1].seen["forward"][-1][0]], [whole(net)[2]])


def _losses(net, handle=None, steps=6):
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for step in range(steps):
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            loss = (net(_batch(2 * step + last)) - 0.1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None and step == 2:
            net.eval()
            with torch.no_grad():
                net(_batch(99))
            net.train()
        found.append(loss.detach())
    everyone = torch.stack(found)
    dist.all_reduce(everyone)
    return everyone / dist.get_world_size()


def _trains_like_native(_):
    """With accumulation, an evaluation between, gradients in few bits; asynchronous and compiled, too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    native = _losses(sharded(mesh))
    net = sharded(mesh)
    handle = quantize_all_gather(net, **OURS)
    ours = _losses(net, handle)
    torch.testing.assert_close(ours, native, rtol=1e-3, atol=1e-5)
    assert handle.statistics.quantized_gathers > handle.statistics.exact_gathers
    both = sharded(mesh)
    quantize_all_gather(both, **OURS)
    quantize_reduce_scatter(both, QuantizedAllreduceState(min_bytes=0))
    torch.testing.assert_close(_losses(both), native, rtol=0.01, atol=1e-3)
    compiled = sharded(mesh)
    quantize_all_gather(compiled, **OURS)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager")
    plain = sharded(mesh)
    quantize_all_gather(plain, **OURS)
    assert_same(train(compiled, 2), train(plain, 2))
    started = shard_layers(watched_layers(), mesh)
    quantize_all_gather(started, **OURS)
    twin = copy.deepcopy(watched_layers())
    twin = shard_layers(twin, mesh)
    quantize_all_gather(twin, **OURS)
    for step in range(3):
        for layer in started:
            layer.unshard(async_op=True)
        for one in (started, twin):
            one(_batch(step)).square().mean().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.add_(parameter.grad, alpha=-0.01)
            one.zero_grad()
    assert_same(parameters(started), parameters(twin))


def _resumes(_):
    """A job that saves and goes on, and one that loads, have the same bits if both gather values then."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def new():
        net = sharded(mesh)
        handle = quantize_all_gather(net, **OURS)
        state = QuantizedAllreduceState(min_bytes=0, bits=4)
        quantize_reduce_scatter(net, state)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3), handle, state

    net, optimizer, handle, state = new()
    train(net, 3, optimizer=optimizer)
    handle.start_over()
    saved = through_file([*get_state_dict(net, optimizer), state.state_dict()])
    expected = train(net, 3, first=3, optimizer=optimizer)
    other, optimizer, _, state = new()
    model_state, optimizer_state, residuals = saved
    set_state_dict(other, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    state.load_state_dict(residuals)
    assert_same(train(other, 3, first=3, optimizer=optimizer), expected)


def _refusals(_):
    net = sharded(init_device_mesh("cpu", (2,)))
    for error, match, options in (
        (ValueError, "bits=8 does not work with differences", {"bits": 8}),
        (ValueError, "keep_for_backward does not work with differences", {"keep_for_backward": True}),
        (ValueError, "intra_node='quantized' does not work with differences", {"intra_node": "quantized"}),
        (TypeError, "differences must be True or False, got 1", {"differences": 1}),
    ):
        with pytest.raises(error, match=f"^quantize_all_gather: {match}"):
            quantize_all_gather(net, **{"differences": True, **options})
    with pytest.raises(AgreementError, match="differences is False on rank 0, True on rank 1"):
        quantize_all_gather(net, differences=dist.get_rank() == 1, bits=None, block_size=32)
    quantize_all_gather(net, differences=True, bits=4)


def _two_ranks(rank):
    for check in (_changed, _trains_like_native, _resumes, _refusals):
        check(rank)


def test_changes_training_resuming_and_refusals():
    run_ranks(_two_ranks, 2, timeout=200)


def _after_an_error(_):
    """An error in a pass leaves copies that are equal on all ranks, and the next pass has their bits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = shard_layers(watched_layers(), mesh)
    quantize_all_gather(net, **OURS)
    for fails in ("forward", "backward"):
        with contextlib.suppress(ZeroDivisionError), mock.patch.object(net[1], "_note", _failing(fails)):
            net(_batch(0).requires_grad_()).square().mean().backward()
        net.zero_grad()
        net.reset_iter_state()
        net.zero_grad()
        for parameter in net.parameters():
            parameter.detach().to_local().mul_(1.0001)
        net(_batch(1).requires_grad_()).square().mean().backward()
        for layer in net:
            assert_same(layer.seen["forward"][-1], layer.seen["backward"][-1])
            assert same_on_all_ranks(layer.seen["forward"][-1])
        exact = [local(one) for one in whole(net)]
        for layer, weights in with_weights(net, exact):
            torch.testing.assert_close(layer.seen["forward"][-1], weights, rtol=0.01, atol=1e-4)


def _failing(when):
    def note(during):
        if during == when:
            raise ZeroDivisionError

    return note


@needs_reset
def test_an_error_of_the_users_does_not_spoil_copies():
    run_ranks(_after_an_error, 2, timeout=100)


def _without_tags(rank):
    """Notes tell of another module, and of another model with equal names, where a backend has no tags."""

    def start_untagged(*arguments, tag, **options):
        return start_messages(*arguments, tag=0, **options)

    mesh = init_device_mesh("cpu", (2,))
    nets = [shard_layers(watched_layers(), mesh) for _ in range(2)]
    for net in nets:
        quantize_all_gather(net, **OURS)
        for layer in net:
            layer.unshard()
            layer.reshard()
    for module in (nets[0][rank], nets[rank][2]):
        with (
            mock.patch.object(differences, "start_messages", start_untagged),
            pytest.raises(RuntimeError, match=f"rank {1 - rank} gathers another module or model"),
        ):
            module.unshard()


def test_other_modules_are_told_without_tags():
    run_ranks(_without_tags, 2, timeout=60)


def _start_over_on_all_ranks(net, handle):
    """After an error on all ranks start over, where torch can: weights are those of the shards."""
    handle.start_over()
    if not hasattr(net, "reset_iter_state"):
        return
    net.reset_iter_state()
    exact = whole(net)
    net(_batch(1).requires_grad_()).square().mean().backward()
    for layer, weights in with_weights(net, exact):
        assert_same(layer.seen["forward"][-1], weights)
        assert_same(layer.seen["backward"][-1], weights)


def _start_over_alone(rank, net):
    """Gather a few times, and forget the copies on rank 1; return the handle."""
    handle = quantize_all_gather(net, **OURS)
    train(net, 2)
    if rank == 1:
        handle.start_over()
    return handle


def _alone(rank):
    """A rank that forgets its copies alone is an error on both at once; start_over() on both goes on."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
    handle = _start_over_alone(rank, net)
    theirs, own = (0, 2) if rank == 0 else (2, 0)
    match = rf"'0': {theirs} gathers have changed the copies of rank {1 - rank}, but {own} those of this rank"
    with pytest.raises(RuntimeError, match=match):
        net(_batch(0))
    _start_over_on_all_ranks(net, handle)


def test_a_rank_that_starts_over_alone_is_told_and_all_ranks_can_start_over():
    run_ranks(_alone, 2, timeout=60)


def _alone_on_hosts(rank):
    """Where each host has two ranks, all of them are told before they hand anything on."""
    take_host_name("0011"[rank])
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (4,)))
    handle = _start_over_alone(rank, net)
    other = r"copies of rank \d, but" if rank in (1, 3) else f"copies of rank {rank + 1} on this host"
    with pytest.raises(RuntimeError, match=other):
        net(_batch(0))
    _start_over_on_all_ranks(net, handle)


def test_a_rank_that_starts_over_alone_is_told_to_all_ranks_of_hosts():
    run_ranks(_alone_on_hosts, 4, timeout=60)


def _while_it_gathers(rank):
    """A failed asynchronous gather gives no weights when FSDP waits again; start_over() ends running ones."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (2,)))
    handle = _start_over_alone(rank, net)
    with pytest.raises(RuntimeError, match="gathers have changed the copies of rank"):
        net[0].unshard(async_op=True).wait()
    net[0].unshard(async_op=True).wait()
    assert all(local(one).isnan().all() for one in net[0].parameters())
    handle.start_over()
    net[0].reshard()
    train(net, 1)
    for layer in net:
        layer.unshard(async_op=True)
    handle.start_over()
    net(_batch(0))
    for parameter in net.parameters():
        parameter.detach().to_local().mul_(1.0001)
    net(_batch(1))
    exact = whole(net)
    for layer, weights in with_weights(net, exact):
        assert_same(layer.seen["forward"][-1], weights)


def test_asynchronous_gathers_that_fail_or_start_over():
    run_ranks(_while_it_gathers, 2, timeout=60)
