"""FSDP2's parameters in few bits: the same weights on all ranks, forward and backward, from exact shards."""

import contextlib
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    BF16,
    Halves,
    Watched,
    batch,
    local,
    needs_custom_gathers,
    nodes_and_shards,
    served_device,
    shard_layers,
    sharded,
    train,
    watched_layers,
    whole,
    with_weights,
)
from gathered_weights import (
    INT8,
    WAYS,
    Simulation,
    assert_right_weights,
    gather_in_few_bits,
    run_passes,
)
from host_names import take_host_name
from quant_buckets import assert_same
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import (
    module_gather,
    quantize_all_gather,
    quantize_all_reduce,
    quantize_reduce_scatter,
)
from ddp_quant_hooks.fsdp.gather_plan import plan_route
from dist_utils.testing import call_in_backward, run_ranks, same_on_all_ranks

pytestmark = needs_custom_gathers
SHARDING = {
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "fp16": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.float16)},
    "offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    "second dimension": {"shard_placement_fn": lambda one: Shard(one.dim() - 1)},
    "resharded to two": {"reshard_after_forward": 2},
}
OURS = [*WAYS.values(), *({**WAYS[way], "intra_node": "flat"} for way in ("8 bits", "differences"))]
RATES = 1e-4, 1e-4, 0.5, 1e-4, 1e-4
"""Of each step: a large one is too much for a difference."""


def _weights(rank, hosts):
    """All passes see the weights of the formula, on all ranks; shards stay exact."""
    on_hosts = tuple(map(int, hosts)) if take_host_name(hosts[rank]) else (0,) * len(hosts)
    mesh = init_device_mesh(served_device(), (len(hosts),))
    names = [name for name in SHARDING if len(hosts) == 4 or name != "resharded to two"]
    cases = [*product(["resharded"], OURS)]
    cases += product(names[1:] if hosts != "001" else [], WAYS.values())
    for name, ours in cases:
        sharding, differences = SHARDING[name], "differences" in ours
        dtype = getattr(sharding.get("mp_policy"), "param_dtype", torch.float32)
        width = 40 if name == "second dimension" else 37  # FSDP divides only rows unevenly
        net = shard_layers(watched_layers(width=width), mesh, **sharding)
        handle = gather_in_few_bits(net, **ours)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
        simulations = [Simulation(differences=differences, dtype=dtype) for _ in net]
        for step, rate in enumerate(RATES if differences else RATES[:2]):
            optimizer.param_groups[0]["lr"] = rate
            before, exact = handle.statistics, whole(net)
            expected = [one.gathered(layer) for one, layer in zip(simulations, net, strict=True)]
            for micro_batch in range(1 + step % 2):
                x = batch(step + micro_batch, width).to(mesh.device_type).requires_grad_()
                net(x).square().mean().backward()
            assert_same(whole(net), exact, name)
            for layer, weights in zip(net, expected, strict=True):
                for when, back in product(("forward", "backward"), range(1, 2 + step % 2)):
                    seen = [one.cpu() for one in layer.seen[when][-back]]
                    assert_same(seen, weights, (name, ours, step, when))
            if step % 2 == 0:
                hosts_seen = (0,) * len(hosts) if "intra_node" in ours else on_hosts
                exact_ones = {rank, *plan_route(hosts_seen, rank).receives}
                exact_layers = sum(bool(one.exact & exact_ones) for one in simulations)
                _check_statistics(handle.statistics - before, name, ours, exact_layers)
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks([layer.seen["forward"] for layer in net])
        assert 0 < handle.relative_error() < 0.01


def _check_statistics(found, name, ours, exact):
    """Three layers were gathered in a step: once between hosts, and again for the backward pass or not."""
    keeps = ours.keys() & {"keep_for_backward", "differences"}
    again = {"kept": "not", "resharded to two": "inside a host"}.get(name, "kept" if keeps else "as before")
    assert (found.exact_gathers, found.quantized_gathers, found.plain_gathers, found.reused_gathers) == (
        exact,
        3 - exact + 3 * (again == "as before"),
        3 * (again == "inside a host"),
        3 * (again == "kept"),
    )
    assert "differences" in ours or 0 < found.bytes_ratio < 0.8, (name, ours, found)
    assert 0 <= found.bytes_between_hosts <= found.bytes_sent


