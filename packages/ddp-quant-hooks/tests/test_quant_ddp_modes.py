"""Every way to run DDP: the gradients are those of DDP without a hook, to the precision of 8 bits."""

import itertools

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks, same_on_all_ranks

HOOKS = {
    "int8": lambda group: (make_state("int8", group), quantized_allreduce_hook),
    "int8 and exact 1d": lambda group: (make_state("int8", group, exact_1d=True), quantized_allreduce_hook),
    "pertensor": lambda group: (group, quantization_pertensor_hook),
    "perchannel": lambda group: (group, quantization_perchannel_hook),
}


class Net(torch.nn.Module):
    """Three layers, one of them used only on odd ranks if ``skip``."""

    def __init__(self, *, skip=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(3))
        # Positive weights and inputs: gradients have one sign on all ranks, and a mean bounds them.
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, 0, 0.01)
        self.skip = skip

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1 and dist.get_rank() % 2 == 0):
                x = layer(x)
        return x


def _gradients(hook, *, group=None, steps=3, accumulate=1, skip=False, join=False, **options):
    """Train by plain SGD; return the gradients of every step, flat."""
    model = DistributedDataParallel(
        Net(skip=skip), bucket_cap_mb=0.1, find_unused_parameters=skip, process_group=group, **options
    )
    if hook is not None:
        model.register_comm_hook(*hook(group))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []

    def step():
        for part in range(accumulate):
            x = torch.rand(4, 200, generator=generator)
            if part < accumulate - 1:
                with model.no_sync():
                    model(x).mean().backward()
            else:
                model(x).mean().backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        model.zero_grad(set_to_none=True)

    if join:
        with model.join():
            for _ in range(steps):
                step()
    else:
        for _ in range(steps):
            step()
    return torch.stack(seen)


def _error(result, reference, world_size):
    """Return the largest error, as a fraction of the bound for rounding.

    A block's values on a rank are at most W times their mean, since all have one sign. Half a step of
    that range is lost on the way to a mean, half a step of the mean's on the way back.
    """
    allowed = (world_size + 1) * reference.abs().max() / 254
    return ((result - reference).abs().max() / allowed).item()


MODES = {
    "bucket view": {"gradient_as_bucket_view": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": 3},
    "unused": {"skip": True},
}


def _modes(rank):
    seen, world_size = {}, dist.get_world_size()
    # Rank 0 has fewer batches than the others.
    for mode, options in {**MODES, "join": {"steps": 2 + min(rank, 1), "join": True}}.items():
        reference = _gradients(None, **options)
        for name, hook in HOOKS.items():
            seen[name, mode] = _error(_gradients(hook, **options), reference, world_size)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_without_a_hook(world_size):
    for rank in run_ranks(_modes, world_size, timeout=150):
        assert set(rank) == set(itertools.product(HOOKS, [*MODES, "join"]))
        assert {case: error for case, error in rank.items() if not error <= 1.001} == {}


def _subgroups(rank):
    """Two groups of two ranks train apart; the default group would mix them."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    group = pairs[rank // 2]
    reference = _gradients(None, group=group)
    seen = {}
    for name, hook in HOOKS.items():
        for kind, like in (("group", group), ("mesh", mesh["dp"])):
            gradients = _gradients(lambda _, hook=hook, like=like: hook(like), group=group)
            seen[name, kind] = _error(gradients, reference, 2)
    other = reference.clone()
    dist.all_reduce(other)
    seen["groups are alike"] = float(torch.equal(other, 4 * reference))
    with pytest.raises(ValueError, match="not a member"):
        QuantizedAllreduceState(pairs[1 - rank // 2])
    return seen


def test_subgroups_and_meshes():
    for rank in run_ranks(_subgroups, 4, timeout=120):
        assert {case: error for case, error in rank.items() if not error <= 1.001} == {}
        assert rank["groups are alike"] == 0


def _two_models(rank):
    """Two models that step in turns, each with a state of its own, for 50 steps."""
    torch.manual_seed(1)
    nets = [
        torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Tanh(), torch.nn.Linear(150, 150))
        for _ in "ab"
    ]
    models = [DistributedDataParallel(net, bucket_cap_mb=0.05) for net in nets]
    for model, name in zip(models, ("int8", "feedback both"), strict=True):
        model.register_comm_hook(make_state(name), quantized_allreduce_hook)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(8, 150, generator=generator)
        loss = (models[1](models[0](x)) - x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [same_on_all_ranks(list(model.parameters())) for model in models], losses[-1] / losses[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_are_bitwise_equal_after_50_steps_of_two_models(world_size):
    for equal, progress in run_ranks(_two_models, world_size, timeout=120):
        assert equal == [True, True]
        assert progress < 0.97


def _scaler(rank):
    """An infinity on the last rank alone: every rank must skip the step and halve the scale."""
    seen = []
    for hook in HOOKS.values():
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        model.register_comm_hook(*hook(None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x = torch.ones(4, 8)
        if rank == dist.get_world_size() - 1:
            x[0, 0] = float("inf")
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        seen.append((unchanged, scaler.get_scale()))
    return seen


def test_grad_scaler_sees_an_infinity_of_one_rank_everywhere():
    assert run_ranks(_scaler, 3) == [[(True, 512.0)] * len(HOOKS)] * 3
