"""Every way to run DDP gives the gradients of DDP without a hook, to the precision of the wire dtype."""

import torch
import torch.distributed as dist
from hook_buckets import HOOKS, state_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import fp16_compress_wrapper
from dist_utils.testing import run_ranks

# A mean of 2 or 4 gradients of one sign and scale: one rounding per cast and sum, and one for the division.
TOLERANCE = {None: 2**-20, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8, torch.float32: 2**-20}


class Net(torch.nn.Module):
    """Three layers; with ``skip``, one of them is only used on odd ranks."""

    def __init__(self, *, skip=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(200, 200, bias=False) for _ in range(3))
        self.skip = skip

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1 and dist.get_rank() % 2 == 0):
                x = layer(x)
        return x


def _gradients(name, *, steps=3, accumulate=1, skip=False, join=False, **options):
    """Train with plain SGD; return the gradients of every step."""
    model = DistributedDataParallel(Net(skip=skip), bucket_cap_mb=0.1, find_unused_parameters=skip, **options)
    if name is not None:
        model.register_comm_hook(state_of(name), HOOKS[name][0])
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    with model.join(enable=join):
        for _ in range(steps):
            for part in range(accumulate):
                x = torch.rand(4, 200, generator=generator)
                model.require_backward_grad_sync = part == accumulate - 1  # as no_sync() does
                model(x).mean().backward()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            model.zero_grad(set_to_none=True)
    return torch.stack(seen)


def _excess(name, reference, **options):
    """Return the relative error of a hook's gradients, in units of what is allowed."""
    error = (_gradients(name, **options) - reference).norm() / reference.norm()
    return error.item() / TOLERANCE[HOOKS[name][1]]


MODES = {
    "bucket view": {"gradient_as_bucket_view": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": 3},
    "unused": {"skip": True},
    "join": {"join": True},
}


def _modes(rank):
    seen = {}
    for mode, options in MODES.items():
        steps = 2 + rank if mode == "join" else 2  # rank 0 has fewer batches than rank 1
        reference = _gradients(None, steps=steps, **options)
        for name in HOOKS:
            seen[name, mode] = _excess(name, reference, steps=steps, **options)
    return seen


def test_gradients_are_those_without_a_hook():
    for seen in run_ranks(_modes, 2, timeout=120):
        assert len(seen) == len(HOOKS) * len(MODES)
        assert {case: excess for case, excess in seen.items() if not excess <= 1} == {}


def _power_sgd(rank):
    """PyTorch's powerSGD in our wrapper and in PyTorch's, from the same start."""
    seen = []
    for wrapper in (fp16_compress_wrapper, default_hooks.fp16_compress_wrapper):
        model = DistributedDataParallel(Net())
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=0)
        model.register_comm_hook(state, wrapper(powerSGD_hook))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(5):
            model.zero_grad()
            model(torch.rand(4, 200, generator=generator)).mean().backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return seen


def test_a_wrapper_takes_power_sgd_as_pytorchs_wrapper_does():
    (ours, pytorchs), (other, _) = run_ranks(_power_sgd, 2)
    assert ours.norm() > 0
    assert torch.equal(ours, pytorchs)
    assert torch.equal(ours, other)
