"""Every way to run DDP: the gradients are those of DDP without a hook, to the precision of 8 bits."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from quant_buckets import make_state
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
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
MODES = {
    "bucket view": {"gradient_as_bucket_view": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": 3},
    "unused": {"skip": True},
    "join": {"join": True},
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


def _gradients(hook, *, group=None, accumulate=1, skip=False, join=False, **options):
    """Return the gradients of every step, flat. With ``join`` rank 0 has fewer batches."""
    model = DistributedDataParallel(
        Net(skip=skip), bucket_cap_mb=0.1, find_unused_parameters=skip, process_group=group, **options
    )
    if hook is not None:
        model.register_comm_hook(*hook(group))
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    with model.join() if join else contextlib.nullcontext():
        for _ in range(2 if join and dist.get_rank() == 0 else 3):
            for part in range(accumulate):
                x = torch.rand(4, 200, generator=generator)
                with model.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                    model(x).mean().backward()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            model.zero_grad(set_to_none=True)
    return torch.stack(seen)


def _error(result, reference, world_size):
    """Return the largest error, as a fraction of the bound for rounding.

    A block's values on a rank are at most W times their mean, since all have one sign. Half a step of
    that range is lost on the way to a mean, half a step of the mean's on the way back.
    """
    allowed = (world_size + 1) * reference.abs().max() / 254
    return ((result - reference).abs().max() / allowed).item()


def _modes(_):
    errors, world_size = {}, dist.get_world_size()
    for mode, options in MODES.items():
        reference = _gradients(None, **options)
        for name, hook in HOOKS.items():
            errors[name, mode] = _error(_gradients(hook, **options), reference, world_size)
    return errors


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_gradients_are_those_without_a_hook(world_size):
    for errors in run_ranks(_modes, world_size, timeout=150):
        assert errors.keys() == set(itertools.product(HOOKS, MODES))
        assert {case: error for case, error in errors.items() if not error <= 1.001} == {}


def _subgroups(rank):
    """Two groups of two ranks train apart; WORLD would mix them."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    reference = _gradients(None, group=group)
    assert not same_on_all_ranks(reference), "the groups have different data"
    return {name: _error(_gradients(hook, group=group), reference, 2) for name, hook in HOOKS.items()}


def test_subgroups_train_apart():
    for errors in run_ranks(_subgroups, 4, timeout=120):
        assert {name: error for name, error in errors.items() if not error <= 1.001} == {}
