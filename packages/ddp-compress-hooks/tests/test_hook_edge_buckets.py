"""Empty, sparse, integer and complex buckets, and groups of one rank: a defined path or a clear error."""

import pytest
import torch
import torch.distributed as dist
from hook_buckets import FOREIGN, HOOKS, make_bucket, run_hook, state_of
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, allreduce_hook, compress_hook, fp16_compress_hook
from dist_utils.testing import run_ranks, tcp_bytes_sent


def _error(name, state, bucket, tensor):
    bucket.set_buffer(tensor)
    dist.barrier()
    before = tcp_bytes_sent()
    with pytest.raises(TypeError) as caught:
        HOOKS[name][0](state, bucket)
    return str(caught.value), tcp_bytes_sent() - before, tensor.tolist()


def _edges(rank):
    bucket = make_bucket()
    seen = {}
    # All are kept until the end: connections that close while bytes are counted would count.
    states = {name: state_of(name) for name in HOOKS}
    for name, state in states.items():
        dist.barrier()
        before = tcp_bytes_sent()
        empty = run_hook(name, bucket, torch.empty(0), state=state).numel()
        seen[name, "empty"] = empty + tcp_bytes_sent() - before
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank] * 2
        sparse = torch.sparse_coo_tensor([[rank, 3]], values, (5,))
        bucket.set_buffer(sparse)
        seen[name, "sparse"] = HOOKS[name][0](state, bucket).wait().to_dense().tolist()
        seen[name, "int"] = _error(name, state, bucket, torch.tensor([rank, 3]))
        if name not in FOREIGN:
            complex_ = torch.tensor([1 + 2j, 3.0 - 1j]) * (rank + 1)
            seen[name, "complex"] = run_hook(name, bucket, complex_, state=state).tolist()
        own_shape = torch.full((2, 3), float(rank))
        seen[name, "2-D"] = run_hook(name, bucket, own_shape, state=state).tolist()
    bucket.set_buffer(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="real gradients"):
        HOOKS[FOREIGN[0]][0](None, bucket)
    return seen


@pytest.fixture(scope="module")
def edges():
    return run_ranks(_edges, 2, timeout=120)


@pytest.mark.parametrize("name", HOOKS)
def test_empty_bucket_sends_nothing(edges, name):
    assert [rank[name, "empty"] for rank in edges] == [0, 0]


@pytest.mark.parametrize("name", HOOKS)
def test_sparse_bucket_is_averaged(edges, name):
    assert [rank[name, "sparse"] for rank in edges] == [[1.0, 3.0, 0.0, 6.0, 0.0]] * 2


@pytest.mark.parametrize("name", HOOKS)
def test_integer_bucket_is_an_error_before_communication_and_stays_as_it_was(edges, name):
    for rank, seen in enumerate(edges):
        message, sent, tensor = seen[name, "int"]
        assert "torch.int64" in message
        assert sent == 0
        assert tensor == [rank, 3]


@pytest.mark.parametrize("name", [name for name in HOOKS if name not in FOREIGN])
def test_complex_bucket_is_averaged(edges, name):
    assert [rank[name, "complex"] for rank in edges] == [[1.5 + 3j, 4.5 - 1.5j]] * 2


@pytest.mark.parametrize("name", HOOKS)
def test_shape_is_kept(edges, name):
    assert [rank[name, "2-D"] for rank in edges] == [[[0.5] * 3] * 2] * 2


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
    names = [name for name in HOOKS if name not in FOREIGN and "16" not in name]
    tokens = torch.arange(3) + 2 * rank
    reference = SharedGradient()
    reference(tokens).square().sum().backward()
    means = []
    for parameter in reference.parameters():
        means.append(parameter.grad.to_dense() / 2)
        dist.all_reduce(means[-1])
    errors = {}
    for name in names:
        net = SharedGradient()
        model = DistributedDataParallel(net)
        model.register_comm_hook(state_of(name), HOOKS[name][0])
        for _ in range(2):  # DDP's first buckets, and those rebuilt after the first pass
            model.zero_grad()
            model(tokens).square().sum().backward()
        for (key, parameter), mean in zip(net.named_parameters(), means, strict=True):
            errors[name, key] = (parameter.grad.to_dense() - mean).abs().max().item()
    return errors


