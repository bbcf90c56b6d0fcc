"""Buffers, strides, conventions, operations and errors."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks


def _caught(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as error:
        return str(error)
    return None


def _strides(rank):
    """Different strides on different ranks, and cotangents with stride 0."""
    seen = {}
    base = torch.arange(6.0).view(2, 3) + 10 * rank
    x = base.t().contiguous().t() if rank else base.clone()
    x.requires_grad_()
    (first, second) = dac.all_gather(x)
    seen["all_gather"] = torch.equal(first, torch.arange(6.0).view(2, 3))
    seen["second"] = torch.equal(second, torch.arange(6.0).view(2, 3) + 10)
    cotangent = torch.arange(6.0).view(3, 2).t() if rank else torch.arange(6.0).view(2, 3)
    torch.autograd.backward([first, second], [cotangent, cotangent])
    right = torch.arange(6.0).view(3, 2).t() + torch.arange(6.0).view(2, 3)
    seen["backward"] = torch.equal(x.grad, right)
    for name, call in {
        "broadcast": lambda x: dac.broadcast(x, 0),
        "reduce": lambda x: dac.reduce(x, 0),
        "gather": lambda x: torch.stack(dac.gather(x, 0)),
    }.items():
        x.grad = None
        call(x).sum().backward()  # the cotangents are expanded
        seen[name] = x.grad.unique().tolist()
    return seen


def test_strides_do_not_matter():
    first, second = run_ranks(_strides, 2)
    for seen in (first, second):
        assert seen["all_gather"]
        assert seen["second"]
        assert seen["backward"]
    assert (first["broadcast"], second["broadcast"]) == ([2], [0])
    assert (first["reduce"], second["reduce"]) == ([1], [1])
    assert (first["gather"], second["gather"]) == ([1], [1])


def _buffers(rank):
    seen = {}
    x = torch.full((2,), 1.0 + rank, requires_grad=True)
    buffer = torch.empty(2)
    first = dac.all_to_all_single(buffer, x)
    second = dac.all_to_all_single(buffer, 10 * x)  # the same buffer again
    (first + second).sum().backward()
    seen["reused"] = x.grad.tolist()
    wide = torch.zeros(2, 2)
    result = dac.reduce_scatter(wide[:, 0], [x, x])
    seen["strided"] = torch.equal(wide[:, 0], result.detach()) and wide[:, 1].tolist() == [0, 0]
    out = [torch.empty(1 + rank), torch.empty(1 + rank)]
    dac.all_to_all(out, [torch.full((1 + other,), float(rank)) for other in range(2)])
    seen["uneven"] = [entry.tolist() for entry in out]
    whole = torch.empty(2, 2)
    seen["base"] = dac._all_gather_base(whole, x).tolist() == whole.tolist() == [[1, 1], [2, 2]]
    seen["same"] = torch.equal(whole, dac.all_gather_base(torch.empty(2, 2), x))
    return seen


def test_buffers_are_filled_and_may_be_used_again():
    for rank, seen in enumerate(run_ranks(_buffers, 2)):
        assert seen["reused"] == [11, 11]
        assert seen["strided"]
        assert seen["uneven"] == [[0.0] * (1 + rank), [1.0] * (1 + rank)]
        assert seen["base"]
        assert seen["same"]


def _conventions(rank):
    """Every rank computes the same loss: its gradient counted once, and W times."""
    w = torch.tensor([1.0, 2.0, 3.0])
    seen = {}
    for grad in ("sum", "replicated"):
        x = (torch.arange(3.0) + 1 + rank).requires_grad_()
        calls = {
            "all_reduce": lambda x, grad=grad: dac.all_reduce(x, grad=grad),
            "avg": lambda x, grad=grad: dac.all_reduce(x, "avg", grad=grad),
            "max": lambda x, grad=grad: dac.all_reduce(x, "max", grad=grad),
            "all_gather": lambda x, grad=grad: sum(dac.all_gather(x, grad=grad)),
            "broadcast": lambda x, grad=grad: dac.broadcast(x, 1, grad=grad),
        }
        for name, call in calls.items():
            (first,) = torch.autograd.grad((w * call(x) ** 2).sum(), x, create_graph=True)
            # Replicated, too: the squared norm of all ranks' gradients.
            norm = dac.all_reduce((first**2).sum(), grad=grad)
            (second,) = torch.autograd.grad(norm, x)
            seen[grad, name] = first.tolist(), second.tolist()
    return seen


def test_the_replicated_convention_counts_the_loss_once():
    size, w = 2, torch.tensor([1.0, 2.0, 3.0])
    found = run_ranks(_conventions, size)
    xs = [(torch.arange(3.0) + 1 + rank).requires_grad_() for rank in range(size)]
    values = {
        "all_reduce": sum(xs),
        "avg": sum(xs) / size,
        "max": torch.stack(xs).amax(0),
        "all_gather": sum(xs),
        "broadcast": xs[1] + 0 * xs[0],
    }
    for name, value in values.items():
        first = torch.autograd.grad((w * value**2).sum(), xs, create_graph=True)
        norm = sum((gradient**2).sum() for gradient in first)
        second = torch.autograd.grad(norm, xs)
        for rank in range(size):
            once, twice = found[rank]["replicated", name]
            assert once == pytest.approx(first[rank].tolist(), rel=1e-6), name
            assert twice == pytest.approx(second[rank].tolist(), rel=1e-6), name
            assert found[rank]["sum", name][0] == pytest.approx((size * first[rank]).tolist(), rel=1e-6)


def _kinds(rank):
    """No other rank takes part: each is refused before anything is sent."""
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "DTensor": distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }
    handle = dac.start(dac.all_reduce, torch.ones(2))
    seen = {name: _caught(TypeError, dac.all_reduce, x) for name, x in kinds.items() if rank}
    seen["handle"] = _caught(TypeError, copy.deepcopy, handle)
    return seen, handle.wait().tolist()


def test_tensors_of_other_kinds_and_copies_of_handles_are_refused():
    (_, first), (seen, second) = run_ranks(_kinds, 2, timeout=60, group_timeout=20)
    assert first == second == [2.0, 2.0]
    for name, text in {
        "DTensor": "to_local",
        "nested": "a nested one",
        "quantized": "a quantized one",
    }.items():
        assert text in seen[name]
    assert "a handle of all_reduce(SUM) cannot be copied" in seen["handle"]


def _operations(rank):
    seen = {}
    nan = float("nan")
    x = torch.tensor([1.0, nan, 2.0, nan] if rank else [nan, nan, 2.0, 1.0], requires_grad=True)
    for op in ("max", "min"):
        x.grad = None
        result = dac.all_reduce(x, op)
        result.sum().backward()
        seen[op] = result.isnan().tolist(), x.grad.tolist()
    factor = 2.0 + rank
    x = torch.ones(2, requires_grad=True)
    result = dac.all_reduce(x, dist._make_nccl_premul_sum(factor))
    result.sum().backward()
    seen["premul"] = result.tolist(), x.grad.tolist()
    bits = torch.tensor([1 + rank, 3])
    seen["bits"] = [dac.all_reduce(bits, op).tolist() for op in ("band", "bor", "bxor")]
    seen["ints"] = [dac.all_reduce(bits, op).tolist() for op in ("sum", "avg", "max", "product")]
    seen["float bits"] = _caught(TypeError, dac.all_reduce, x, "bor")
    seen["complex max"] = _caught(TypeError, dac.all_reduce, x + 0j, "max")
    seen["unknown"] = _caught(TypeError, dac.all_reduce, x, "median")
    half = torch.full((3,), 0.5, dtype=torch.float16, requires_grad=True)
    dac.all_reduce(half, ReduceOp.PRODUCT).sum().backward()
    seen["half"] = half.grad.dtype == torch.float16 and half.grad.tolist() == [1, 1, 1]
    return seen


def test_operations_and_what_they_do_not_mean():
    first, second = run_ranks(_operations, 2)
    for seen in (first, second):
        assert seen["max"][0] == [True, True, False, True]
        assert seen["premul"][0] == [5, 5]
        assert seen["bits"] == [[0, 3], [3, 3], [3, 0]]
        assert seen["ints"] == [[3, 6], [1, 3], [2, 3], [2, 9]]
        assert "BOR has no meaning for torch.float32" in seen["float bits"]
        assert "complex numbers have no order" in seen["complex max"]
        assert "got 'median'" in seen["unknown"]
        assert seen["half"]
    # The ranks with a NaN share the gradient of 2 (two ranks' losses), as do ranks with equal extrema.
    assert first["max"][1] == first["min"][1] == [2, 1, 1, 0]
    assert second["max"][1] == second["min"][1] == [0, 1, 1, 2]
    assert (first["premul"][1], second["premul"][1]) == ([4, 4], [6, 6])


def _errors(rank):
    x = torch.ones(2)
    pair = dist.new_group([0, 1])
    seen = {
        "src": _caught(ValueError, dac.broadcast, x, 7),
        "both": _caught(ValueError, dac.broadcast, x, 0, group_src=0),
        "neither": _caught(ValueError, dac.reduce, x),
        "group_dst": _caught(ValueError, dac.gather, x, group_dst=3),
        "grad": _caught(ValueError, dac.all_reduce, x, grad="mean"),
        "list": _caught(ValueError, dac.reduce_scatter, x, [x]),
        "shapes": _caught(ValueError, dac.reduce_scatter, x, [x, x, torch.ones(3)]),
        "split sum": _caught(ValueError, dac.all_to_all_single, x, x, [1, 1, 1], [1, 1, 0]),
        "equal split": _caught(ValueError, dac.all_to_all_single, x, x),
        "gathered": _caught(ValueError, dac.all_gather_base, torch.ones(4), x),
        "source": _caught(ValueError, dac.scatter, None, rank),
        "dim": _caught(IndexError, dac.all_gather_cat, x, 1),
        "no dim": _caught(IndexError, dac.all_gather_cat, x.sum()),
        "sizes": _caught(ValueError, dac.all_gather_cat, x, sizes=[2, 2]),
        "sizes word": _caught(ValueError, dac.all_gather_cat, x, sizes="Auto"),
        "own size": _caught(ValueError, dac.all_gather_cat, x, sizes=[1, 1, 1]),
        "parts": _caught(ValueError, dac.reduce_scatter_dim, x),
        "sizes sum": _caught(ValueError, dac.reduce_scatter_dim, x, sizes=[1, 1, 1]),
        "kept": _caught(ValueError, dac.all_to_all_dim, torch.ones(3, 2), 0, 1, output_sizes=[1, 1, 1]),
        "perm": _caught(ValueError, dac.permute, x, [(0, 1), (0, 2)]),
        "perm rank": _caught(ValueError, dac.permute, x, [(0, 3)]),
        "mixed": _caught(ValueError, dac.all_reduce_coalesced, [x, x.double()]),
        "none": _caught(ValueError, dac.all_gather_cat_coalesced, []),
    }
    if rank == 2:
        seen["member"] = _caught(ValueError, dac.all_reduce, x, group=pair)
    return seen


def test_bad_input_is_refused_before_communication():
    found = run_ranks(_errors, 3)
    for rank, seen in enumerate(found):
        assert "rank 7 is not a member" in seen["src"]
        assert seen["both"] == "give either src or group_src"
        assert seen["neither"] == "give either dst or group_dst"
        assert "group_dst 3 is out of range for a group of 3 ranks" in seen["group_dst"]
        assert "'mean'" in seen["grad"]
        assert "must have 3 tensors" in seen["list"]
        assert "(3,)" in seen["shapes"]
        assert (
            "output_split_sizes must be 3 numbers" in seen["split sum"] or "add up to 2" in seen["split sum"]
        )
        assert "cannot be split into 3 equal parts" in seen["equal split"]
        assert "4 elements, but 3 ranks send 2 each" in seen["gathered"]
        assert "the source needs a list of 3 tensors" in seen["source"], rank
        assert seen["dim"] == "dim 1 is out of range for a tensor of 1 dimensions"
        assert "of 0 dimensions" in seen["no dim"]
        assert seen["sizes"] == "sizes must be 3 lengths, got [2, 2]"
        assert seen["sizes word"] == "sizes must be None, 'auto' or 3 lengths, got 'Auto'"
        assert f"say 1 for rank {rank}, which has 2" in seen["own size"]
        assert "a length of 2 cannot be split into 3 equal parts" in seen["parts"]
        assert "sizes must be 3 numbers that add up to 2" in seen["sizes sum"]
        assert "which has 2" in seen["kept"]
        assert "each source in perm must be another rank from 0 to 2" in seen["perm"]
        assert "each destination in perm" in seen["perm rank"]
        assert "torch.float64" in seen["mixed"]
        assert "got none" in seen["none"]
    assert "rank 2 is not a member" in found[2]["member"]


def _large(rank, length):
    """Too large for the path of small sums, and not divisible by the world size."""
    size, first = dist.get_world_size(), torch.arange(float(length)).remainder(100_003)
    x = (first + rank).requires_grad_()
    version = x._version
    one, everyone, copied = dac.reduce(x, 1), dac.all_reduce(x), dac.broadcast(x, 1)
    right = size * first + sum(range(size))
    wrong = {
        "reduce": not torch.equal(one, right if rank == 1 else torch.zeros(length)),
        "all_reduce": not torch.equal(everyone, right),
        "broadcast": not torch.equal(copied, first + 1) or copied.data_ptr() == x.data_ptr(),
        "input": not torch.equal(x, first + rank) or x._version != version,
    }
    (2 * one + 3 * everyone + 5 * copied).sum().backward()
    gradient = 2.0 + 3 * size + (5 * size if rank == 1 else 0)
    wrong["gradient"] = not torch.equal(x.grad, torch.full((length,), gradient))
    return [name for name, is_wrong in wrong.items() if is_wrong]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [50_001, 1_500_001])
def test_large_sums_and_broadcasts(size, length):
    assert run_ranks(_large, size, length) == [[]] * size


def _unequal_large_sum(rank):
    return _caught(dac.CollectiveError, dac.all_reduce, torch.ones(50_000 + rank)) or "no error"


def test_a_large_sum_of_other_lengths_raises_on_two_ranks():
    for found in run_ranks(_unequal_large_sum, 2, group_timeout=3):
        assert "all_reduce(SUM) failed on rank" in found


def _tensor_parallel(rank):
    """Two layers, the first split by columns and the second by rows, against the unsplit layers."""
    random = torch.Generator().manual_seed(0)
    x, first, second = (
        torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (4, 6), (6, 2))
    )
    whole = ((x @ first).relu() @ second).square().sum()
    right = torch.autograd.grad(whole, (x, first, second))
    columns, rows = first[:, 3 * rank : 3 * rank + 3], second[3 * rank : 3 * rank + 3]
    hidden = (dac.copy_to_group(x) @ columns).relu()
    loss = dac.all_reduce(hidden @ rows, grad="replicated").square().sum()
    found = torch.autograd.grad(loss, (x, first, second))
    mine = torch.zeros(6, dtype=torch.bool)
    mine[3 * rank : 3 * rank + 3] = True
    return {
        "loss": abs(loss - whole).item(),
        "x": (found[0] - right[0]).abs().max().item(),
        "columns": (found[1] - right[1])[:, mine].abs().max().item(),
        "rows": (found[2] - right[2])[mine].abs().max().item(),
    }


def test_a_tensor_parallel_layer_has_the_gradients_of_the_whole():
    for found in run_ranks(_tensor_parallel, 2):
        # Sums of 24 products of numbers up to 100, in a different order.
        assert max(found.values()) < 1e-11, found


def _own_messages(rank):
    """A user's own message is pending while a collective runs."""
    theirs = torch.zeros(2)
    work = dist.irecv(theirs, 0) if rank else dist.isend(torch.full((2,), 7.0), 1)
    gathered = dac.all_gather_stack(torch.full((2,), float(rank)))
    work.wait()
    return gathered.tolist(), theirs.tolist()