@pytest.mark.parametrize("hosts", ["01", "001", "0011", pytest.param("0123", marks=pytest.mark.exhaustive)])
def test_weights_are_those_of_the_formula_on_all_ranks_and_in_both_passes_and_shards_stay_exact(hosts):
    run_ranks(_weights, len(hosts), hosts, timeout=300)


SCALES = 1 + 4 / 128
BYTES = {
    "auto": ({}, [SCALES, SCALES]),
    "flat": ({"intra_node": "flat"}, [SCALES, SCALES]),
    "ring": ({"intra_node": "flat"}, [SCALES, SCALES]),
    "differences": ({"differences": True}, [4 + 0.625, 0.625]),  # the first ones are values, and have notes
}
"""The options, and what enters a host of each value of the others, in the first and in the second gather."""


def _bytes_between_hosts(rank, hosts):
    """Return what each way sends to other hosts in two gathers of a large layer, for each of its values."""
    if not take_host_name(hosts[rank]):
        return None
    found = {}
    for way, (options, _) in BYTES.items():
        net = fsdp.fully_shard(torch.nn.Linear(256, 256, bias=False))
        handle, found[way] = quantize_all_gather(net, **options), []
        as_a_gpu = mock.patch.object(module_gather, "runs_on_host", return_value=False)
        for _ in range(2):
            before = handle.statistics
            with as_a_gpu if way == "ring" else contextlib.nullcontext():
                net.unshard()
            net.reshard()
            found[way].append((handle.statistics - before).bytes_between_hosts / 256**2)
    return found


@pytest.mark.parametrize("hosts", ["0011", "0123"])
def test_a_shard_enters_each_host_once(hosts):
    found = run_ranks(_bytes_between_hosts, len(hosts), hosts, timeout=60)
    if found[0] is None:
        pytest.skip("this user cannot give a process a host name of its own")
    entering = (len(set(hosts)) - 1) / len(set(hosts))
    for (way, (_, sizes)), turn in product(BYTES.items(), range(2)):
        times = 2 if way == "flat" and hosts == "0011" else 1
        sent = {
            host: sum(of_rank[way][turn] for of_rank, name in zip(found, hosts, strict=True) if name == host)
            for host in hosts
        }
        if way == "ring":  # only the last rank of a host sends to another one
            neighbors = [
                of_rank[way][turn]
                for place, of_rank in enumerate(found)
                if hosts[place] != hosts[(place + 1) % 4]
            ]
            assert sum(of_rank[way][turn] for of_rank in found) == pytest.approx(sum(neighbors))
            assert neighbors == pytest.approx([3 / 4 * SCALES] * len(neighbors))
        else:
            rounding = 0.01 if way == "differences" else 1e-6
            expected = dict.fromkeys(hosts, times * entering * sizes[turn])
            assert sent == pytest.approx(expected, rel=rounding)


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
    handle = gather_in_few_bits(net, differences=True)
    simulations = [Simulation(differences=True) for _ in net]
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=0.01)
    adapters = set()
    for step in range(4):
        expected = [one.gathered(layer) for one, layer in zip(simulations, net, strict=True)]
        before = handle.statistics
        loss = net(batch(step).requires_grad_()).square().mean()
        sent = (handle.statistics - before).bytes_sent
        loss.backward()
        for layer, weights in zip(net, expected, strict=True):
            for when in ("forward", "backward"):
                assert_same(layer.seen[when][-1], weights, (step, when))
        before = handle.statistics
        with torch.no_grad():
            net(batch(step))
        unchanged = (handle.statistics - before).bytes_sent
        values = [(one, place) for one in simulations for place in one.values[rank]]
        assert sent - unchanged == receivers * sum(one.copies[rank][place].nbytes for one, place in values)
        if step:
            adapters.update(place for _, place in values)
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks([layer.seen["forward"] for layer in net])
    assert adapters
    assert adapters <= {2, 3}, "down and up"