def test_a_sparse_gradient_is_not_averaged_in_memory_that_others_read():
    for errors in run_ranks(_shared, 2):
        assert errors
        assert max(errors.values()) < 1e-6, errors


def _embedding(rank):
    """A sparse gradient through all of DDP, together with a dense one."""
    seen = {}
    for name in HOOKS:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2))
        model = DistributedDataParallel(net)
        model.register_comm_hook(state_of(name), HOOKS[name][0])
        model(torch.tensor([rank, 5])).sum().backward()
        gradient = net[0].weight.grad
        seen[name] = gradient.is_sparse, gradient.to_dense()
    return seen


def test_sparse_embedding_trains_through_every_hook():
    for rank in run_ranks(_embedding, 2):
        _, expected = rank["allreduce_hook"]
        assert (expected.abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 5]
        for is_sparse, gradient in rank.values():
            assert is_sparse
            assert torch.equal(gradient[[0, 1]] * 2, gradient[[5, 5]])
            assert torch.equal(gradient, expected)


def _alone(rank, world_size):
    """A group of one rank, as WORLD or as a subgroup: the gradient comes back untouched."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    bucket = make_bucket()
    values = torch.tensor([1 + 2**-20, 1e-30, 1e30, float("nan")])
    same = {}
    sent = {}
    for name in HOOKS:
        if world_size > 1 and name in FOREIGN:
            continue  # a foreign hook chooses its own group
        group = groups[rank] if world_size > 1 else None
        dist.barrier()
        before = tcp_bytes_sent()
        result = run_hook(name, bucket, values.clone(), group=group)
        sent[name] = tcp_bytes_sent() - before
        same[name] = torch.equal(result.view(torch.int32), values.view(torch.int32))
    return same, sent


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_of_one_rank_is_the_identity_and_sends_nothing(world_size):
    for same, sent in run_ranks(_alone, world_size, world_size):
        assert all(same.values())
        assert set(sent.values()) == {0}


def _groups(rank):
    """Pairs {0, 1} and {2, 3}, as a group, a state and a mesh; and the error of a rank outside."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[rank // 2], pairs[1 - rank // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    bucket = make_bucket()
    seen = []
    for name in HOOKS:
        if name not in FOREIGN:
            seen += [
                run_hook(name, bucket, torch.tensor([float(rank)]), group=group).item()
                for group in (mine, mesh["dp"], None)
            ]
    bucket.set_buffer(torch.ones(1))
    for state in (other, "group", mesh):
        with pytest.raises((TypeError, ValueError)) as caught:
            fp16_compress_hook(state, bucket)
        seen.append(str(caught.value))
    return seen


def test_groups_average_among_themselves_and_strangers_are_refused():
    hooks = len(HOOKS) - len(FOREIGN)
    for rank, seen in enumerate(run_ranks(_groups, 4, timeout=120)):
        *means, stranger, text, two_dimensions = seen
        pair = 0.5 if rank < 2 else 2.5
        assert means == [pair, pair, 1.5] * hooks
        assert f"rank {rank} is not a member" in stranger
        assert "got str" in text
        assert "2 dimensions" in two_dimensions


def _states(rank):
    bucket = make_bucket()
    bucket.set_buffer(torch.ones(1))
    messages = []
    for hook, state in [
        (allreduce_hook, CompressState(wire_dtype=torch.float16)),
        (fp16_compress_hook, CompressState(wire_dtype=torch.bfloat16)),
    ]:
        with pytest.raises(ValueError, match="wire_dtype") as caught:
            hook(state, bucket)
        messages.append(str(caught.value))
    same = compress_hook(CompressState(wire_dtype=torch.float16), bucket).wait().item()
    return messages, same


def test_a_hook_refuses_a_state_that_asks_for_another_dtype():
    (allreduce, fp16), same = run_ranks(_states, 1)[0]
    assert "torch.float16" in allreduce
    assert "torch.float16" in fp16
    assert "torch.bfloat16" in fp16
    assert same == 1.0