def test_a_users_own_messages_do_not_get_mixed_up():
    first, second = run_ranks(_own_messages, 2)
    assert first[0] == second[0] == [[0, 0], [1, 1]]
    assert second[1] == [7, 7]


class _OwnMethods(torch.Tensor):
    def flatten(self, *_):
        return None

    @classmethod
    def __torch_function__(cls, *_):
        raise ValueError("the class's own")


def _subclasses(rank):
    x = torch.full((2,), 1.0 + rank).as_subclass(_OwnMethods)
    masked = masked_tensor(torch.ones(2), torch.tensor([True, False]))
    return (
        dac.all_reduce(x, "max").tolist(),
        dac.all_gather_base(torch.empty(4), x).tolist(),
        _caught(TypeError, dac.all_reduce, masked),
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
def test_a_subclass_is_a_plain_tensor_or_refused():
    refused = "tensor must be a tensor of this rank with memory of its own, got a MaskedTensor"
    assert run_ranks(_subclasses, 2, group_timeout=20) == [([2, 2], [1, 1, 2, 2], refused)] * 2


def _under_autocast(rank):
    """One rank pads its part, and torch refuses to concatenate float16 under autocast to bfloat16."""
    x = torch.ones(1 + rank, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = dac.all_gather_cat(x, sizes=[1, 2], check=True)
        waited = dac.start(dac.all_gather_cat, x, sizes=[1, 2]).wait()
        parts = dac.reduce_scatter_dim(whole, sizes=[1, 2])
    return whole.dtype == waited.dtype == parts.dtype == torch.float16, parts.tolist()


def test_autocast_leaves_dtypes_alone():
    assert run_ranks(_under_autocast, 2, group_timeout=20) == [(True, [[2, 2]]), (True, [[2, 2]] * 2)]
