"""Empty, sparse, integer and complex buckets, and groups of one rank: a defined path or a clear error."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hook_buckets import FOREIGN, HOOKS, OURS, make_bucket, run_hook, state_of
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_wrapper,
    compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dist_utils.comm_hooks import completed_future
from dist_utils.testing import grad_bucket, run_ranks, same_bits, tcp_bytes_sent


def _edges(rank):
    bucket, seen = make_bucket(), {name: {} for name in HOOKS}
    # All are kept until the end: connections that close while bytes are counted would count.
    states = {name: state_of(name) for name in HOOKS}
    for name, state in states.items():
        hook = HOOKS[name][0]
        dist.barrier()
        before = tcp_bytes_sent()
        run_hook(name, bucket, torch.empty(0), state=state)
        integers = torch.tensor([rank, 3])
        bucket.set_buffer(integers)
        with pytest.raises(TypeError, match=r"floating-point dtype, got torch\.int64"):
            hook(state, bucket)
        seen[name]["sent"] = tcp_bytes_sent() - before
        dist.barrier()
        seen[name]["integers"] = integers.tolist()
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank] * 2
        bucket.set_buffer(torch.sparse_coo_tensor([[rank, 3]], values, (5,)))
        seen[name]["sparse"] = hook(state, bucket).wait().to_dense().tolist()
        seen[name]["2-D"] = run_hook(name, bucket, torch.full((2, 3), float(rank)), state=state).tolist()
        if name in FOREIGN:
            bucket.set_buffer(torch.ones(2, dtype=torch.complex64))
            with pytest.raises(TypeError, match="real gradients"):
                hook(state, bucket)
        else:
            complex_ = torch.tensor([1 + 2j, 3.0 - 1j]) * (rank + 1)
            seen[name]["complex"] = run_hook(name, bucket, complex_, state=state).tolist()
    return seen


def test_edge_buckets_are_averaged_or_refused_before_anything_is_sent():
    for rank, seen in enumerate(run_ranks(_edges, 2)):
        for name, found in seen.items():
            expected = {"sent": 0, "integers": [rank, 3], "sparse": [1.0, 3.0, 0.0, 6.0, 0.0]}
            expected["2-D"] = [[0.5] * 3] * 2
            if name in OURS:
                expected["complex"] = [1.5 + 3j, 4.5 - 1.5j]
            assert found == expected, name


class SharedGradient(torch.nn.Module):
    """Autograd lets the sparse gradients of both embeddings share memory with the gradient of their sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.left, self.right = (
            torch.nn.Embedding(10, 8, sparse=True, dtype=torch.float64) for _ in range(2)
        )

    def forward(self, tokens):
        ones = torch.ones(len(tokens), 8, dtype=torch.float64)
        return torch.tanh(self.layer(ones)) + self.left(tokens) + self.right(tokens)


def _shared(rank):
    tokens = torch.arange(3) + 2 * rank
    reference = SharedGradient()
    reference(tokens).square().sum().backward()
    means = []
    for parameter in reference.parameters():
        means.append(parameter.grad.to_dense() / 2)
        dist.all_reduce(means[-1])
    errors = {}
    for name in HOOKS:
        net = SharedGradient()
        model = DistributedDataParallel(net)
        model.register_comm_hook(state_of(name), HOOKS[name][0])
        for _ in range(2):  # DDP's first buckets, and those rebuilt after the first pass
            model.zero_grad()
            model(tokens).square().sum().backward()
        assert net.left.weight.grad.is_sparse
        for (key, parameter), mean in zip(net.named_parameters(), means, strict=True):
            exact = name in ("allreduce_hook", "allreduce_hook/fp32") or parameter.grad.is_sparse
            allowed = 1e-12 if exact else 2**-6  # else rounded to at least 8 bits
            error = (parameter.grad.to_dense() - mean).norm() / mean.norm()
            errors[name, key] = error.item() / allowed
    return errors


def test_sparse_gradients_are_averaged_in_full_precision_and_not_in_memory_that_others_read():
    for errors in run_ranks(_shared, 2):
        assert len(errors) == 4 * len(HOOKS)
        assert {case: error for case, error in errors.items() if not error <= 1} == {}