@pytest.mark.parametrize("hosts", ["01", "0011"])
def test_only_adapters_travel_as_values(hosts):
    run_ranks(_adapters, len(hosts), hosts, timeout=100)


class Composed(torch.nn.Module):
    """Layers with a frozen one, tied weights, an adapter as LoRA adds it, and checkpoints if wanted."""

    def __init__(self, *, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.down = torch.nn.Linear(37, 2, bias=False)
        self.up = torch.nn.Linear(2, 37, bias=False)
        self.reentrant = reentrant

    def shard(self, mesh, **options):
        fsdp.fully_shard([self.layers[0], self.layers[3]], mesh=mesh, **options)
        for layer in (self.layers[1], self.layers[2]):
            fsdp.fully_shard(layer, mesh=mesh, **options)
        return fsdp.fully_shard(self, mesh=mesh, **options)

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x + self.up(self.down(x))


def _composed(mesh, *, ours=None, **options):
    """Return the model, and a handle if its parameters are gathered in few bits."""
    net = Composed(reentrant=options.pop("reentrant", None)).shard(mesh, **options)
    return net, None if ours is None else gather_in_few_bits(net, **ours)


def _losses(net, steps=5, *, accumulate=False):
    """Train, and evaluate in between; return the means over ranks of the losses in training."""
    required = [one for one in net.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(required, lr=1e-3), []
    for step in range(steps):
        for last in (False, True) if accumulate else (True,):
            net.set_requires_gradient_sync(last)
            loss = (net(batch(step).requires_grad_()) - 0.1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 2:
            with torch.no_grad():
                net(batch(99))
    everyone = torch.stack(losses)
    dist.all_reduce(everyone)
    return everyone / dist.get_world_size()


def _same_weights_on_all_ranks(net):
    """Return whether all ranks gather the same weights, those of other replicas, too."""
    modules = [module for module in net.modules() if isinstance(module, fsdp.FSDPModule)]
    for module in modules:
        module.unshard()
    gathered = [local(one) for one in net.parameters()]
    for module in modules:
        module.reshard()
    return same_on_all_ranks(gathered)


def _near(native, ours):
    """Weights are off by half a percent, and losses hardly."""
    assert not torch.equal(native, ours)
    torch.testing.assert_close(ours, native, rtol=0.02, atol=1e-3)


def _with_everything(_):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for options, run in (
        ({}, {}),
        ({}, {"accumulate": True}),
        ({"reentrant": False}, {}),
        # FSDP itself cannot do this with torch 2.9.
        *([({"reentrant": True}, {})] if hasattr(fsdp.FSDPModule, "reset_iter_state") else []),
        ({"reshard_after_forward": False}, {"accumulate": True}),
    ):
        native = _losses(_composed(mesh, **options)[0], **run)
        for ours in WAYS.values():
            net, handle = _composed(mesh, ours=ours, **options)
            _near(native, _losses(net, **run))
            assert _same_weights_on_all_ranks(net)
            assert handle.statistics.quantized_gathers > handle.statistics.exact_gathers
            net, _ = _composed(mesh, ours=ours, **options)
            state = QuantizedAllreduceState(min_bytes=0)
            quantize_reduce_scatter(net, state)
            _near(native, _losses(net, **run))
            assert state.statistics.quantized_buckets > 0


def _prefetch(net):
    for first, second in pairwise(net):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return net


def _asynchronous(net):
    for layer in net:
        layer.unshard(async_op=True)
    return net


def _ways_to_gather(_):
    """Prefetches, asynchronous gathers and compiled layers have the bits of the plain way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def losses(prepare, steps=3, **ours):
        net = shard_layers(watched_layers(), mesh)
        handle = gather_in_few_bits(net, **ours)
        found, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            if step == 0 or prepare is _asynchronous:
                prepare(net)
            loss = net(batch(step).requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found), handle.statistics

    plain, counted = losses(lambda _: None)
    for prepare in (_prefetch, _asynchronous):
        for keep in (False, True):
            found, count = losses(prepare, keep_for_backward=keep)
            assert torch.equal(found, plain), prepare
            assert count.quantized_gathers + count.reused_gathers == counted.quantized_gathers
            assert bool(count.reused_gathers) == (keep and prepare is _prefetch)
    with mock.patch.object(module_gather, "runs_on_host", return_value=False):  # as a GPU's backend sends
        assert torch.equal(losses(lambda _: None)[0], plain)
        assert torch.equal(losses(_asynchronous)[0], plain)
    by_differences, _ = losses(lambda _: None, differences=True)
    for prepare in (_prefetch, _asynchronous):
        assert torch.equal(losses(prepare, differences=True)[0], by_differences), prepare


def _trained(mesh, compiled, ours):
    """Return what a model has learned of which nothing, the layers or the whole is compiled."""
    net = sharded(mesh)
    gather_in_few_bits(net, **ours)
    for part in {"layers": net.layers, "whole": [net]}.get(compiled, ()):
        part.compile(backend="aot_eager")
    return train(net, 2)


def _compiled(_):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for compiled, way in (("layers", "kept"), ("whole", "8 bits"), ("layers", "differences")):
        assert_same(_trained(mesh, None, WAYS[way]), _trained(mesh, compiled, WAYS[way]), (compiled, way))


def _dtypes(_):
    """Several dtypes in a module, and fp64, are gathered as they are; nothing is silently exact."""
    mesh, steps = init_device_mesh("cpu", (dist.get_world_size(),)), 2
    for dtypes, reason in (
        ((torch.float32, torch.bfloat16), "are of several dtypes"),
        ((torch.float64, torch.float64), "are of torch.float64"),
    ):
        runs = []
        for ours in (False, True):
            net = torch.nn.Sequential(*(torch.nn.Linear(37, 37).to(dtype) for dtype in dtypes))
            torch.manual_seed(1)
            for parameter in net.parameters():
                torch.nn.init.normal_(parameter)
            net[1].requires_grad_(dtypes[0] == dtypes[1])
            fsdp.fully_shard(net, mesh=mesh)
            if ours:
                with pytest.warns(UserWarning, match=f"all modules in full precision.*{reason}"):
                    handle = gather_in_few_bits(net)
            found = []
            for step in range(steps):
                x = batch(step).to(dtypes[0])
                loss = _through(net, x, dtypes).square().mean()
                loss.backward()
                found.append(loss.detach())
            runs.append(torch.stack(found))
        assert torch.equal(*runs)
        assert (handle.statistics.quantized_gathers, handle.statistics.plain_gathers) == (0, steps), (
            "a root stays gathered"
        )


def _through(net, x, dtypes):
    first = net[0].register_forward_hook(lambda *found: found[-1].to(dtypes[1]))
    result = net(x)
    first.remove()
    return result


def _with_averages_between_nodes(_):
    """On hosts that hold a replica each, natively and with few bits between them; with tensor parallelism."""
    mesh = nodes_and_shards()
    native = _losses(_composed(mesh)[0])
    for ours in ({}, {"differences": True}):
        hsdp, _ = _composed(mesh, ours=ours)
        _near(native, _losses(hsdp))
        assert _same_weights_on_all_ranks(hsdp)
    both, _ = _composed(mesh["shard"], ours={})
    state = QuantizedAllreduceState(mesh["node"], min_bytes=0)
    quantize_all_reduce(both, state)
    _near(native, _losses(both))
    assert _same_weights_on_all_ranks(both)
    assert state.statistics.quantized_buckets > 0
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    halves = [Halves(tensor, tensor["shard"]) for _ in range(3)]
    handle = gather_in_few_bits(halves[1])
    gather_in_few_bits(halves[2], differences=True)
    generator = torch.Generator().manual_seed(tensor["shard"].get_local_rank())
    x = torch.randn(4, 37, generator=generator)
    found = [net(x) for net in halves]
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.01)
    assert torch.equal(found[2], found[0]), "the first gather is exact"
    for net in halves:  # a root stays gathered until its backward pass
        assert same_on_all_ranks([local(one) for one in net.parameters()], tensor["shard"])
    assert handle.statistics.quantized_gathers == 1
    found[1].square().mean().backward()


def _without_gradients(_):
    """Evaluation sees rounded weights, equal on all ranks; nothing is kept, and saved states are exact."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = shard_layers(watched_layers(), mesh)
    exact = whole(net)
    handle = gather_in_few_bits(net, keep_for_backward=True)
    gathers = handle._gathers.values()
    outputs = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs.append(net(batch(0)))
        assert not any(gather._kept for gather in gathers)
    assert torch.equal(*outputs)
    net(batch(0).requires_grad_())
    assert any(gather._kept for gather in gathers)
    net.eval()
    with torch.no_grad():
        net(batch(0))
    assert not any(gather._kept for gather in gathers), "an evaluation drops what a forward pass has kept"
    assert 0.001 < handle.relative_error() < 0.01
    saved = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    assert_same([*saved.values()] or exact, exact)
    for layer in net:
        layer.unshard()
    rounded = [local(one) for layer in net for one in layer.parameters()]
    assert same_on_all_ranks(rounded)
    for layer in net:
        layer.reshard()
    assert_same(rounded, [one for layer in net for one in Simulation().gathered(layer)])
    loss = net(batch(1).requires_grad_()).square().mean()
    handle.remove()
    assert not any(gather._kept for gather in gathers)
    loss.backward()
    count = handle.statistics
    net(batch(1))
    assert handle.statistics == count
    handle.remove()


def _kept_only_for_a_backward_pass(_):
    """Nothing is kept that no backward pass takes: after errors, of frozen layers, and where FSDP is told."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model(**options):
        net, handle = _composed(mesh, ours={"keep_for_backward": True}, **options)
        gathers = handle._gathers.values()
        return net, lambda: {gather.name for gather in gathers if gather._kept}

    net, kept = model(reentrant=False)
    run_passes(net, 0)
    net.layers[2].unshard()
    assert not kept(), "a checkpoint's forward passes end early"
    net, kept = model()
    failing = mock.patch.object(net.layers[1], "forward", side_effect=ZeroDivisionError)
    with failing, contextlib.suppress(ZeroDivisionError):
        net(batch(0).requires_grad_())
    net.layers[2].unshard()
    assert kept() == {"layers.0"}, "a forward pass that has failed is over"
    net, kept = model()
    net.layers[2].set_unshard_in_backward(False)
    net(batch(0).requires_grad_())
    assert kept() == {"layers.0", "layers.1"}
    net, kept = model()
    net.requires_grad_(False)
    net(batch(0))
    assert not kept(), "no output needs gradients"


def _double_in_place(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)


def _double_behind_autograd(net):
    for parameter in net.parameters():
        parameter.data.mul_(2)


def _double_by_replacing(net):
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()}, assign=True)


def _inside_another_backward(_):
    """A forward pass in another model's backward pass sees shards as they are, not what was kept."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = ({"keep_for_backward": True}, {"differences": True})
    for ours, double in product(ways, (_double_in_place, _double_behind_autograd, _double_by_replacing)):
        net = shard_layers(watched_layers(), mesh)
        gather_in_few_bits(net, **ours)
        net(batch(0).requires_grad_())
        double(net)
        simulation = Simulation(differences="differences" in ours)  # which are too large: values are sent
        expected = [simulation.gathered(layer) for layer in net]
        x = torch.zeros(1, requires_grad=True)
        call_in_backward(x, lambda net=net: net(batch(1))).sum().backward()
        for layer, weights in zip(net, expected, strict=True):
            assert_same(layer.seen["forward"][-1], weights, ours)


class Repeated(torch.nn.Sequential):
    """Layers behind one checkpoint, which the backward pass runs forward again."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _repeated_by_a_checkpoint(_):
    """Where a checkpoint repeats the forward pass of several modules, weights have the same bits again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for ours in ({"keep_for_backward": True}, {"differences": True}):
        layers = shard_layers(watched_layers(), mesh)
        net = shard_layers(torch.nn.Sequential(Repeated(*layers)), mesh)
        gather_in_few_bits(net, **ours)
        run_passes(net, 0)
        for layer in layers:
            first, *others = layer.seen["forward"] + layer.seen["backward"]
            assert len(others) >= 2, ours
            for seen in others:
                assert_same(seen, first, ours)


def _after_errors_of_the_users(_):
    """An error in a pass of the user's leaves nothing that the next one uses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for ours in WAYS.values():
        net, exact = shard_layers(watched_layers(), mesh), "differences" in ours
        gather_in_few_bits(net, **ours)
        for fails in ("forward", "backward"):
            net[1].fails = fails
            with contextlib.suppress(ZeroDivisionError):
                run_passes(net, 0)
            net[1].fails = None
            net.zero_grad()
            if not hasattr(net, "reset_iter_state"):
                break
            net.reset_iter_state()
            net.zero_grad()
            for parameter in net.parameters():
                parameter.detach().to_local().mul_(1.0001)
            run_passes(net, 1)
            assert_right_weights(net, **({"rtol": 0.01, "atol": 1e-4} if exact else {}))
            if not exact:
                for layer in net:
                    assert_same(layer.seen["forward"][-1], Simulation().gathered(layer), fails)


def _two_micro_batches(_):
    """Two forward passes before a backward pass, twice through one graph, and a layer that is used twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for keep in (False, True):
        net = sharded(mesh, twice=True)
        handle = gather_in_few_bits(net, keep_for_backward=keep)
        first, second = (net(batch(step)).square().mean() for step in range(2))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        found.append([local(one.grad) for one in net.parameters()])
        assert bool(handle.statistics.reused_gathers) == keep
    assert_same(*found)


def _changed(_):
    """What is loaded or changed in place is gathered exactly, in the next pass; and so is a NaN."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (dist.get_world_size(),)))
    handle = gather_in_few_bits(net, differences=True)
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
            net(batch(0))
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
        net(batch(0))
    assert_same([net[1].seen["forward"][-1][0]], [whole(net)[2]])


def _not_finite(_):
    """A NaN is one in its block, on all ranks."""
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (dist.get_world_size(),)))
    gather_in_few_bits(net)
    if dist.get_rank() == 1:
        net[0].layer.weight.detach().to_local()[0, 0] = torch.nan
    net[0].unshard()
    weight = local(net[0].layer.weight)
    assert same_on_all_ranks(weight)
    assert 0 < weight.isnan().sum() <= INT8.block_size


def _one_rank(_):
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (1,)))
    exact = whole(net)
    with pytest.warns(UserWarning, match="full precision: .*one rank alone has its shards"):
        handle = gather_in_few_bits(net, keep_for_backward=True)
    assert handle.relative_error() is None
    run_passes(net, 0)
    assert_same([one for layer in net for one in layer.seen["backward"][-1]], exact)
    assert handle.statistics == type(handle.statistics)()


def test_a_single_rank_keeps_exact_weights():
    run_ranks(_one_rank, 1, timeout=60)


def _two_ranks(rank):
    for check in (
        _ways_to_gather,
        _dtypes,
        _without_gradients,
        _kept_only_for_a_backward_pass,
        _inside_another_backward,
        _repeated_by_a_checkpoint,
        _after_errors_of_the_users,
        _not_finite,
        _changed,
        _two_micro_batches,
    ):
        check(rank)


def test_prefetches_dtypes_evaluation_errors_changes_and_several_passes():
    run_ranks(_two_ranks, 2, timeout=200)


def test_training_with_frozen_tied_and_checkpointed_layers_and_gradients_in_few_bits():
    run_ranks(_with_everything, 2, timeout=200)


def test_compiled_layers_have_the_bits_of_eager_ones():
    run_ranks(_compiled, 2, timeout=200)


def test_replicas_and_tensor_parallelism():
    run_ranks(_with_averages_between_nodes, 4, timeout=200)
