"""Every way to run DDP gives the gradients of DDP without a hook, to the precision of the wire dtype."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hook_buckets import HOOKS, state_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, fp16_compress_wrapper
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


def _gradients(name, *, steps=3, accumulate=1, skip=False, inputs=None, join=False, state=None, **options):
    """Train with plain SGD; return the flat gradients of every step."""
    model = DistributedDataParallel(Net(skip=skip), bucket_cap_mb=0.1, find_unused_parameters=skip, **options)
    if name is not None:
        model.register_comm_hook(state or state_of(name), HOOKS[name][0])
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


def _difference(name, reference, **options):
    result = _gradients(name, **options)
    error = (result - reference).norm() / reference.norm()
    return error.item()


MODES = {
    "bucket view": {"gradient_as_bucket_view": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": 3},
    "unused": {"skip": True},
}


def _modes(rank):
    seen = {}
    for mode, options in MODES.items():
        reference = _gradients(None, **options)
        for name in HOOKS:
            seen[name, mode] = _difference(name, reference, **options)
    # Rank 0 has fewer batches than rank 1.
    options = {"steps": 2 + rank, "join": True}
    reference = _gradients(None, **options)
    for name in HOOKS:
        seen[name, "join"] = _difference(name, reference, **options)
    return seen


@pytest.fixture(scope="module")
def modes():
    return run_ranks(_modes, 2, timeout=180)


@pytest.mark.parametrize(("name", "mode"), list(itertools.product(HOOKS, [*MODES, "join"])))
def test_gradients_are_those_without_a_hook(modes, name, mode):
    for rank in modes:
        assert rank[name, mode] <= TOLERANCE[HOOKS[name][1]]


def _subgroups(rank):
    """Two groups of two ranks train apart; the default group would mix them."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    group = pairs[rank // 2]
    reference = _gradients(None, process_group=group)
    seen = {}
    for name in ("fp16_compress_hook", "fp16_compress_hook/fp32", "allreduce_hook"):
        options = HOOKS[name][2] or {}
        for kind, like in (("group", group), ("mesh", mesh["dp"])):
            state = CompressState(like, **options)
            seen[name, kind] = _difference(name, reference, process_group=group, state=state)
        seen[name, "device_mesh="] = _difference(
            name, reference, device_mesh=mesh["dp"], state=CompressState(mesh["dp"], **options)
        )
    other = reference.clone()
    dist.all_reduce(other)
    seen["groups differ"] = not torch.equal(other, 4 * reference)
    return seen


def test_subgroups_and_meshes():
    for rank in run_ranks(_subgroups, 4, timeout=120):
        assert rank.pop("groups differ")
        assert all(error <= 4 * 2**-11 for error in rank.values()), rank


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