def _alone(rank):
    """A group of one rank, as WORLD or as a subgroup: the gradient comes back untouched."""
    world_size = dist.get_world_size()
    groups = [dist.new_group([other]) for other in range(world_size)]
    bucket, changed = make_bucket(), {}
    values = torch.tensor([1 + 2**-20, 1e-30, 1e30, float("nan")])
    for name in OURS if world_size > 1 else HOOKS:  # a foreign hook chooses its own group
        dist.barrier()
        before = tcp_bytes_sent()
        result = run_hook(name, bucket, values.clone(), group=groups[rank] if world_size > 1 else None)
        if tcp_bytes_sent() != before or not same_bits(result, values):
            changed[name] = result.tolist(), tcp_bytes_sent() - before
    return changed


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_of_one_rank_is_the_identity_and_sends_nothing(world_size):
    assert run_ranks(_alone, world_size) == [{}] * world_size


class _OwnState:
    """The state of a user's hook, in which a wrapper does not find the group."""

    def __init__(self, group):
        self.group = group


def _own_hook(state, bucket):
    return allreduce_hook(state.group, bucket)


def _stages(rank, closure):
    """Return a mean of two stages of a pipeline, whose buckets differ."""
    stage = rank // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    ddp = DistributedDataParallel(torch.nn.Linear(3 + stage, 1, bias=False), process_group=group)
    own = _OwnState(group)
    if closure:
        ddp.register_comm_hook(None, bf16_compress_wrapper(lambda _, bucket: _own_hook(own, bucket)))
    else:
        ddp.register_comm_hook(own, bf16_compress_wrapper(_own_hook))
    ddp(torch.full((1, 3 + stage), float(rank))).sum().backward()
    return ddp.module.weight.grad.unique().item()


def _local_hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return completed_future(bucket.buffer())


def _without_memory(rank):
    """Return what a wrapped hook's state has for an error if rank 1 has no memory for the bucket."""
    state, bucket = CompressState(), grad_bucket([torch.ones(30)])
    missing = mock.patch.object(torch.Tensor, "to", side_effect=MemoryError("no memory"))
    with missing if rank == 1 else contextlib.nullcontext():
        future = fp16_compress_wrapper(_local_hook)(state, bucket)
    if rank == 1:
        with pytest.raises(RuntimeError, match="no memory"):
            future.wait()
    return type(state.worker.error).__name__


def test_a_wrapped_hook_without_memory_leaves_ddp_whole_and_tells_its_state():
    assert run_ranks(_without_memory, 2) == ["NoneType", "MemoryError"]


def _one_rank(rank):
    del rank
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(_OwnState(dist.group.WORLD), fp16_compress_wrapper(_own_hook))
    ddp(torch.full((1, 1), 1e5)).sum().backward()
    return ddp.module.weight.grad.item()


def test_a_wrapped_hook_of_one_rank_gets_its_bucket_unchanged():
    assert run_ranks(_one_rank, 1) == [1e5]


@pytest.mark.parametrize("closure", [False, True])
def test_a_wrapped_hook_whose_state_names_no_group_is_not_compared_over_others(closure):
    assert run_ranks(_stages, 4, closure) == [0.5, 0.5, 2.5, 2.5]


def _groups(rank):
    """Pairs {0, 1} and {2, 3}, as a group, a state, a mesh and a model; and the error of a rank outside."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[rank // 2], pairs[1 - rank // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    bucket = make_bucket()
    means = {
        name: [
            run_hook(name, bucket, torch.tensor([float(rank)]), group=group).item()
            for group in (mine, mesh["dp"], None)
        ]
        for name in OURS
    }
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=mine)
    assert CompressState().bind(ddp).process_group is mine
    with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2, 3\], but the model over ranks \["):
        CompressState(dist.group.WORLD).bind(ddp)
    bucket.set_buffer(torch.ones(1))
    for kind, message, hook, state in (
        (ValueError, f"rank {rank} is not a member", fp16_compress_hook, other),
        (TypeError, "got str", fp16_compress_hook, "group"),
        (ValueError, "2 dimensions", fp16_compress_hook, mesh),
        (ValueError, "wire_dtype is torch.float16", allreduce_hook, CompressState(wire_dtype=torch.float16)),
        (
            ValueError,
            "sends torch.float16, .* torch.bfloat16",
            fp16_compress_hook,
            CompressState(wire_dtype=torch.bfloat16),
        ),
    ):
        with pytest.raises(kind, match=message):
            hook(state, bucket)
    return means, compress_hook(CompressState(wire_dtype=torch.float16), bucket).wait().item()


def test_groups_average_among_themselves_and_other_states_are_refused():
    for rank, (means, same) in enumerate(run_ranks(_groups, 4)):
        assert means == dict.fromkeys(OURS, [0.5 if rank < 2 else 2.5] * 2 + [1.5])
        assert same == 1.0
