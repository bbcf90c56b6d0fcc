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
from host_names import take_host_name
from kernel_cases import decoded, encoded
from quant_buckets import assert_same
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
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
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import call_in_backward, run_ranks, same_on_all_ranks

pytestmark = needs_custom_gathers
LAYOUT = Layout("int8", 128, rotate=True)
HALF = fsdp.MixedPrecisionPolicy(param_dtype=torch.float16)


def _rounded(parameter, dtype):
    """Return what all ranks must gather of a parameter: of each shard what its own rank has rounded."""
    exact, dim = parameter.full_tensor().detach().to(dtype).cpu(), parameter.placements[-1].dim
    if exact.dim() == 1:
        return exact
    ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    size = list(exact.shape)
    size[dim] = -(-size[dim] // ranks)
    shards = []
    for chunk in exact.chunk(ranks, dim):
        padded = torch.zeros(size, dtype=dtype)
        padded.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
        values = decoded([encoded(padded.flatten(), LAYOUT)], padded.numel(), LAYOUT, dtype)
        shards.append(values.view(size).narrow(dim, 0, chunk.shape[dim]))
    return torch.cat(shards, dim)


SHARDING = {
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "fp16": {"mp_policy": HALF},
    "offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    "second dimension": {"shard_placement_fn": lambda one: Shard(one.dim() - 1)},
}


def _weights(rank, hosts):
    """All passes see the same weights, on all ranks: those that the formula gives."""
    take_host_name(hosts[rank])
    mesh = init_device_mesh(served_device(), (len(hosts),))
    options = dict(SHARDING)
    if len(hosts) == 4:
        options["resharded to two"] = {"reshard_after_forward": 2}
    for name, sharding in options.items():
        dtype = getattr(sharding.get("mp_policy"), "param_dtype", torch.float32)
        for ours in ({}, {"keep_for_backward": True}, {"intra_node": "flat"}):
            width = 40 if name == "second dimension" else 37  # FSDP divides only rows unevenly
            net = shard_layers(watched_layers(width=width), mesh, **sharding)
            handle = quantize_all_gather(net, min_bytes=0, **ours)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            for step in range(2):
                exact = whole(net)
                expected = [[_rounded(one, dtype) for one in layer.parameters()] for layer in net]
                net(_batch(step, width).to(mesh.device_type).requires_grad_()).square().mean().backward()
                assert_same(whole(net), exact, name)
                for layer, weights in zip(net, expected, strict=True):
                    forward, backward = (
                        [one.cpu() for one in layer.seen[when][-1]] for when in ("forward", "backward")
                    )
                    assert_same(forward, weights, (name, ours))
                    assert_same(backward, weights, (name, ours))
                    assert same_on_all_ranks(forward)
                optimizer.step()
                optimizer.zero_grad()
            _check_statistics(handle.statistics, name, ours)
    return True


def _check_statistics(found, name, ours):
    """Three layers were gathered in two steps, once or twice in each."""
    counts = found.quantized_gathers, found.plain_gathers, found.reused_gathers
    if name == "kept":
        assert counts == (6, 0, 0), "reshard_after_forward=False: once a step"
    elif name == "resharded to two":
        assert counts == (6, 6, 0), "in the backward pass inside of a host, as they are"
    elif "keep_for_backward" in ours:
        assert counts == (6, 0, 6)
    else:
        assert counts == (12, 0, 0)
    assert 0 < found.bytes_ratio < 0.8, (name, ours, found)
    assert 0 <= found.bytes_between_hosts <= found.bytes_sent


def _batch(step, width=37):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


@pytest.mark.parametrize("hosts", ["01", "0011", pytest.param("0123", marks=pytest.mark.exhaustive)])
def test_weights_are_equal_on_all_ranks_and_in_both_passes_and_shards_stay_exact(hosts):
    assert run_ranks(_weights, len(hosts), hosts, timeout=200) == [True] * len(hosts)


def _bytes_between_hosts(rank, hosts):
    """Return what each way sends to other hosts in one gather of a large layer, for each of its bytes."""
    if not take_host_name(hosts[rank]):
        return None
    found = {}
    for way in ("auto", "flat"):
        net = fsdp.fully_shard(torch.nn.Linear(256, 256, bias=False))
        handle = quantize_all_gather(net, intra_node=way)
        net.unshard()
        found[way] = handle.statistics.bytes_between_hosts / 256**2
    with mock.patch.object(module_gather, "runs_on_host", return_value=False):  # as a GPU's backend sends
        net.reshard()
        before = handle.statistics
        net.unshard()
    found["ring"] = (handle.statistics - before).bytes_between_hosts / 256**2
    return found


@pytest.mark.parametrize("hosts", ["0011", "0123"])
def test_a_shard_enters_each_host_once(hosts):
    found = run_ranks(_bytes_between_hosts, len(hosts), hosts, timeout=60)
    if found[0] is None:
        pytest.skip("this user cannot give a process a host name of its own")
    scales = 1 + 4 / 128
    for way, times in (("auto", 1), ("flat", 2 if hosts == "0011" else 1)):
        for host in set(hosts):
            sent = sum(of_rank[way] for of_rank, name in zip(found, hosts, strict=True) if name == host)
            entering = (len(set(hosts)) - 1) / len(set(hosts))
            assert sent == pytest.approx(times * entering * scales)
    neighbors = [
        of_rank["ring"] for rank, of_rank in enumerate(found) if hosts[rank] != hosts[(rank + 1) % 4]
    ]
    assert sum(of_rank["ring"] for of_rank in found) == pytest.approx(sum(neighbors))
    assert neighbors == pytest.approx([3 / 4 * scales] * len(neighbors)), "in a ring"


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
    return net, None if ours is None else quantize_all_gather(net, min_bytes=0, **ours)


def _losses(net, steps=8, *, accumulate=False, batch=_batch):
    required = [one for one in net.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(required, lr=0.01), []
    for step in range(steps):
        for last in (False, True) if accumulate else (True,):
            net.set_requires_gradient_sync(last)
            loss = (net(batch(step).requires_grad_()) - 0.1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
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
        for ours in ({}, {"keep_for_backward": True}, {"differences": True}):
            net, handle = _composed(mesh, ours=ours, **options)
            _near(native, _losses(net, **run))
            assert _same_weights_on_all_ranks(net)
            assert handle.statistics.quantized_gathers + handle.statistics.exact_gathers > 0
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
        handle = quantize_all_gather(net, min_bytes=0, **ours)
        found, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            if step == 0 or prepare is _asynchronous:
                prepare(net)
            loss = net(_batch(step).requires_grad_()).square().mean()
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


def _compiled(_):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for how in ("eager", "layers", "whole"):
        net = sharded(mesh)
        quantize_all_gather(net, min_bytes=0, keep_for_backward=how != "whole")
        if how == "layers":
            for layer in net.layers:
                layer.compile(backend="aot_eager")
        elif how == "whole":
            net.compile(backend="aot_eager")
        found[how] = train(net, 2)
    assert_same(found["eager"], found["layers"])
    assert_same(found["eager"], found["whole"])


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
                    handle = quantize_all_gather(net, min_bytes=0)
            found = []
            for step in range(steps):
                x = _batch(step).to(dtypes[0])
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
    handle = quantize_all_gather(halves[1], min_bytes=0)
    quantize_all_gather(halves[2], min_bytes=0, differences=True)
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
    handle = quantize_all_gather(net, min_bytes=0, keep_for_backward=True)
    gathers = handle._gathers.values()
    outputs = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs.append(net(_batch(0)))
        assert not any(gather._kept for gather in gathers)
    assert torch.equal(*outputs)
    net(_batch(0).requires_grad_())
    assert any(gather._kept for gather in gathers)
    net.eval()
    with torch.no_grad():
        net(_batch(0))
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
    assert_same(rounded, [_rounded(one, torch.float32) for one in net.parameters()])
    loss = net(_batch(1).requires_grad_()).square().mean()
    handle.remove()
    assert not any(gather._kept for gather in gathers)
    loss.backward()
    count = handle.statistics
    net(_batch(1))
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
    net(_batch(0).requires_grad_()).square().mean().backward()
    net.layers[2].unshard()
    assert not kept(), "a checkpoint's forward passes end early"
    net, kept = model()
    with mock.patch.object(net.layers[1], "forward", _fails), contextlib.suppress(ZeroDivisionError):
        net(_batch(0).requires_grad_())
    net.layers[2].unshard()
    assert kept() == {"layers.0"}, "a forward pass that has failed is over"
    net, kept = model()
    net.layers[2].set_unshard_in_backward(False)
    net(_batch(0).requires_grad_())
    assert kept() == {"layers.0", "layers.1"}
    net, kept = model()
    net.requires_grad_(False)
    net(_batch(0))
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
        quantize_all_gather(net, min_bytes=0, **ours)
        net(_batch(0).requires_grad_())
        double(net)
        exact = "differences" in ours  # they are too large
        expected = whole(net) if exact else [_rounded(one, torch.float32) for one in net.parameters()]
        x = torch.zeros(1, requires_grad=True)
        call_in_backward(x, lambda net=net: net(_batch(1))).sum().backward()
        for layer, weights in with_weights(net, expected):
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
        quantize_all_gather(net, min_bytes=0, **ours)
        net(_batch(0).requires_grad_()).square().mean().backward()
        for layer in layers:
            first, *others = layer.seen["forward"] + layer.seen["backward"]
            assert len(others) >= 2, ours
            for seen in others:
                assert_same(seen, first, ours)


def _fails(*_):
    raise ZeroDivisionError


def _not_finite_and_errors(_):
    """A NaN shows on all ranks; an error in a pass of the user's leaves nothing that the next one uses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for keep in (False, True):
        net = shard_layers(watched_layers(), mesh)
        quantize_all_gather(net, min_bytes=0, keep_for_backward=keep)
        twin = shard_layers(watched_layers(), mesh)
        quantize_all_gather(twin, min_bytes=0)
        for fails in ("forward", "backward"):
            with contextlib.suppress(ZeroDivisionError), mock.patch.object(net[1], "_note", _failing(fails)):
                net(_batch(0).requires_grad_()).square().mean().backward()
            net.zero_grad()
            if not hasattr(net, "reset_iter_state"):
                break
            net.reset_iter_state()
            net.zero_grad()
            for one in (net, twin):
                with torch.no_grad():
                    for parameter in one.parameters():
                        local_shard = parameter.to_local()
                        local_shard.add_(0.01)
                one.zero_grad()
                one(_batch(1).requires_grad_()).square().mean().backward()
            assert_same(
                [local(one.grad) for one in net.parameters()], [local(one.grad) for one in twin.parameters()]
            )
        with torch.no_grad():
            if dist.get_rank() == 1:
                net[0].layer.weight.to_local()[0, 0] = torch.nan
        net[0].unshard()
        weight = local(net[0].layer.weight)
        assert same_on_all_ranks(weight)
        assert 0 < weight.isnan().sum() <= LAYOUT.block_size
        net[0].reshard()


def _failing(when):
    def note(during):
        if during == when:
            raise ZeroDivisionError

    return note


def _two_micro_batches(_):
    """Two forward passes before a backward pass, twice through one graph, and a layer that is used twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for keep in (False, True):
        net = sharded(mesh, twice=True)
        handle = quantize_all_gather(net, min_bytes=0, keep_for_backward=keep)
        first, second = (net(_batch(step)).square().mean() for step in range(2))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        found.append([local(one.grad) for one in net.parameters()])
        assert bool(handle.statistics.reused_gathers) == keep
    assert_same(*found)


def _one_rank(_):
    net = shard_layers(watched_layers(), init_device_mesh("cpu", (1,)))
    exact = whole(net)
    with pytest.warns(UserWarning, match="full precision: .*one rank alone has its shards"):
        handle = quantize_all_gather(net, min_bytes=0, keep_for_backward=True)
    assert handle.relative_error() is None
    net(_batch(0).requires_grad_()).square().mean().backward()
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
        _not_finite_and_errors,
        _two_micro_batches,
    ):
        check(rank)


def test_prefetches_dtypes_evaluation_errors_and_several_passes():
    run_ranks(_two_ranks, 2, timeout=200)


def test_training_with_frozen_tied_and_checkpointed_layers_and_gradients_in_few_bits():
    run_ranks(_with_everything, 2, timeout=200)


def test_compiled_layers_have_the_bits_of_eager_ones():
    run_ranks(_compiled, 2, timeout=200)


def test_replicas_and_tensor_parallelism():
    run_ranks(_with_averages_between_nodes, 4, timeout=200)
